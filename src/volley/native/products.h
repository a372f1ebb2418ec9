#ifndef VOLLEY_PRODUCTS_H
#define VOLLEY_PRODUCTS_H

#include "common.h"

#define BLOCK 16 /* outputs whose weights lie together */
#define GROUP 64 /* inputs that share a scale in int8 and int4 */
#define FINE 32  /* the same of codes that come from blocks of a GGUF file */

enum { BF16, INT8, INT4 };

typedef struct {
    int64_t kind, inputs, outputs, group; /* group: GROUP or FINE */
    const uint8_t *codes;                 /* [outputs / 16][inputs / 2 (4)][16][2 (4)] */
    const void *scales;   /* GROUP: fp32, int8 [outputs], int4 [outputs / 16][inputs / 64][16]; FINE: fp16 [outputs / 16][inputs / 32][16] */
    const bf16 *bias;     /* [outputs] or null */
} Product;

typedef struct { /* inputs of an int8 or int4 product */
    int8_t *codes; /* [rows, inputs] */
    float *scales; /* [rows, inputs / group] */
    int32_t *sums; /* [rows, inputs / group] of codes, times -8 for int4 and -128 for int8: the codes of weights begin there */
} Quantised;

#define MOST 64     /* rows that share one look at a block */
#define TOGETHER 16 /* blocks of bf16 that share inputs widened by AVX2 */

/* ``ROWS(four, group, r, count)`` for up to four rows at a time; ``four`` (int4), ``group`` and ``count`` are constants. */
#define ROWS_INT4(r, count) ROWS(1, GROUP, r, count)
#define ROWS_INT8(r, count) ROWS(0, GROUP, r, count)
#define ROWS_FINE_INT4(r, count) ROWS(1, FINE, r, count)
#define ROWS_FINE_INT8(r, count) ROWS(0, FINE, r, count)
#define BY_KIND(product, rows)                                                                      \
    if ((product)->group == FINE) {                                                                 \
        if ((product)->kind == INT4) BY_FOUR(rows, ROWS_FINE_INT4) else BY_FOUR(rows, ROWS_FINE_INT8) \
    } else {                                                                                        \
        if ((product)->kind == INT4) BY_FOUR(rows, ROWS_INT4) else BY_FOUR(rows, ROWS_INT8)         \
    }

int64_t num_blocks(const Product *product);

/* Codes of the inputs x [rows, inputs] of a product, rows ``stride`` apart, for rows [begin, end). */
void quantise(const Product *product, const bf16 *x, int64_t stride, Quantised to, int64_t begin, int64_t end);

/* The outputs of blocks [begin, end): out [rows, outputs], added to what is there if ``add``. x is not read if the product
 * is of codes. */
void multiply(const Product *product, const bf16 *x, int64_t stride, Quantised codes, int64_t rows, bf16 *out, int64_t add,
              int64_t begin, int64_t end);

#if X86
/* Sums [rows][16] with AVX2: of several blocks of bf16 weights, and of a block of codes, of rows from ``row`` on. */
void blocks_avx2(const uint8_t *codes, const bf16 *x, int64_t stride, int64_t inputs, int64_t blocks, int64_t rows,
                 float (*sums)[MOST][BLOCK]);
void block_codes_avx2(const Product *product, const uint8_t *codes, const void *scales, Quantised x, int64_t row, int64_t rows,
                      float (*sums)[BLOCK]);
#endif

#endif
