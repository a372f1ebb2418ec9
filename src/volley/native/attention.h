#ifndef VOLLEY_ATTENTION_H
#define VOLLEY_ATTENTION_H

#include "common.h"

typedef struct {
    int64_t row, rows;      /* tokens of the batch that see these keys */
    int64_t slots, length;  /* their place in the list of slots, and how many */
    int64_t first;          /* the position of the first of them */
} Unit;

typedef struct { /* of a batch, for all layers that see alike */
    const int64_t *written; /* the slot of each token */
    int64_t tokens;
    const Unit *units;
    int64_t num_units;
    const int64_t *slots;         /* of all units, end to end */
    const int64_t *begins, *ends; /* the positions that each token sees */
} Plan;

typedef struct { /* of a layer */
    const bf16 *queries, *keys, *values; /* [tokens, heads (shared), dim], rows ``stride`` apart */
    bf16 *key_pool, *value_pool;         /* [slots, shared, dim] */
    bf16 *out;                           /* [tokens, heads, dim] */
    int64_t stride, heads, shared, dim;
    float scale;
} AttentionCall;

/* Keep K and V of one token. */
void store_row(const AttentionCall *call, const Plan *plan, int64_t token);

/* Attention of all units, shared among the threads of the region it is called in; waits for all of them. */
void attend_all(const AttentionCall *call, const Plan *plan);

#endif
