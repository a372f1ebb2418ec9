/* Attention's scores and mixtures for CPUs with AVX2 and FMA but without AVX512-BF16. Each score and each mixed number has a
 * fixed summation order, independent of the batch. */
#include "attention.h"

#if X86
/* Load eight bf16 numbers as fp32. */
AVX2 INLINE __m256 eight(const bf16 *x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}

AVX2 INLINE float total(__m256 x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Compute scores of a few queries with one key. */
AVX2 INLINE void score_few(Work *work, int first, int vectors, const bf16 *key, int place, int dim, float scale) {
    __m256 own[4][2];
    UNROLLED(int v = 0; v < vectors; v++) own[v][0] = own[v][1] = _mm256_setzero_ps();
    for (int i = 0; i < dim; i += 16) {
        __m256 low = eight(key + i), high = eight(key + i + 8);
        UNROLLED(int v = 0; v < vectors; v++) {
            const float *query = work->widened + (first + v) * dim + i;
            own[v][0] = _mm256_fmadd_ps(_mm256_loadu_ps(query), low, own[v][0]);
            own[v][1] = _mm256_fmadd_ps(_mm256_loadu_ps(query + 8), high, own[v][1]);
        }
    }
    UNROLLED(int v = 0; v < vectors; v++) work->scores[first + v][place] = total(_mm256_add_ps(own[v][0], own[v][1])) * scale;
}

AVX2 void score_avx2(Work *work, const bf16 *const *keys, int count, int vectors, int dim, float scale) {
    for (int place = 0; place < count; place++) {
#define FEW_SCORES(v, few) score_few(work, v, few, keys[place], place, dim, scale)
        BY_FOUR(vectors, FEW_SCORES)
    }
}

/* Mix 16 numbers of a few vectors. */
AVX2 INLINE void mix_few(Work *work, int first, int vectors, int from, const bf16 *const *values, int count) {
    __m256 sums[4][2];
    UNROLLED(int v = 0; v < vectors; v++)
        UNROLLED(int h = 0; h < 2; h++) sums[v][h] = _mm256_loadu_ps(work->mixed[first + v] + from + 8 * h);
    for (int key = 0; key < count; key++) {
        __m256 low = eight(values[key] + from), high = eight(values[key] + from + 8);
        UNROLLED(int v = 0; v < vectors; v++) {
            __m256 weight = _mm256_set1_ps(widen(work->weights[first + v][key]));
            sums[v][0] = _mm256_fmadd_ps(weight, low, sums[v][0]);
            sums[v][1] = _mm256_fmadd_ps(weight, high, sums[v][1]);
        }
    }
    UNROLLED(int v = 0; v < vectors; v++)
        UNROLLED(int h = 0; h < 2; h++) _mm256_storeu_ps(work->mixed[first + v] + from + 8 * h, sums[v][h]);
}

AVX2 void mix_avx2(Work *work, const bf16 *const *values, int count, int vectors, int dim) {
    for (int from = 0; from < dim; from += 16) {
#define FEW_SUMS(v, few) mix_few(work, v, few, from, values, count)
        BY_FOUR(vectors, FEW_SUMS)
    }
}
#endif
