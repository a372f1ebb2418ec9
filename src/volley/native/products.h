#ifndef VOLLEY_PRODUCTS_H
#define VOLLEY_PRODUCTS_H

#include "common.h"

#define BLOCK 16  /* outputs in a block of weights */
#define GROUP 64  /* inputs that share a scale in INT8 and INT4 */
#define PACK 32   /* inputs whose codes are packed together */
#define LARGE 256 /* inputs that share the fp16 scale of scales */

/* bf16 numbers, volley's quantised formats, those of GGUF files, and small floats, in the order of FORMATS and of
 * weights.py. */
enum { BF16, INT8, INT4, Q8_0, Q5_0, Q4_0, Q5_1, Q4_1, Q6_K, Q5_K, Q4_K, Q3_K, Q2_K, IQ4_NL, IQ4_XS, MXFP4, IQ3_XXS, IQ3_S, IQ2, IQ1,
       TQ, FP8, NVFP4 };
enum { NONE, OF_OUTPUT, FLOAT, HALF, BRAIN, PRODUCT, OWN }; /* OWN: widen_block knows; PRODUCT: fp16 for 256 inputs times an integer for each group */

typedef struct {
    int bits, group; /* bits of a code; inputs that share a scale */
    int zero;        /* the code of zero; if it is 0, groups have a minimum, which is added to code times scale */
    int scale, table;
    float unit; /* for PRODUCT: a power of two that the scale is multiplied by; 0 is 1 */
} Format;

static const Format FORMATS[] = {
    [BF16] = {16, GROUP, 0, NONE, 0},     [INT8] = {8, GROUP, 128, OF_OUTPUT, 0}, [INT4] = {4, GROUP, 8, FLOAT, 0},
    [Q8_0] = {8, 32, 128, HALF, 0},       [Q5_0] = {5, 32, 16, HALF, 0},          [Q4_0] = {4, 32, 8, HALF, 0},
    [Q5_1] = {5, 32, 0, HALF, 0},         [Q4_1] = {4, 32, 0, HALF, 0},           [Q6_K] = {6, 16, 32, PRODUCT, 0},
    [Q5_K] = {5, 32, 0, PRODUCT, 0},      [Q4_K] = {4, 32, 0, PRODUCT, 0},        [Q3_K] = {3, 16, 4, PRODUCT, 0},
    [Q2_K] = {2, 16, 0, PRODUCT, 0},      [IQ4_NL] = {4, 32, 128, HALF, 1},       [IQ4_XS] = {4, 32, 128, PRODUCT, 1},
    [MXFP4] = {4, 32, 128, BRAIN, 2},     [FP8] = {8, GROUP, 0, OWN, 0},          [NVFP4] = {4, GROUP, 0, OWN, 0},
    [IQ3_XXS] = {4, 32, 128, PRODUCT, 3, 0.25f}, [IQ3_S] = {4, 32, 128, PRODUCT, 4}, [IQ2] = {3, 16, 128, PRODUCT, 5, 0.125f},
    [IQ1] = {3, 16, 128, PRODUCT, 6, 0.125f},    [TQ] = {2, 32, 2, PRODUCT, 0},
};

/* Numbers that the codes of a table index. */
static const int8_t TABLES[][16] = {
    {0},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62},
    {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15},
    {8, 25, 43, 0, -8, -25, -43, 0},
    {-7, 1, 9, 0, -9, -1, 7, 0},
};

INLINE float unit_of(int kind) { return FORMATS[kind].unit ? FORMATS[kind].unit : 1.0f; }

/* Return 1 for scales alone, 2 for scales and minima. */
INLINE int num_scales(int kind) { return FORMATS[kind].zero ? 1 : 2; }

/* Return the inputs whose scales are stored together, and the bytes of these for a block: first fp16 (bf16, fp32) numbers
 * [1 or 2][16], then for PRODUCT integers [groups][1 or 2][16] of a byte. */
INLINE int scaled_inputs(int kind) { return FORMATS[kind].scale == PRODUCT ? LARGE : FORMATS[kind].group; }
INLINE int scale_bytes(int kind) {
    int direct = (FORMATS[kind].scale == FLOAT ? 4 : 2) * BLOCK * num_scales(kind);
    return FORMATS[kind].scale == PRODUCT ? direct + LARGE / FORMATS[kind].group * BLOCK * num_scales(kind) : direct;
}

/* Return the addresses of the scales of group ``g``, and of its integer factors. */
INLINE const uint8_t *scales_at(int kind, const uint8_t *scales, int64_t g) {
    return scales + g * FORMATS[kind].group / scaled_inputs(kind) * scale_bytes(kind);
}
INLINE const uint8_t *factors_at(int kind, const uint8_t *scales, int64_t g) {
    int groups = LARGE / FORMATS[kind].group, size = BLOCK * num_scales(kind);
    return scales_at(kind, scales, g) + 2 * size + g % groups * size;
}

/* Pack the codes of 32 inputs of row ``row`` into a block, [lines of 64 bytes][16][4], in quads of inputs. With eight bits a line
 * holds a quad. With fewer, the first lines hold the low four bits of two quads (below four bits: the low two of four quads). The
 * next lines hold the third or fifth bits of all eight quads, or the two high bits of four quads. */
INLINE void put_pack(int64_t kind, const int8_t *codes, uint8_t *pack, int64_t row) {
    int bits = FORMATS[kind].bits, low = bits == 8 ? 8 : bits < 4 ? 2 : 4, high = bits - low, line = 0;
    uint32_t quads[8], zero = (FORMATS[kind].table ? 0 : FORMATS[kind].zero) * 0x01010101u;
    for (int quad = 0; quad < 8; quad++) {
        memcpy(quads + quad, codes + 4 * quad, 4);
        quads[quad] = (quads[quad] & ((1 << bits) - 1) * 0x01010101u) ^ zero; /* zero is half the range */
    }
    for (int part = 0; part < 2; part++) { /* low bits, high bits */
        int size = part ? high : low, from = part ? low : 0;
        uint32_t mask = ((1 << size) - 1) * 0x01010101u;
        for (int quad = 0; size && quad < 8; line++) {
            uint32_t together = 0;
            for (int place = 0; place < 8; place += size, quad++) together |= (quads[quad] >> from & mask) << place;
            memcpy(pack + line * 64 + row * 4, &together, 4);
        }
    }
}

typedef struct Product {
    int64_t kind, inputs, outputs, stride; /* stride: from row to row of the outputs */
    const uint8_t *codes; /* BF16: [outputs / 16][inputs / 2][16][2]; codes: [outputs / 16][inputs / 32][bits][16][4] (put_pack) */
    const void *scales;   /* INT8: fp32 [outputs]; else [outputs / 16][inputs / scaled_inputs][scale_bytes] */
    const bf16 *bias;     /* [outputs] or null */
    const struct Product *next; /* the matmul of the next outputs with the same inputs, or null */
} Product;

typedef struct { /* inputs of a matmul, packed for its kernel */
    int8_t *values; /* codes if the weight is quantised, else bf16: [rows, inputs], or in units (prepare) */
    float *scales;  /* [inputs / group, rows] */
    int32_t *sums;  /* [inputs / group, rows]: sums of codes times -zero; for formats with minima sums times the scale, in fp32 */
    int64_t rows;
} Prepared;

/* Small floats become bf16 numbers, block by block, when they are multiplied: the results are those of a bf16 weight. */
INLINE int is_wide(int64_t kind) { return kind == BF16 || FORMATS[kind].scale == OWN; }
INLINE int64_t own_scale_bytes(int64_t kind, int64_t inputs) { return kind == FP8 ? inputs / GROUP * BLOCK * 4 : BLOCK * 4 + inputs; }

/* Decode a block of 16 outputs to bf16 numbers [inputs / 2][16][2]. FP8: e4m3 codes in this order, and fp32 scales
 * [inputs / 64][16]. NVFP4: pairs of e2m1 codes [inputs / 2][16], the first in the low bits; a divisor of scales in fp32 [16],
 * then e4m3 scales [inputs / 16][16]. */
void widen_block(int64_t kind, const uint8_t *codes, const uint8_t *scales, int64_t inputs, bf16 *out);

#define MOST 64     /* rows that share one read of a block */
#define TOGETHER 16 /* bf16 blocks summed in one call; AVX2 converts their inputs to fp32 once */

/* Call ``call(kind)`` with a constant: for GGUF's types that blocks.c reads, and for all quantised formats. */
#define BY_STORED(kind, call)                                                                       \
    switch (kind) {                                                                                 \
        case Q8_0: call(Q8_0); break;                                                               \
        case Q5_0: call(Q5_0); break;                                                               \
        case Q4_0: call(Q4_0); break;                                                               \
        case Q5_1: call(Q5_1); break;                                                               \
        case Q4_1: call(Q4_1); break;                                                               \
        case Q6_K: call(Q6_K); break;                                                               \
        case Q5_K: call(Q5_K); break;                                                               \
        case Q4_K: call(Q4_K); break;                                                               \
        case Q3_K: call(Q3_K); break;                                                               \
        case Q2_K: call(Q2_K); break;                                                               \
        case IQ4_NL: call(IQ4_NL); break;                                                           \
        case IQ4_XS: call(IQ4_XS); break;                                                           \
        case MXFP4: call(MXFP4); break;                                                             \
    }
#define BY_KIND(kind, call)                                                                         \
    switch (kind) {                                                                                 \
        case INT8: call(INT8); break;                                                               \
        case INT4: call(INT4); break;                                                               \
        case IQ3_XXS: call(IQ3_XXS); break;                                                         \
        case IQ3_S: call(IQ3_S); break;                                                             \
        case IQ2: call(IQ2); break;                                                                 \
        case IQ1: call(IQ1); break;                                                                 \
        case TQ: call(TQ); break;                                                                   \
        default: BY_STORED(kind, call)                                                              \
    }

/* Multiply with all threads of the enclosing parallel region: x [rows, inputs], rows ``stride`` apart -> out [rows, outputs],
 * added to out if ``add``. ``prepared`` holds rows * inputs values of bf16, and their scales and sums. */
void multiply(const Product *product, const bf16 *x, int64_t stride, Prepared prepared, int64_t rows, bf16 *out, int64_t add);

#if X86
/* Compute sums [rows][16] with AVX2: for several blocks of bf16 weights, and for a block of codes, from row ``row`` on. */
void blocks_avx2(const uint8_t *codes, const bf16 *x, int64_t stride, int64_t inputs, int64_t blocks, int64_t rows,
                 float (*sums)[MOST][BLOCK]);
void block_codes_avx2(const Product *product, const uint8_t *codes, const uint8_t *scales, Prepared x, int64_t row, int64_t rows,
                      float (*sums)[BLOCK]);
#endif

#endif
