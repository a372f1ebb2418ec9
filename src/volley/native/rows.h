#ifndef VOLLEY_ROWS_H
#define VOLLEY_ROWS_H

#include "common.h"

enum { SILU, GELU, CLAMPED };

typedef struct { /* what the gates of an MLP go through */
    int64_t kind;       /* CLAMPED: x sigmoid(alpha x) of gates up to ``limit``, times 1 + what is gated, within ``limit`` */
    float alpha, limit;
} Activation;

typedef struct { /* of a rotary embedding */
    const float *cos, *sin; /* [tokens, width] */
    int64_t width;          /* numbers at the beginning of each head that are turned */
    int64_t rounds;         /* each product is rounded to bf16 */
} Turns;

typedef struct { /* of queries and keys */
    int64_t queries, keys, dim;
    int64_t whole;  /* all heads are normed as one */
    int64_t rounds; /* as norm_row has it */
    float eps;
} Heads;

/* x / rms(x) * weight; ``rounds``: to bf16 before the weight, too. */
void norm_row(const bf16 *x, const float *weight, bf16 *out, int64_t size, float eps, int64_t rounds);

/* Norm (by weights that may be null) and rotary embedding (which may be null) of queries and keys of one token, in place. */
void turn_row(bf16 *row, const float *of_queries, const float *of_keys, const Turns *turns, int64_t token, const Heads *of);

/* activation(gate) * up of ``size`` elements */
void gate_row(const bf16 *gate, const bf16 *up, bf16 *out, int64_t size, const Activation *activation);

/* x + update * scale, in place */
void add_row(bf16 *x, const bf16 *update, float scale, int64_t size);

#endif
