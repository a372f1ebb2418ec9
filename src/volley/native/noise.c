/* Exponential noise of one seed and position. Reference: volley/decode/noise.py. */

#include <string.h>

#include "common.h"

enum { COUNTERS = 64, MANY = 1 << 15 }; /* MANY: numbers from which a second thread pays */

/* Return -log(1 - u) for 0 < u < 1. The quotient corrects the rounding of the logarithm's argument. */
static inline float waiting_time(float u) {
    float rest = 1.0f - u, mantissa;
    int32_t bits, power;
    memcpy(&bits, &rest, 4);
    power = ((bits - 0x3f3504f3) >> 23);  /* power of 2 that leaves a mantissa near 1 */
    bits -= power << 23;
    memcpy(&mantissa, &bits, 4);
    float t = mantissa - 1.0f, square = t * t, p = 7.0376836292e-2f;
    p = p * t - 1.1514610310e-1f;
    p = p * t + 1.1676998740e-1f;
    p = p * t - 1.2420140846e-1f;
    p = p * t + 1.4249322787e-1f;
    p = p * t - 1.6668057665e-1f;
    p = p * t + 2.0000714765e-1f;
    p = p * t - 2.4999993993e-1f;
    p = p * t + 3.3333331174e-1f;
    float log = t * square * p - 2.12194440e-4f * (float)power - 0.5f * square + t + 0.693359375f * (float)power;
    float lost = 1.0f - rest;
    return lost > 0.0f ? -log * (u / lost) : u;
}

/* Fill the places [start, start + count) of one row, at most 4 * COUNTERS. */
FOR_EACH_CPU static void fill(uint64_t seed, uint64_t purpose, uint64_t position, int64_t start, int64_t count, float *out) {
    uint64_t words[4 * COUNTERS];
    for (int64_t i = 0; i < COUNTERS; i++) {
        uint64_t first = (uint64_t)start / 4 + 1 + i, second = 0, third = position, fourth = 0;
        uint64_t key = seed, other = purpose;
        for (int round = 0; round < 10; round++) {
            unsigned __int128 a = (unsigned __int128)first * 0xD2E7470EE14C6C93u;
            unsigned __int128 b = (unsigned __int128)third * 0xCA5A826395121157u;
            first = (uint64_t)(b >> 64) ^ second ^ key;
            third = (uint64_t)(a >> 64) ^ fourth ^ other;
            second = (uint64_t)b, fourth = (uint64_t)a;
            key += 0x9E3779B97F4A7C15u, other += 0xBB67AE8584CAA73Bu;
        }
        words[4 * i] = first, words[4 * i + 1] = second, words[4 * i + 2] = third, words[4 * i + 3] = fourth;
    }
    for (int64_t i = 0; i < count; i++) {
        float u = (float)(int64_t)(words[i] >> 1) * 0x1p-63f;
        u = u < 0x1p-63f ? 0x1p-63f : u > 0x1.fffffep-1f ? 0x1.fffffep-1f : u;
        out[start + i] = waiting_time(u);
    }
}

void exponentials(uint64_t seed, uint64_t purpose, uint64_t position, float *out, int64_t size) {
#pragma omp parallel for if (size >= MANY)
    for (int64_t start = 0; start < size; start += 4 * COUNTERS)
        fill(seed, purpose, position, start, size - start < 4 * COUNTERS ? size - start : 4 * COUNTERS, out);
}
