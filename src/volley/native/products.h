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

typedef struct { /* inputs of a product as its kernel reads them */
    int8_t *values; /* codes if the product is of codes, else bf16: [rows, inputs], or in units (prepare) */
    float *scales;  /* [rows, inputs / group], of codes */
    int32_t *sums;  /* [rows, inputs / group] of codes, times -8 for int4 and -128 for int8: the codes of weights begin there */
} Prepared;

#define MOST 64     /* rows that share one look at a block */
#define TOGETHER 16 /* blocks of bf16 that are summed in one call, and by AVX2 with inputs that are widened once */

/* ``call(four, group)`` for a product of codes; ``four`` (int4) and ``group`` are constants. */
#define BY_KIND(product, call)                                                                      \
    if ((product)->group == FINE) {                                                                 \
        (product)->kind == INT4 ? call(1, FINE) : call(0, FINE);                                    \
    } else {                                                                                        \
        (product)->kind == INT4 ? call(1, GROUP) : call(0, GROUP);                                  \
    }

/* A whole product, by all threads of the region it is called in: x [rows, inputs], rows ``stride`` apart -> out [rows, outputs],
 * added to what is there if ``add``. ``room`` is for rows * inputs values of bf16, and their scales and sums. */
void multiply(const Product *product, const bf16 *x, int64_t stride, Prepared room, int64_t rows, bf16 *out, int64_t add);

#if X86
/* Sums [rows][16] with AVX2: of several blocks of bf16 weights, and of a block of codes, of rows from ``row`` on. */
void blocks_avx2(const uint8_t *codes, const bf16 *x, int64_t stride, int64_t inputs, int64_t blocks, int64_t rows,
                 float (*sums)[MOST][BLOCK]);
void block_codes_avx2(const Product *product, const uint8_t *codes, const void *scales, Prepared x, int64_t row, int64_t rows,
                      float (*sums)[BLOCK]);
#endif

#endif
