/* Quantise weights to int8 and int4, and pack them for the matmuls. Reference, to the bit: tests/native/codes.py. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off") /* the reference rounds products before it adds them */
#endif
#include "products.h"

#define CANDIDATES 9         /* scales tried for a group in int4 */
#define SIDE (GROUP * BLOCK) /* numbers of 16 groups side by side: number i of row r is at i * BLOCK + r */

/* Return the bits of the largest magnitude; NaN is above all numbers. */
INLINE int32_t largest(const float *values, int size) {
    int32_t most = 0;
    for (int i = 0; i < size; i++) {
        int32_t bits;
        memcpy(&bits, values + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

INLINE void load(const void *weight, int is_wide, int64_t at, float *values) {
    if (is_wide)
        memcpy(values, (const float *)weight + at, GROUP * sizeof(float));
    else
        for (int i = 0; i < GROUP; i++) values[i] = widen(((const bf16 *)weight)[at + i]);
}

INLINE void whole_numbers(const float *values, int8_t *codes) {
    for (int i = 0; i < GROUP; i++) codes[i] = (int8_t)(values[i] == values[i] ? (int32_t)values[i] : 0);
}

/* Find the number with the largest magnitude in each of 16 groups, the first of equal ones; NaN if there is one. */
INLINE void extremes_of(const float *values, float *extremes) {
    int32_t most[BLOCK] = {0};
    memcpy(extremes, values, BLOCK * sizeof(float));
    for (int i = 0; i < GROUP; i++)
        for (int r = 0; r < BLOCK; r++) {
            int32_t bits;
            memcpy(&bits, values + i * BLOCK + r, 4);
            bits &= 0x7fffffff;
            extremes[r] = bits > most[r] ? values[i * BLOCK + r] : extremes[r];
            most[r] = bits > most[r] ? bits : most[r];
        }
}

/* Round to nearest, ties to even, by adding a number above which all floats are integers. */
INLINE float int4_of(float quotient) {
    quotient = quotient < -8.0f ? -8.0f : quotient;
    quotient = quotient > 7.0f ? 7.0f : quotient;
    return (quotient + 12582912.0f) - 12582912.0f;
}

INLINE void errors_of(const float *values, const float *scales, float *errors) {
    for (int i = 0; i < GROUP; i++)
        for (int r = 0; r < BLOCK; r++) {
            float value = values[i * BLOCK + r], error = int4_of(value / scales[r]) * scales[r] - value;
            errors[i * BLOCK + r] = error * error;
        }
    for (int half = SIDE / 2; half >= BLOCK; half /= 2)
        for (int i = 0; i < half; i++) errors[i] += errors[i + half];
}

INLINE void best_scales(const float *values, const float *extremes, float *best) {
    float scales[BLOCK], errors[SIDE], least[BLOCK];
    for (int r = 0; r < BLOCK; r++) best[r] = 1.0f, least[r] = INFINITY;
    for (int i = 0; i < CANDIDATES; i++) {
        for (int r = 0; r < BLOCK; r++) {
            float scale = extremes[r] / (-9.5f + 0.375f * (float)i);
            scales[r] = fabsf(scale) < 1e-30f ? 1e-30f : scale;
        }
        errors_of(values, scales, errors);
        for (int r = 0; r < BLOCK; r++) {
            int is_better = errors[r] < least[r];
            least[r] = is_better ? errors[r] : least[r];
            best[r] = is_better ? scales[r] : best[r];
        }
    }
}

/* Load groups of up to 16 rows side by side, from number ``at`` of each row on; missing rows are zeros. */
INLINE void load_side_by_side(const void *weight, int is_wide, int64_t at, int64_t inputs, int64_t rows, float *values) {
    float own[GROUP];
    if (rows < BLOCK) memset(values, 0, SIDE * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        load(weight, is_wide, r * inputs + at, own);
        for (int i = 0; i < GROUP; i++) values[i * BLOCK + r] = own[i];
    }
}

INLINE void int4_block(const void *weight, int is_wide, int64_t rows, int64_t inputs, uint8_t *block, float *scales) {
    float values[SIDE], best[BLOCK], own[GROUP], extremes[BLOCK];
    int8_t codes[GROUP];
    for (int64_t at = 0; at < inputs; at += GROUP) {
        load_side_by_side(weight, is_wide, at, inputs, rows, values);
        extremes_of(values, extremes);
        best_scales(values, extremes, best);
        for (int i = 0; i < GROUP; i++)
            for (int r = 0; r < BLOCK; r++) values[i * BLOCK + r] = int4_of(values[i * BLOCK + r] / best[r]);
        for (int r = 0; r < BLOCK; r++) {
            for (int i = 0; i < GROUP; i++) own[i] = values[i * BLOCK + r];
            whole_numbers(own, codes);
            for (int i = 0; i < GROUP; i += PACK) put_pack(INT4, codes + i, block + (at + i) * 2 * 4, r);
        }
        for (int64_t r = 0; r < rows; r++) scales[(r * inputs + at) / GROUP] = isfinite(extremes[r]) ? best[r] : NAN;
    }
}

INLINE void int8_row(const void *weight, int is_wide, int64_t inputs, uint8_t *block, int64_t row, float *scale) {
    float values[GROUP];
    int8_t codes[GROUP];
    int32_t most = 0;
    for (int64_t at = 0; at < inputs; at += GROUP) {
        load(weight, is_wide, at, values);
        int32_t own = largest(values, GROUP);
        most = own > most ? own : most;
    }
    *scale = most > 0x7f800000 ? NAN : of_bits(most) / 127.0f;
    if (*scale < 1e-30f) *scale = 1e-30f;
    for (int64_t at = 0; at < inputs; at += GROUP) {
        load(weight, is_wide, at, values);
        for (int i = 0; i < GROUP; i++) values[i] = rintf(values[i] / *scale);
        whole_numbers(values, codes);
        for (int i = 0; i < GROUP; i += PACK) put_pack(INT8, codes + i, block + (at + i) * 2 * 8, row);
    }
}

INLINE void pair_row(const bf16 *weight, int64_t inputs, uint8_t *block, int64_t row) {
    for (int64_t at = 0; at < inputs; at += 2) memcpy(block + at * BLOCK * 2 + row * 4, weight + at, 4);
}

FOR_EACH_CPU static void round_block(int64_t kind, const void *weight, int64_t is_wide, int64_t rows, int64_t inputs,
                                     uint8_t *block, float *scales) {
    if (kind == INT4) {
        is_wide ? int4_block(weight, 1, rows, inputs, block, scales) : int4_block(weight, 0, rows, inputs, block, scales);
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        if (kind == BF16)
            pair_row((const bf16 *)weight + r * inputs, inputs, block, r);
        else if (is_wide)
            int8_row((const float *)weight + r * inputs, 1, inputs, block, r, scales + r);
        else
            int8_row((const bf16 *)weight + r * inputs, 0, inputs, block, r, scales + r);
}

#define PUT(kind)                                                                                   \
    for (int64_t r = 0; r < BLOCK; r++)                                                             \
        for (int64_t at = 0; at < inputs; at += PACK)                                               \
            put_pack(kind, r < rows ? codes + r * inputs + at : none, block + at * 2 * FORMATS[kind].bits, r)

FOR_EACH_CPU static void put_block(int64_t kind, const int8_t *codes, int64_t rows, int64_t inputs, uint8_t *block) {
    static const int8_t none[PACK];
    BY_KIND(kind, PUT)
}

#define EACH_BLOCK(to_block)                                                                        \
    int64_t bytes = inputs * 2 * FORMATS[kind].bits, blocks = (rows + BLOCK - 1) / BLOCK;                \
    _Pragma("omp parallel for")                                                                     \
    for (int64_t i = 0; i < blocks; i++) {                                                          \
        uint8_t *block = out + i * bytes;                                                           \
        int64_t first = i * BLOCK, count = rows - first < BLOCK ? rows - first : BLOCK;             \
        if (count < BLOCK) memset(block, kind == BF16 ? 0 : kind == INT8 ? 0x80 : 0x88, bytes); /* zeros */ \
        to_block;                                                                                   \
    }

/* Pack a weight [rows, inputs] in bf16 (``is_wide``: in fp32) into blocks of codes or bf16, and scales: int8 [rows], int4
 * [rows, inputs / 64]. */
void round_weight(int64_t kind, const void *weight, int64_t is_wide, int64_t rows, int64_t inputs, uint8_t *out, float *scales) {
    int64_t row = inputs * (is_wide ? 4 : 2), groups = kind == INT4 ? inputs / GROUP : 1;
    const uint8_t *from = weight;
    EACH_BLOCK(round_block(kind, from + first * row, is_wide, count, inputs, block, scales + first * groups))
}

/* Pack codes [rows, inputs] into blocks. */
void put_codes(int64_t kind, const int8_t *codes, int64_t rows, int64_t inputs, uint8_t *out) {
    EACH_BLOCK(put_block(kind, codes + first * inputs, count, inputs, block))
}

/* Unpack the codes of row ``row`` that put_pack packed, with 0 for the number zero. */
INLINE void take_pack(int kind, const uint8_t *pack, int64_t row, float *numbers) {
    int bits = FORMATS[kind].bits, low = bits == 8 ? 8 : bits < 4 ? 2 : 4, high = bits - low, line = 0;
    const int8_t *table = TABLES[FORMATS[kind].table];
    uint32_t quads[8] = {0};
    for (int part = 0; part < 2; part++) {
        int size = part ? high : low, from = part ? low : 0;
        uint32_t mask = ((1 << size) - 1) * 0x01010101u, together;
        for (int quad = 0; size && quad < 8; line++) {
            memcpy(&together, pack + line * 64 + row * 4, 4);
            for (int place = 0; place < 8; place += size, quad++) quads[quad] |= (together >> place & mask) << from;
        }
    }
    for (int i = 0; i < PACK; i++) {
        int code = quads[i / 4] >> i % 4 * 8 & 255;
        numbers[i] = (float)(FORMATS[kind].table ? table[code] : code - FORMATS[kind].zero);
    }
}

/* Return the scale of group ``g``, or (``place`` 1) its minimum, of row ``row`` of a block. */
INLINE float scale_of(int kind, const uint8_t *scales, int64_t g, int64_t row, int place) {
    const uint8_t *own = scales_at(kind, scales, g) + place * 2 * BLOCK + row * 2;
    float scale;
    bf16 half;
    if (FORMATS[kind].scale == FLOAT || FORMATS[kind].scale == OF_OUTPUT) {
        memcpy(&scale, FORMATS[kind].scale == FLOAT ? own + row * 2 : scales + row * 4, 4);
        return scale;
    }
    memcpy(&half, own, 2);
    scale = FORMATS[kind].scale == BRAIN ? widen(half) : of_half(half);
    if (FORMATS[kind].scale != PRODUCT) return scale;
    return scale * (float)(int8_t)factors_at(kind, scales, g)[place * BLOCK + row] * unit_of(kind);
}

INLINE void read_row(int kind, int64_t inputs, const uint8_t *codes, const uint8_t *scales, int64_t row, bf16 *out) {
    int group = FORMATS[kind].group;
    float numbers[PACK];
    for (int64_t at = 0; at < inputs; at += PACK) {
        take_pack(kind, codes + at * 2 * FORMATS[kind].bits, row, numbers);
        for (int from = 0; from < PACK; from += group) {
            float scale = scale_of(kind, scales, (at + from) / group, row, 0);
            float least = num_scales(kind) > 1 ? scale_of(kind, scales, (at + from) / group, row, 1) : 0;
            for (int i = from; i < from + group && i < PACK; i++)
                out[at + i] = narrow(num_scales(kind) > 1 ? numbers[i] * scale + least : numbers[i] * scale);
        }
    }
}

/* Shift exponent and mantissa to their places in fp32, and put the exponent's bias right; this is exact. */
INLINE float of_e4m3(uint8_t code) {
    float size = of_bits((uint32_t)(code & 127) << 20) * 0x1p120f;
    return of_bits(bits_of((code & 127) == 127 ? NAN : size) | (uint32_t)(code & 128) << 24);
}
INLINE float of_e2m1(uint8_t code) { return of_bits(bits_of(of_bits((uint32_t)(code & 7) << 22) * 0x1p126f) | (uint32_t)(code & 8) << 28); }

FOR_EACH_CPU static void widen_fp8(const uint8_t *codes, const float *scales, int64_t inputs, bf16 *out) {
    for (int64_t at = 0; at < inputs; at += 2, codes += 2 * BLOCK, out += 2 * BLOCK)
        for (int i = 0; i < 2 * BLOCK; i++) out[i] = narrow(of_e4m3(codes[i]) * scales[at / GROUP * BLOCK + i / 2]);
}

FOR_EACH_CPU static void widen_nvfp4(const uint8_t *codes, const float *divisors, const uint8_t *scales, int64_t inputs, bf16 *out) {
    float scale[BLOCK];
    for (int64_t at = 0; at < inputs; at += 2, codes += BLOCK, out += 2 * BLOCK) {
        if (at % 16 == 0)
            for (int i = 0; i < BLOCK; i++) scale[i] = of_e4m3(scales[at + i]) / divisors[i];
        for (int i = 0; i < BLOCK; i++) {
            out[2 * i] = narrow(of_e2m1(codes[i]) * scale[i]);
            out[2 * i + 1] = narrow(of_e2m1(codes[i] >> 4) * scale[i]);
        }
    }
}

#if X86
/* Round two numbers of each output to bf16, side by side. */
DOT INLINE __m512i paired(__m512 one, __m512 two) {
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(one)), high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(two));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

/* Convert e4m3 numbers to fp32 by way of fp16, whose exponent has another bias. */
DOT INLINE __m512 of_e4m3_dot(__m256i codes) {
    __m256i size = _mm256_and_si256(codes, _mm256_set1_epi16(127)), sign = _mm256_and_si256(codes, _mm256_set1_epi16(128));
    __m256i half = _mm256_mask_mov_epi16(_mm256_slli_epi16(size, 7), _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(127)),
                                         _mm256_set1_epi16(0x7e00));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, _mm256_slli_epi16(sign, 8))), _mm512_set1_ps(256.0f));
}

DOT static void widen_fp8_dot(const uint8_t *codes, const float *scales, int64_t inputs, bf16 *out) {
    for (int64_t at = 0; at < inputs; at += 2, codes += 2 * BLOCK, out += 2 * BLOCK) {
        __m256i pairs = _mm256_loadu_si256((const __m256i *)codes);
        __m512 scale = _mm512_loadu_ps(scales + at / GROUP * BLOCK);
        __m512 one = of_e4m3_dot(_mm256_and_si256(pairs, _mm256_set1_epi16(255))), two = of_e4m3_dot(_mm256_srli_epi16(pairs, 8));
        _mm512_storeu_si512(out, paired(_mm512_mul_ps(one, scale), _mm512_mul_ps(two, scale)));
    }
}

DOT static void widen_nvfp4_dot(const uint8_t *codes, const float *divisors, const uint8_t *scales, int64_t inputs, bf16 *out) {
    static const bf16 numbers[32] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                     0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    __m512i table = _mm512_loadu_si512(numbers);
    __m512 divisor = _mm512_loadu_ps(divisors), scale = divisor;
    for (int64_t at = 0; at < inputs; at += 2, codes += BLOCK, out += 2 * BLOCK) {
        if (at % 16 == 0) scale = _mm512_div_ps(of_e4m3_dot(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(scales + at)))), divisor);
        __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
        __m512i apart = _mm512_or_si512(_mm512_and_si512(pairs, _mm512_set1_epi32(15)), _mm512_slli_epi32(_mm512_srli_epi32(pairs, 4), 16));
        __m512i wide = _mm512_permutexvar_epi16(apart, table);
        __m512 one = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
        __m512 two = _mm512_castsi512_ps(_mm512_and_si512(wide, _mm512_set1_epi32((int)0xffff0000)));
        _mm512_storeu_si512(out, paired(_mm512_mul_ps(one, scale), _mm512_mul_ps(two, scale)));
    }
}
#else
#define has_dot 0
#define widen_fp8_dot widen_fp8
#define widen_nvfp4_dot widen_nvfp4
#endif

void widen_block(int64_t kind, const uint8_t *codes, const uint8_t *scales, int64_t inputs, bf16 *out) {
    const float *numbers = (const float *)scales;
    if (kind == FP8)
        (has_dot ? widen_fp8_dot : widen_fp8)(codes, numbers, inputs, out);
    else
        (has_dot ? widen_nvfp4_dot : widen_nvfp4)(codes, numbers, scales + BLOCK * 4, inputs, out);
}

/* Decode all blocks of a matmul's weight in small floats to bf16 numbers in their order. */
void widen_blocks(const Product *product, bf16 *out) {
    int64_t inputs = product->inputs, bytes = inputs * 2 * FORMATS[product->kind].bits;
    int64_t of_scales = own_scale_bytes(product->kind, inputs), blocks = (product->outputs + BLOCK - 1) / BLOCK;
#pragma omp parallel for
    for (int64_t i = 0; i < blocks; i++)
        widen_block(product->kind, product->codes + i * bytes, (const uint8_t *)product->scales + i * of_scales, inputs,
                    out + i * inputs * BLOCK);
}

/* Decode rows ``rows [count]`` of a matmul's weight to out [count, inputs]. */
void read_rows(const Product *product, const int64_t *rows, int64_t count, bf16 *out) {
    int64_t inputs = product->inputs, kind = product->kind, bytes = inputs * 2 * FORMATS[kind].bits;
    int64_t of_scales = FORMATS[kind].scale == OF_OUTPUT ? BLOCK * 4 : inputs / scaled_inputs((int)kind) * scale_bytes((int)kind);
#pragma omp parallel for if (count > 8)
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *own = product->codes + rows[r] / BLOCK * bytes;
        const uint8_t *scales = (const uint8_t *)product->scales + (kind == BF16 ? 0 : rows[r] / BLOCK * of_scales);
        bf16 *to = out + r * inputs;
        if (kind == BF16)
            for (int64_t at = 0; at < inputs; at += 2) memcpy(to + at, own + at * BLOCK * 2 + rows[r] % BLOCK * 4, 4);
#define READ(kind) read_row(kind, inputs, own, scales, rows[r] % BLOCK, to)
        BY_KIND(kind, READ)
    }
}
