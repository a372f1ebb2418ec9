/* Blocks of GGUF files: decode them, or lay them out for the matmuls. Reference, to the bit: the package gguf. */
#include "products.h"

/* Bytes of a block of 32 or 256 numbers. */
static const int64_t BYTES[] = {
    [Q8_0] = 34,  [Q5_0] = 22,  [Q4_0] = 18, [Q5_1] = 24, [Q4_1] = 20,   [Q6_K] = 210,   [Q5_K] = 176,
    [Q4_K] = 144, [Q3_K] = 110, [Q2_K] = 84, [MXFP4] = 17, [IQ4_NL] = 18, [IQ4_XS] = 136,
};

typedef struct {
    int8_t codes[LARGE];   /* codes of numbers, or indices into a table */
    uint8_t halves[2][2];  /* fp16 (MXFP4: bf16): the scale, and the common factor of the minima */
    int8_t factors[16][2]; /* PRODUCT: each group's integer factors of these */
} Parts;

/* Unpack the nibbles of ``size`` bytes, first all low ones. */
INLINE void nibbles(const uint8_t *bytes, int size, int8_t *codes) {
    for (int i = 0; i < size; i++) codes[i] = (int8_t)(bytes[i] & 15), codes[i + size] = (int8_t)(bytes[i] >> 4);
}

/* Add the fifth bits of 32 codes. */
INLINE void fifth_bits(const uint8_t *bits, int8_t *codes) {
    for (int byte = 0; byte < 4; byte++)
        for (int i = 0; i < 8; i++) codes[byte * 8 + i] = (int8_t)(codes[byte * 8 + i] | (bits[byte] >> i & 1) << 4);
}

INLINE void less(int8_t *codes, int size, int zero) {
    for (int i = 0; i < size; i++) codes[i] = (int8_t)(codes[i] - zero);
}

/* Open a block of 32 numbers: a scale, perhaps a minimum, perhaps fifth bits, codes. */
INLINE void open_small(int kind, const uint8_t *block, Parts *to) {
    int halves = kind == MXFP4 ? 1 : 2 * num_scales(kind), is_five = FORMATS[kind].bits == 5;
    if (kind == MXFP4) { /* a power of two, halved as the table's numbers are doubled: in bf16 */
        uint16_t scale = (uint16_t)(block[0] < 2 ? 32 << block[0] : (block[0] - 1) << 7);
        memcpy(to->halves[0], &scale, 2);
    } else
        memcpy(to->halves, block, halves);
    if (kind == Q8_0) {
        memcpy(to->codes, block + 2, 32);
        return;
    }
    nibbles(block + halves + 4 * is_five, 16, to->codes);
    if (is_five) fifth_bits(block + halves, to->codes);
    if (!FORMATS[kind].table) less(to->codes, 32, FORMATS[kind].zero);
}

/* Open Q4_K and Q5_K: scales and minima of 32 numbers have six bits each; the bits of the last four groups are split. */
INLINE void open_with_least(int kind, const uint8_t *block, Parts *to) {
    const uint8_t *six = block + 4, *fifth = block + 16, *halves = block + (kind == Q5_K ? 48 : 16);
    memcpy(to->halves, block, 4);
    for (int g = 0; g < 8; g++) {
        to->factors[g][0] = (int8_t)(g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4);
        to->factors[g][1] = (int8_t)(g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4);
        for (int i = 0; i < 32; i++) {
            int code = halves[g / 2 * 32 + i] >> g % 2 * 4 & 15;
            if (kind == Q5_K) code |= (fifth[i] >> g & 1) << 4;
            to->codes[g * 32 + i] = (int8_t)code;
        }
    }
}

INLINE void open_q6_k(const uint8_t *block, Parts *to) {
    memcpy(to->halves[0], block + 208, 2);
    for (int g = 0; g < 16; g++) {
        int at = g % 8 * 16; /* in a half of the block */
        const uint8_t *low = block + g / 8 * 64 + at % 64, *high = block + 128 + g / 8 * 32 + at % 32;
        to->factors[g][0] = (int8_t)block[192 + g];
        for (int i = 0; i < 16; i++)
            to->codes[g * 16 + i] = (int8_t)(((low[i] >> at / 64 * 4 & 15) | (high[i] >> at / 32 * 2 & 3) << 4) - 32);
    }
}

/* Open Q3_K and Q2_K: four groups of 32 numbers share the bytes of their bit pairs; all eight share those of the third bits. */
INLINE void open_pairs(int kind, const uint8_t *block, Parts *to) {
    const uint8_t *pairs = block + (kind == Q3_K ? 32 : 16), *six = block + 96;
    memcpy(to->halves, block + (kind == Q3_K ? 108 : 80), kind == Q3_K ? 2 : 4);
    for (int g = 0; g < 16; g++) {
        int at = g % 2 * 16;
        if (kind == Q3_K)
            to->factors[g][0] = (int8_t)(((six[g % 8] >> g / 8 * 4 & 15) | (six[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32);
        else
            to->factors[g][0] = (int8_t)(block[g] & 15), to->factors[g][1] = (int8_t)(block[g] >> 4);
        for (int i = 0; i < 16; i++) {
            int code = pairs[g / 8 * 32 + at + i] >> g % 8 / 2 * 2 & 3;
            if (kind == Q3_K) code += (block[at + i] >> g / 2 & 1) * 4 - 4;
            to->codes[g * 16 + i] = (int8_t)code;
        }
    }
}

INLINE void open_iq4_xs(const uint8_t *block, Parts *to) {
    memcpy(to->halves[0], block, 2);
    int high = block[2] | block[3] << 8;
    for (int g = 0; g < 8; g++) {
        to->factors[g][0] = (int8_t)(((block[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4) - 32);
        nibbles(block + 8 + g * 16, 16, to->codes + g * 32);
    }
}

INLINE void open_block(int kind, const uint8_t *block, Parts *to) {
    int subtracts = FORMATS[kind].scale == PRODUCT && num_scales(kind) > 1; /* GGUF subtracts minima, C adds them */
    switch (kind) {
        case Q5_K:
        case Q4_K: open_with_least(kind, block, to); break;
        case Q6_K: open_q6_k(block, to); break;
        case Q3_K:
        case Q2_K: open_pairs(kind, block, to); break;
        case IQ4_XS: open_iq4_xs(block, to); break;
        default: open_small(kind, block, to);
    }
    if (subtracts) to->halves[1][1] ^= 128;
}

INLINE float scale_of(int kind, const Parts *parts, int place, int g) {
    uint16_t half;
    memcpy(&half, parts->halves[place], 2);
    float scale = FORMATS[kind].scale == BRAIN ? widen(half) : of_half(half);
    return FORMATS[kind].scale == PRODUCT ? scale * (float)parts->factors[g][place] : scale;
}

/* Decode one block. Products of scales, integers and codes are exact (11 + 6 + 5 bits), so fused multiply-adds change
 * nothing. */
INLINE void decode_block(int kind, const uint8_t *block, float *wide, bf16 *out) {
    Parts parts;
    const int8_t *table = TABLES[FORMATS[kind].table];
    int group = FORMATS[kind].group, numbers = scaled_inputs(kind);
    open_block(kind, block, &parts);
    for (int g = 0; g < numbers / group; g++) {
        float scale = scale_of(kind, &parts, 0, g), least = num_scales(kind) > 1 ? scale_of(kind, &parts, 1, g) : 0;
        for (int i = g * group; i < (g + 1) * group; i++) {
            float code = (float)(FORMATS[kind].table ? table[parts.codes[i]] : parts.codes[i]);
            float value = num_scales(kind) > 1 ? scale * code + least : scale * code;
            if (wide)
                wide[i] = value;
            else
                out[i] = narrow(value);
        }
    }
}

FOR_EACH_CPU static void decode_row(int64_t kind, const uint8_t *block, float *wide, bf16 *out) {
#define DECODE(kind) decode_block(kind, block, wide, out)
    BY_STORED(kind, DECODE)
}

/* Decode blocks to fp32 or to bf16; the other output is null. */
void decode_blocks(int64_t kind, const uint8_t *blocks, int64_t count, float *wide, bf16 *out) {
    int64_t numbers = scaled_inputs((int)kind), bytes = BYTES[kind];
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++)
        decode_row(kind, blocks + i * bytes, wide ? wide + i * numbers : 0, out ? out + i * numbers : 0);
}

/* Lay out block ``at`` of row ``row`` of 16 outputs: its codes as put_pack does, its scales and minima, and their factors. */
INLINE void lay_out_block(int kind, const uint8_t *block, int64_t at, int64_t row, uint8_t *codes, uint8_t *scales) {
    Parts parts;
    int numbers = scaled_inputs(kind), groups = numbers / FORMATS[kind].group;
    uint8_t *direct = (uint8_t *)scales_at(kind, scales, at * groups), *factors;
    open_block(kind, block, &parts);
    for (int i = 0; i < numbers; i += PACK)
        put_pack(kind, parts.codes + i, codes + (at * numbers + i) * 2 * FORMATS[kind].bits, row);
    for (int place = 0; place < num_scales(kind); place++) {
        memcpy(direct + (place * BLOCK + row) * 2, parts.halves[place], 2);
        for (int g = 0; g < groups && FORMATS[kind].scale == PRODUCT; g++) {
            factors = (uint8_t *)factors_at(kind, scales, at * groups + g);
            factors[place * BLOCK + row] = (uint8_t)parts.factors[g][place];
        }
    }
}

FOR_EACH_CPU static void lay_out_row(int64_t kind, const uint8_t *blocks, int64_t count, int64_t row, uint8_t *codes,
                                     uint8_t *scales) {
#define LAY_OUT(kind)                                                                               \
    for (int64_t at = 0; at < count; at++) lay_out_block(kind, blocks + at * BYTES[kind], at, row, codes, scales)
    BY_STORED(kind, LAY_OUT)
}

FOR_EACH_CPU static void pad_row(int64_t kind, int64_t inputs, int64_t row, uint8_t *codes) {
    static const int8_t none[PACK];
#define PAD(kind)                                                                                   \
    for (int64_t at = 0; at < inputs; at += PACK) put_pack(kind, none, codes + at * 2 * FORMATS[kind].bits, row)
    BY_STORED(kind, PAD)
}

/* Lay out blocks [rows, count]: codes [rows / 16][inputs / 32][bits][16][4], scales [rows / 16][count][scale_bytes]. Rows that are
 * missing in the last 16 are zeros. */
void lay_out_blocks(int64_t kind, const uint8_t *blocks, int64_t rows, int64_t count, uint8_t *codes, uint8_t *scales) {
    int64_t inputs = count * scaled_inputs((int)kind), of_codes = inputs * 2 * FORMATS[kind].bits;
    int64_t of_scales = count * scale_bytes((int)kind);
#pragma omp parallel for
    for (int64_t i = 0; i < (rows + BLOCK - 1) / BLOCK; i++) {
        uint8_t *to = codes + i * of_codes, *scale = scales + i * of_scales;
        if ((i + 1) * BLOCK > rows) memset(scale, 0, of_scales);
        for (int64_t r = 0; r < BLOCK; r++) {
            int64_t own = i * BLOCK + r;
            if (own < rows)
                lay_out_row(kind, blocks + own * count * BYTES[kind], count, r, to, scale);
            else
                pad_row(kind, inputs, r, to);
        }
    }
}
