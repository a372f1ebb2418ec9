#ifndef VOLLEY_ROWS_H
#define VOLLEY_ROWS_H

#include "common.h"

void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t size, float eps);

/* Norm (by weights that may be null) and rotary embedding of the query heads and key heads of one token, in place. */
void turn_row(bf16 *row, const bf16 *of_queries, const bf16 *of_keys, const bf16 *cos, const bf16 *sin, int64_t queries,
              int64_t keys, int64_t dim, float eps);

/* silu(gate) * up of ``size`` elements */
void gate_row(const bf16 *gate, const bf16 *up, bf16 *out, int64_t size);

#endif
