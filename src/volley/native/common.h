/* bf16 numbers, and macros that compile a function for several CPUs. */
#ifndef VOLLEY_COMMON_H
#define VOLLEY_COMMON_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define X86 1
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define AVX2 __attribute__((target("arch=x86-64-v3")))
#define DOT __attribute__((target("arch=x86-64-v4,avx512bf16,avx512vnni")))
#define AMX __attribute__((target("arch=x86-64-v4,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")))
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 4") for
/* Call ``call(r, count)`` for groups of up to four rows; ``count`` is a constant, so that sums stay in registers. */
#define BY_FOUR(rows, call)                                                                         \
    for (int64_t r = 0; r < (rows); r += 4) switch ((rows) - r) {                                   \
            case 1: call(r, 1); break;                                                              \
            case 2: call(r, 2); break;                                                              \
            case 3: call(r, 3); break;                                                              \
            default: call(r, 4);                                                                    \
        }
extern int has_tiles; /* the CPU has AMX, and this process may use it */
extern int has_dot;   /* the CPU has AVX512-BF16 and VNNI */

typedef struct { /* configuration of the eight tiles: bytes of a row, and rows */
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

/* Mark a variable as written: the compiler does not know that tiles and their configuration are loaded from memory. */
#define WRITTEN(variable) __asm__ volatile("" : "+m"(variable))

static inline Tiles whole_tiles(void) {
    Tiles config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    return config;
}

AMX static inline void load_tiles(Tiles config) {
    WRITTEN(config);
    _tile_loadconfig(&config);
}

AMX static inline void release_tiles(void) { _tile_release(); }
#else
#define X86 0
#define FOR_EACH_CPU
#define INLINE static inline
#endif

typedef uint16_t bf16;

static inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float of_half(uint16_t half) { /* fp16 */
    uint32_t size = half & 0x7fff, whole = size >= 0x7c00 ? size << 13 | 0x7f800000 : (size << 13) + (112 << 23);
    return of_bits((size < 0x400 ? bits_of((float)size * 0x1p-24f) : whole) | (uint32_t)(half & 0x8000) << 16);
}

static inline bf16 narrow(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return value != value ? 0x7fc0 : (bf16)rounded;
}

static inline float rounded(float value) { return widen(narrow(value)); }

static inline float exponential(float x) { /* relative error below 3e-7 for x in [-87, 87] */
    x = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666672f + r * (0.0416666418f + r * (0.00833345205f + r * 0.00139430189f)))));
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

static inline float tangent(float x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); } /* hyperbolic */

static inline float dot(const bf16 *restrict row, const float *restrict x, int64_t size) {
    float parts[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++) parts[j] += widen(row[i + j]) * x[i + j];
    for (int j = 0; j < 16; j++) sum += parts[j];
    for (; i < size; i++) sum += widen(row[i]) * x[i];
    return sum;
}

#endif
