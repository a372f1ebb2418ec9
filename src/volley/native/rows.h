#ifndef VOLLEY_ROWS_H
#define VOLLEY_ROWS_H

#include "common.h"

enum { SILU, GELU, CLAMPED };

typedef struct { /* activation of a gated MLP */
    int64_t kind;       /* CLAMPED: g sigmoid(alpha g) (1 + u) with the gate g at most ``limit`` and |u| at most ``limit`` */
    float alpha, limit;
} Activation;

typedef struct { /* a rotary embedding */
    const float *cos, *sin; /* [tokens, width] */
    int64_t width;          /* number of first elements of each head that are rotated */
    int64_t rounds;         /* each product is rounded to bf16 */
} Turns;

typedef struct { /* heads of queries and keys */
    int64_t queries, keys, dim;
    int64_t whole;  /* all heads are normed as one */
    int64_t rounds; /* see norm_row */
    float eps;
} Heads;

/* Compute x / rms(x) * weight; ``rounds``: round to bf16 before the weight, too. */
void norm_row(const bf16 *x, const float *weight, bf16 *out, int64_t size, float eps, int64_t rounds);

/* Norm (by weights or null) and rotate (by ``turns`` or null) queries and keys of one token in place. */
void turn_row(bf16 *row, const float *of_queries, const float *of_keys, const Turns *turns, int64_t token, const Heads *of);

/* Compute activation(gate) * up of ``size`` elements. */
void gate_row(const bf16 *gate, const bf16 *up, bf16 *out, int64_t size, const Activation *activation);

/* Add update * scale to x in place. */
void add_row(bf16 *x, const bf16 *update, float scale, int64_t size);

#endif
