/* Products for CPUs that have AVX2 and FMA and no AVX-512. The weights lie as in products.c. */
#include "products.h"

#if X86
#define AHEAD 2048
#define MOST_ROWS 5 /* whose sums stay in registers */

/* Of two bf16 numbers side by side, the first and the second in fp32. */
AVX2 INLINE __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
AVX2 INLINE __m256 second_of(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int32_t)0xffff0000)));
}

AVX2 INLINE __m256i broadcast(const void *four_bytes) {
    int32_t value;
    memcpy(&value, four_bytes, 4);
    return _mm256_set1_epi32(value);
}

AVX2 INLINE void few_rows(const uint8_t *codes, const bf16 *x, int64_t stride, int64_t inputs, int count, float (*sums)[BLOCK]) {
    __m256 own[MOST_ROWS][2];
    for (int r = 0; r < count; r++) own[r][0] = own[r][1] = _mm256_setzero_ps();
    for (int64_t at = 0; at < inputs; at += 2) {
        const __m256i *line = (const __m256i *)(codes + at * 32);
        _mm_prefetch((const char *)line + AHEAD, _MM_HINT_T0);
        __m256 weights[2];
        for (int h = 0; h < 2; h++) weights[h] = first_of(_mm256_loadu_si256(line + h));
        for (int r = 0; r < count; r++) {
            __m256 one = first_of(broadcast(x + r * stride + at));
            for (int h = 0; h < 2; h++) own[r][h] = _mm256_fmadd_ps(one, weights[h], own[r][h]);
        }
        __asm__ volatile("" ::: "memory"); /* loaded once more, instead of kept: there are too few registers */
        for (int h = 0; h < 2; h++) weights[h] = second_of(_mm256_loadu_si256(line + h));
        for (int r = 0; r < count; r++) {
            __m256 two = second_of(broadcast(x + r * stride + at));
            for (int h = 0; h < 2; h++) own[r][h] = _mm256_fmadd_ps(two, weights[h], own[r][h]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(sums[r] + 8 * h, own[r][h]);
}

/* Even groups of rows: a group of one takes almost as long as one of four. */
AVX2 void block_avx2(const uint8_t *codes, const bf16 *x, int64_t stride, int64_t inputs, int64_t rows, float (*sums)[BLOCK]) {
    int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t group = 0; group < groups; group++) {
        int64_t from = rows * group / groups, count = rows * (group + 1) / groups - from;
        const bf16 *own = x + from * stride;
        switch (count) {
            case 1: few_rows(codes, own, stride, inputs, 1, sums + from); break;
            case 2: few_rows(codes, own, stride, inputs, 2, sums + from); break;
            case 3: few_rows(codes, own, stride, inputs, 3, sums + from); break;
            case 4: few_rows(codes, own, stride, inputs, 4, sums + from); break;
            default: few_rows(codes, own, stride, inputs, 5, sums + from);
        }
    }
}

/* Integer sums of one group of 64 inputs. Bytes are widened: products of two bytes in 16 bits, added up, could overflow. */
AVX2 INLINE void group_int8(const uint8_t *codes, const int8_t *x, int64_t inputs, int count, __m256i (*found)[2]) {
    __m256i low_bytes = _mm256_set1_epi16(0xff);
    for (int quad = 0; quad < 16; quad++) {
        __m256i even[2], odd[2];
        for (int h = 0; h < 2; h++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(codes + quad * 64) + h);
            even[h] = _mm256_and_si256(both, low_bytes), odd[h] = _mm256_srli_epi16(both, 8);
        }
        for (int r = 0; r < count; r++) {
            __m256i four = broadcast(x + r * inputs + quad * 4);
            __m256i of_even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), of_odd = _mm256_srai_epi16(four, 8);
            for (int h = 0; h < 2; h++) {
                found[r][h] = _mm256_add_epi32(found[r][h], _mm256_madd_epi16(even[h], of_even));
                found[r][h] = _mm256_add_epi32(found[r][h], _mm256_madd_epi16(odd[h], of_odd));
            }
        }
    }
}

/* The same for codes of four bits: eight sums of two products of at most 15 * 127 fit in 16 bits. */
AVX2 INLINE void group_int4(const uint8_t *codes, const int8_t *x, int64_t inputs, int count, __m256i (*found)[2]) {
    __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int half = 0; half < 2; half++) {
        __m256i sums[4][2];
        for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
        for (int quad = 8 * half; quad < 8 * half + 8; quad += 2) {
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

AVX2 INLINE void few_codes(const Product *product, const uint8_t *codes, const float *scales, Quantised x, int64_t row, int four,
                           int count, float (*sums)[BLOCK]) {
    int64_t inputs = product->inputs, groups = inputs / GROUP, bytes = four ? 512 : 1024;
    __m256 own[4][2], of_outputs[2] = {_mm256_set1_ps(1.0f), _mm256_set1_ps(1.0f)};
    for (int r = 0; r < count; r++) own[r][0] = own[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *group = codes + g * bytes;
        const int8_t *of_rows = x.codes + row * inputs + g * GROUP;
        __m256i found[4][2];
        for (int line = 0; line < bytes; line += 64) _mm_prefetch((const char *)group + AHEAD + line, _MM_HINT_T0);
        for (int r = 0; r < count; r++) found[r][0] = found[r][1] = _mm256_setzero_si256();
        if (four)
            group_int4(group, of_rows, inputs, count, found);
        else
            group_int8(group, of_rows, inputs, count, found);
        if (four)
            for (int h = 0; h < 2; h++) of_outputs[h] = _mm256_loadu_ps(scales + g * BLOCK + 8 * h);
        for (int r = 0; r < count; r++) {
            int64_t place = (row + r) * groups + g;
            __m256i zero = _mm256_set1_epi32((four ? 8 : 128) * x.sums[place]);
            __m256 of_row = _mm256_set1_ps(x.scales[place]);
            for (int h = 0; h < 2; h++) {
                __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(found[r][h], zero));
                own[r][h] = _mm256_fmadd_ps(exact, _mm256_mul_ps(of_row, of_outputs[h]), own[r][h]);
            }
        }
    }
    for (int r = 0; r < count; r++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(sums[r] + 8 * h, own[r][h]);
}

AVX2 void block_codes_avx2(const Product *product, const uint8_t *codes, const float *scales, Quantised x, int64_t row, int64_t rows,
                           float (*sums)[BLOCK]) {
#define INT4_ROWS(r, count) few_codes(product, codes, scales, x, row + (r), 1, count, sums + (r))
#define INT8_ROWS(r, count) few_codes(product, codes, scales, x, row + (r), 0, count, sums + (r))
    if (product->kind == INT4)
        BY_FOUR(rows, INT4_ROWS)
    else
        BY_FOUR(rows, INT8_ROWS)
}
#endif
