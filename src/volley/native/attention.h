#ifndef VOLLEY_ATTENTION_H
#define VOLLEY_ATTENTION_H

#include "common.h"

typedef struct {
    int64_t row, rows;      /* first token of the batch that sees these keys, and number of tokens */
    int64_t slots, length;  /* first entry in the list of slots, and number of keys */
    int64_t first;          /* position of the first key */
} Unit;

typedef struct { /* attention plan of a batch, for all layers with the same window */
    const int64_t *written; /* the slot of each token */
    int64_t tokens;
    const Unit *units;
    int64_t num_units;
    const int64_t *slots;         /* of all units, end to end */
    const int64_t *begins, *ends; /* the positions that each token sees */
} Plan;

typedef struct { /* attention of one layer */
    const bf16 *queries, *keys, *values; /* [tokens, heads (shared), dim], rows ``stride`` apart */
    bf16 *key_pool, *value_pool;         /* [slots, shared, dim] */
    bf16 *out;                           /* [tokens, heads, dim] */
    const float *sinks;                  /* [heads] or null: a score in each softmax without a value */
    int64_t stride, heads, shared, dim;
    float scale, cap;                    /* scores become cap * tanh(score / cap), unless it is 0 */
} AttentionCall;

#define PART 64    /* keys that are processed together; parts begin at multiples of it */
#define VECTORS 64 /* queries (tokens times heads that share keys) that are computed together */
#define LARGEST 256

typedef struct { /* buffers for one part */
    float scores[VECTORS][PART];
    float mixed[VECTORS][LARGEST];
    float most[VECTORS], sum[VECTORS];
    bf16 gathered[VECTORS * LARGEST];
    bf16 weights[VECTORS][PART];
    bf16 paired[PART * LARGEST]; /* values of two keys side by side */
    bf16 keys[PART * LARGEST]; /* keys of one part: in rows with tiles, in columns without */
    bf16 turned[VECTORS * LARGEST]; /* queries: [vectors / 16][dim / 32][16 pairs of numbers][16 vectors][2] */
    float widened[VECTORS * LARGEST]; /* queries in fp32 */
} Work;

#if X86
void score_avx2(Work *work, const bf16 *const *keys, int count, int vectors, int dim, float scale);
void mix_avx2(Work *work, const bf16 *const *values, int count, int vectors, int dim);
#endif

/* Store K and V of one token. */
void store_row(const AttentionCall *call, const Plan *plan, int64_t token);

/* Attend for all units with the threads of the enclosing parallel region; ends with a barrier. */
void attend_all(const AttentionCall *call, const Plan *plan);

#endif
