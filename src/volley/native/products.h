#ifndef VOLLEY_PRODUCTS_H
#define VOLLEY_PRODUCTS_H

#include "common.h"

#define BLOCK 16 /* outputs whose weights lie together */
#define GROUP 64 /* inputs that share a scale in int8 and int4 */

enum { BF16, INT8, INT4 };

typedef struct {
    int64_t kind, inputs, outputs;
    const uint8_t *codes; /* [outputs / 16][inputs / 2 (4)][16][2 (4)] */
    const float *scales;  /* int8: [outputs]; int4: [outputs / 16][inputs / 64][16] */
    const bf16 *bias;     /* [outputs] or null */
} Product;

typedef struct { /* inputs of an int8 or int4 product */
    int8_t *codes; /* [rows, inputs] */
    float *scales; /* [rows, inputs / 64] */
    int32_t *sums; /* [rows, inputs / 64] of codes */
} Quantised;

#define MOST 64 /* rows that share one look at a block */

int64_t num_blocks(const Product *product);

/* Codes of x [rows, inputs], rows ``stride`` apart, for rows [begin, end). */
void quantise(const bf16 *x, int64_t stride, int64_t inputs, Quantised to, int64_t begin, int64_t end);

/* The outputs of blocks [begin, end): out [rows, outputs], added to what is there if ``add``. x is not read if the product
 * is of codes. */
void multiply(const Product *product, const bf16 *x, int64_t stride, Quantised codes, int64_t rows, bf16 *out, int64_t add,
              int64_t begin, int64_t end);

#if X86
/* Sums [rows][16] of a block, with AVX2: of bf16 weights, and of codes of rows from ``row`` on. */
void block_avx2(const uint8_t *codes, const bf16 *x, int64_t stride, int64_t inputs, int64_t rows, float (*sums)[BLOCK]);
void block_codes_avx2(const Product *product, const uint8_t *codes, const float *scales, Quantised x, int64_t row, int64_t rows,
                      float (*sums)[BLOCK]);
#endif

#endif
