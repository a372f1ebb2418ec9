/* Blocks of GGUF files: decoded, or turned into codes with an fp16 scale for 32 inputs. References, to the bit: the package gguf,
 * and quantise_finely in volley/native/codes.py. */
#include "products.h"

#define LARGE 256 /* numbers of a block */

enum { Q4_0, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K };
static const int64_t NUMBERS[] = {FINE, FINE, FINE, LARGE, LARGE, LARGE}, BYTES[] = {18, 22, 34, 144, 176, 210};

INLINE float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float of_half(const uint8_t *at) {
    uint32_t half = at[0] | at[1] << 8, size = half & 0x7fff;
    uint32_t whole = size >= 0x7c00 ? size << 13 | 0x7f800000 : (size << 13) + (112 << 23);
    return of_bits((size < 0x400 ? bits_of((float)size * 0x1p-24f) : whole) | (half & 0x8000) << 16);
}

INLINE uint16_t half_of(float value) { /* of a number that is not negative: to nearest, ties to even */
    if (!(value < 65520.0f)) return value != value ? 0x7e00 : 0x7c00;
    if (value < 0x1p-14f) return (uint16_t)rintf(value * 0x1p24f);
    uint32_t bits = bits_of(value) - (112 << 23);
    return (uint16_t)((bits + 0xfff + (bits >> 13 & 1)) >> 13);
}

/* The 32 codes of a block with one scale, which stands before them. */
INLINE void symmetric_codes(int kind, const uint8_t *block, int8_t *codes) {
    const uint8_t *halves = block + (kind == Q5_0 ? 6 : 2);
    if (kind == Q8_0) {
        memcpy(codes, block + 2, FINE);
        return;
    }
    for (int i = 0; i < FINE / 2; i++) codes[i] = (int8_t)(halves[i] & 15), codes[i + FINE / 2] = (int8_t)(halves[i] >> 4);
    for (int i = 0; i < FINE; i++)
        if (kind == Q5_0)
            codes[i] = (int8_t)(codes[i] + (block[2 + i / 8] >> (i & 7) & 1) * 16 - 16);
        else
            codes[i] = (int8_t)(codes[i] - 8);
}

INLINE void decode_symmetric(int kind, const uint8_t *block, float *values) {
    int8_t codes[FINE];
    float scale = of_half(block);
    symmetric_codes(kind, block, codes);
    for (int i = 0; i < FINE; i++) values[i] = scale * (float)codes[i];
}

/* Q4_K and Q5_K: scales and least values of 32 numbers have six bits each, of the last four apart. Products with them, and with
 * codes, are exact (11 + 6 + 5 bits), so it does not matter whether the compiler joins them with the subtraction. */
INLINE void decode_with_least(int kind, const uint8_t *block, float *values) {
    float scale = of_half(block), least = of_half(block + 2);
    const uint8_t *six = block + 4, *fifth = block + 16, *halves = block + (kind == Q5_K ? 48 : 16);
    for (int g = 0; g < 8; g++) {
        int by = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
        int less = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
        float own = scale * (float)by, own_least = least * (float)less;
        for (int i = 0; i < FINE; i++) {
            int code = halves[g / 2 * FINE + i] >> g % 2 * 4 & 15;
            if (kind == Q5_K) code |= (fifth[i] >> g & 1) << 4;
            values[g * FINE + i] = own * (float)code - own_least;
        }
    }
}

INLINE void decode_q6_k(const uint8_t *block, float *values) {
    float scale = of_half(block + 208);
    for (int g = 0; g < 16; g++) {
        int at = g % 8 * 16; /* in a half of the block */
        const uint8_t *low = block + g / 8 * 64 + at % 64, *high = block + 128 + g / 8 * 32 + at % 32;
        float own = scale * (float)(int8_t)block[192 + g];
        for (int i = 0; i < 16; i++) {
            int code = (low[i] >> at / 64 * 4 & 15) | (high[i] >> at / 32 * 2 & 3) << 4;
            values[g * 16 + i] = own * (float)(code - 32);
        }
    }
}

#define EACH_KIND(kind, symmetric)                                                                  \
    switch (kind) {                                                                                 \
        case Q4_0: symmetric(Q4_0); break;                                                          \
        case Q5_0: symmetric(Q5_0); break;                                                          \
        case Q8_0: symmetric(Q8_0); break;                                                          \
        case Q4_K: decode_with_least(Q4_K, block, values); break;                                   \
        case Q5_K: decode_with_least(Q5_K, block, values); break;                                   \
        default: decode_q6_k(block, values);                                                        \
    }

FOR_EACH_CPU static void decode_block(int64_t kind, const uint8_t *block, float *wide, bf16 *out) {
    float own[LARGE], *values = wide ? wide : own;
#define DECODE(kind) decode_symmetric(kind, block, values)
    EACH_KIND(kind, DECODE)
    if (out)
        for (int i = 0; i < NUMBERS[kind]; i++) out[i] = narrow(values[i]);
}

/* As Q8_0 is rounded. */
INLINE void round_group(const float *values, int8_t *codes, uint16_t *scale) {
    uint32_t most = 0;
    for (int i = 0; i < FINE; i++) {
        uint32_t size = bits_of(values[i]) & 0x7fffffff; /* what is not a number is above all numbers */
        most = size > most ? size : most;
    }
    *scale = half_of(of_bits(most) / 127.0f);
    float rounded_scale = of_half((const uint8_t *)scale), inverse = rounded_scale == 0 ? 0 : 1 / rounded_scale;
    for (int i = 0; i < FINE; i++) {
        float value = rintf(values[i] * inverse);
        value = value > 127 ? 127 : value < -127 ? -127 : value;
        codes[i] = (int8_t)(value == value ? (int32_t)value : 0);
    }
}

FOR_EACH_CPU static void recode_block(int64_t kind, const uint8_t *block, int8_t *codes, uint16_t *scales) {
    float values[LARGE];
#define TAKE(kind) memcpy(scales, block, 2), symmetric_codes(kind, block, codes)
    EACH_KIND(kind, TAKE)
    if (NUMBERS[kind] == LARGE)
        for (int g = 0; g < LARGE / FINE; g++) round_group(values + g * FINE, codes + g * FINE, scales + g);
}

/* The numbers of blocks in fp32 or in bf16; the other output is null. */
void decode_blocks(int64_t kind, const uint8_t *blocks, int64_t count, float *wide, bf16 *out) {
    int64_t numbers = NUMBERS[kind], bytes = BYTES[kind];
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++)
        decode_block(kind, blocks + i * bytes, wide ? wide + i * numbers : 0, out ? out + i * numbers : 0);
}

/* Codes and fp16 scales: a block's own if it has one scale for 32 numbers, else int8 to which its numbers are rounded. */
void recode_blocks(int64_t kind, const uint8_t *blocks, int64_t count, int8_t *codes, uint16_t *scales) {
    int64_t numbers = NUMBERS[kind], bytes = BYTES[kind];
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++)
        recode_block(kind, blocks + i * bytes, codes + i * numbers, scales + i * numbers / FINE);
}
