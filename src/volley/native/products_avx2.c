/* Products for CPUs that have AVX2 and FMA and no AVX-512. The weights lie as in products.c. */
#include "products.h"

#if X86
#define AHEAD 2048
#define MOST_ROWS 6   /* whose sums stay in registers */
#define WIDENED 16384 /* inputs of all rows that are in fp32 at once: they stay in the second cache */

static const int32_t second_halves[8] __attribute__((aligned(32))) = {-65536, -65536, -65536, -65536, -65536, -65536, -65536, -65536};

/* Of two bf16 numbers side by side, the first in fp32; the second is what ``second_halves`` leaves. */
AVX2 INLINE __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

AVX2 INLINE __m256i broadcast(const void *four_bytes) {
    int32_t value;
    memcpy(&value, four_bytes, 4);
    return _mm256_set1_epi32(value);
}

/* Sums go on in place. GCC copies and spills them around its own multiply-adds where registers are few. */
#define ADD_PRODUCT(sum, one, two) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(one), "x"(two))

/* Products of ``size`` inputs, added to the sums of rows; each input is loaded where it is used. */
AVX2 INLINE void few_rows(const uint8_t *codes, const float *x, int64_t stride, int64_t size, int count, float (*sums)[BLOCK]) {
    __m256 own[MOST_ROWS][2];
    const float *mask = (const float *)second_halves;
    __asm__("" : "+r"(mask)); /* not known to be constant, so it stays in memory */
    for (int r = 0; r < count; r++)
        for (int h = 0; h < 2; h++) own[r][h] = _mm256_loadu_ps(sums[r] + 8 * h);
    for (int64_t at = 0; at < size; at += 2) {
        const __m256i *line = (const __m256i *)(codes + at * 32);
        _mm_prefetch((const char *)line + 4 * AHEAD, _MM_HINT_T0);
        __m256 weights[2];
        for (int h = 0; h < 2; h++) weights[h] = first_of(_mm256_loadu_si256(line + h));
        for (int r = 0; r < count; r++) {
            __m256 one = _mm256_broadcast_ss(x + r * stride + at);
            for (int h = 0; h < 2; h++) ADD_PRODUCT(own[r][h], one, weights[h]);
        }
        __asm__ volatile("" ::: "memory"); /* loaded once more, instead of kept: there are too few registers */
        for (int h = 0; h < 2; h++) weights[h] = _mm256_and_ps(_mm256_loadu_ps((const float *)(line + h)), _mm256_load_ps(mask));
        for (int r = 0; r < count; r++) {
            __m256 two = _mm256_broadcast_ss(x + r * stride + at + 1);
            for (int h = 0; h < 2; h++) ADD_PRODUCT(own[r][h], two, weights[h]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(sums[r] + 8 * h, own[r][h]);
}

/* Even groups of rows: a group of one takes almost as long as one of four. */
AVX2 static void add_block(const uint8_t *codes, const float *x, int64_t stride, int64_t size, int64_t rows, float (*sums)[BLOCK]) {
    int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t group = 0; group < groups; group++) {
        int64_t from = rows * group / groups, count = rows * (group + 1) / groups - from;
        const float *own = x + from * stride;
        switch (count) {
            case 1: few_rows(codes, own, stride, size, 1, sums + from); break;
            case 2: few_rows(codes, own, stride, size, 2, sums + from); break;
            case 3: few_rows(codes, own, stride, size, 3, sums + from); break;
            case 4: few_rows(codes, own, stride, size, 4, sums + from); break;
            case 5: few_rows(codes, own, stride, size, 5, sums + from); break;
            default: few_rows(codes, own, stride, size, 6, sums + from);
        }
    }
}

AVX2 static void widen_row(const bf16 *x, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i++) to[i] = widen(x[i]);
}

/* Inputs are widened once for several blocks, a part of them at a time; sums go on where they stopped, so parts change no bit. */
AVX2 void blocks_avx2(const uint8_t *codes, const bf16 *x, int64_t stride, int64_t inputs, int64_t blocks, int64_t rows,
                      float (*sums)[MOST][BLOCK]) {
    static _Thread_local float wide[WIDENED + 16 * MOST] __attribute__((aligned(64)));
    int64_t part = WIDENED / rows / 32 * 32, spread = part + 16; /* rows not a power of two apart */
    for (int64_t block = 0; block < blocks; block++) memset(sums[block], 0, rows * sizeof(sums[0][0]));
    for (int64_t at = 0; at < inputs; at += part) {
        int64_t size = inputs - at < part ? inputs - at : part;
        for (int64_t r = 0; r < rows; r++) widen_row(x + r * stride + at, size, wide + r * spread);
        for (int64_t block = 0; block < blocks; block++)
            add_block(codes + (block * inputs + at) * 32, wide, spread, size, rows, sums[block]);
    }
}

/* Integer sums of one group of inputs, added to what is ``found``. Products of two signed bytes must not overflow 16 bits when two of
   them are added, so a weight's sign goes to its input. */
AVX2 INLINE void group_int8(const uint8_t *codes, const int8_t *x, int64_t inputs, int group, int count, __m256i (*found)[2]) {
    __m256i zero = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
    for (int quad = 0; quad < group / 4; quad++) {
        __m256i weights[2], sizes[2];
        for (int h = 0; h < 2; h++) {
            weights[h] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(codes + quad * 64) + h), zero);
            sizes[h] = _mm256_abs_epi8(weights[h]);
        }
        for (int r = 0; r < count; r++) {
            __m256i four = broadcast(x + r * inputs + quad * 4);
            for (int h = 0; h < 2; h++) {
                __m256i pairs = _mm256_maddubs_epi16(sizes[h], _mm256_sign_epi8(four, weights[h]));
                found[r][h] = _mm256_add_epi32(found[r][h], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
}

/* The same for codes of four bits, 8 being zero: eight sums of two products of at most 15 * 127 fit in 16 bits. */
AVX2 INLINE void group_int4(const uint8_t *codes, const int8_t *x, int64_t inputs, int group, int count, __m256i (*found)[2]) {
    __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int from = 0; from < group / 4; from += 8) {
        __m256i sums[4][2];
        for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
        for (int quad = from; quad < from + 8; quad += 2) {
            __m256i low[2], high[2];
            for (int h = 0; h < 2; h++) {
                __m256i both = _mm256_loadu_si256((const __m256i *)(codes + quad / 2 * 64) + h);
                low[h] = _mm256_and_si256(both, nibble), high[h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
            }
            for (int r = 0; r < count; r++) {
                __m256i one = broadcast(x + r * inputs + quad * 4), two = broadcast(x + r * inputs + quad * 4 + 4);
                for (int h = 0; h < 2; h++) {
                    sums[r][h] = _mm256_add_epi16(sums[r][h], _mm256_maddubs_epi16(low[h], one));
                    sums[r][h] = _mm256_add_epi16(sums[r][h], _mm256_maddubs_epi16(high[h], two));
                }
            }
        }
        for (int r = 0; r < count; r++)
            for (int h = 0; h < 2; h++) found[r][h] = _mm256_add_epi32(found[r][h], _mm256_madd_epi16(sums[r][h], ones));
    }
}

/* The scales of eight outputs in a group; int8 in groups of 64 has some for whole outputs instead. */
AVX2 INLINE __m256 group_scales(const void *scales, int64_t at, int four, int group) {
    if (group == FINE) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)scales + at)));
    return four ? _mm256_loadu_ps((const float *)scales + at) : _mm256_set1_ps(1.0f);
}

AVX2 INLINE void few_codes(const Product *product, const uint8_t *codes, const void *scales, Prepared x, int64_t row, int four,
                           int group, int count, float (*sums)[BLOCK]) {
    int64_t inputs = product->inputs, groups = inputs / group, bytes = four ? 8 * group : 16 * group;
    __m256 own[4][2];
    for (int r = 0; r < count; r++) own[r][0] = own[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *of_group = codes + g * bytes;
        const int8_t *of_rows = x.values + row * inputs + g * group;
        __m256i found[4][2];
        for (int line = 0; line < bytes; line += 64) _mm_prefetch((const char *)of_group + AHEAD + line, _MM_HINT_T0);
        for (int r = 0; r < count; r++)
            found[r][0] = found[r][1] = _mm256_set1_epi32(four ? x.sums[(row + r) * groups + g] : 0);
        if (four)
            group_int4(of_group, of_rows, inputs, group, count, found);
        else
            group_int8(of_group, of_rows, inputs, group, count, found);
        __m256 of_outputs[2];
        for (int h = 0; h < 2; h++) of_outputs[h] = group_scales(scales, g * BLOCK + 8 * h, four, group);
        for (int r = 0; r < count; r++) {
            __m256 of_row = _mm256_set1_ps(x.scales[(row + r) * groups + g]);
            for (int h = 0; h < 2; h++)
                own[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(found[r][h]), _mm256_mul_ps(of_row, of_outputs[h]), own[r][h]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(sums[r] + 8 * h, own[r][h]);
}

AVX2 INLINE void all_codes(const Product *product, const uint8_t *codes, const void *scales, Prepared x, int64_t row, int64_t rows,
                           int four, int group, float (*sums)[BLOCK]) {
#define ROWS(r, count) few_codes(product, codes, scales, x, row + (r), four, group, count, sums + (r))
    BY_FOUR(rows, ROWS)
#undef ROWS
}

AVX2 void block_codes_avx2(const Product *product, const uint8_t *codes, const void *scales, Prepared x, int64_t row, int64_t rows,
                           float (*sums)[BLOCK]) {
#define CODES(four, group) all_codes(product, codes, scales, x, row, rows, four, group, sums)
    BY_KIND(product, CODES)
#undef CODES
}
#endif
