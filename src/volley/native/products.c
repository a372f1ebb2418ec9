/* Products of a few rows with weights that lie as the instructions read them: a pass over the weights at memory's speed.
 *
 * bf16 weights are summed in fp32, in one order for every number of rows. int8 and int4 weights meet inputs in int8, with a
 * scale for every 64 or 32 inputs of a row; sums within these are integers, so they are exact in any order.
 */
#include "products.h"

#include <float.h>

#if X86
#include <sys/syscall.h>
#include <unistd.h>
#endif

int64_t num_blocks(const Product *product) { return (product->outputs + BLOCK - 1) / BLOCK; }

/* Numbers below it are zeros: 127 divided by them would be infinite. */
static const float LEAST = 1e-30f;

INLINE void quantise_group(const bf16 *x, int size, int32_t zero, int8_t *codes, float *scale, int32_t *sum) {
    int32_t magnitude = 0; /* as bits: what is not a number is above all numbers, so the scale becomes none either */
    for (int i = 0; i < size; i++) {
        int32_t bits = x[i] & 0x7fff;
        magnitude = bits > magnitude ? bits : magnitude;
    }
    float most = widen((bf16)magnitude);
    int is_number = most >= LEAST && most <= FLT_MAX;
    float inverse = is_number ? 127.0f / most : 0.0f;
    int32_t total = 0;
    for (int i = 0; i < size; i++) {
        int32_t code = is_number ? (int32_t)rintf(widen(x[i]) * inverse) : 0;
        codes[i] = (int8_t)code;
        total += code;
    }
    *scale = most / 127.0f;
    *sum = -zero * total;
}

FOR_EACH_CPU static void quantise_row(const Product *product, const bf16 *x, int8_t *codes, float *scales, int32_t *sums) {
    int32_t zero = product->kind == INT4 ? 8 : 128;
    if (product->group == FINE)
        for (int64_t at = 0; at < product->inputs; at += FINE) quantise_group(x + at, FINE, zero, codes + at, scales++, sums++);
    else
        for (int64_t at = 0; at < product->inputs; at += GROUP) quantise_group(x + at, GROUP, zero, codes + at, scales++, sums++);
}

void quantise(const Product *product, const bf16 *x, int64_t stride, Quantised to, int64_t begin, int64_t end) {
    int64_t inputs = product->inputs, groups = inputs / product->group;
    for (int64_t row = begin; row < end; row++)
        quantise_row(product, x + row * stride, to.codes + row * inputs, to.scales + row * groups, to.sums + row * groups);
}

FOR_EACH_CPU static void finish(const Product *product, const float *sums, bf16 *out, int64_t add, int64_t block) {
    int64_t first = block * BLOCK, width = product->outputs - first < BLOCK ? product->outputs - first : BLOCK;
    for (int64_t i = 0; i < width; i++) {
        float value = rounded(sums[i] + (product->bias ? widen(product->bias[first + i]) : 0.0f));
        out[first + i] = add ? narrow(widen(out[first + i]) + value) : narrow(value);
    }
}

#if X86

int has_tiles, has_dot;

/* Accumulators 0 to 3 for up to 64 rows, 4 and 5 for ``bytes`` of inputs (5 has the rows of the last accumulator), 6 for weights. */
AMX static void configure(int64_t rows, int64_t bytes) {
    int64_t tiles = (rows + 15) / 16;
    Tiles config = whole_tiles();
    config.bytes[4] = config.bytes[5] = (uint16_t)bytes;
    config.rows[6] = (uint8_t)(bytes / 4);
    config.rows[tiles - 1] = config.rows[5] = (uint8_t)(rows - (tiles - 1) * 16);
    load_tiles(config);
}

AMX static inline __attribute__((always_inline)) void zero_tiles(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

#define AHEAD 4096 /* bytes of weights between what is read and what is fetched */

/* With tiles: far ahead into the second cache, and from there into the first, which would otherwise wait for memory. */
#define PREFETCH(place, bytes)                                                                      \
    for (int line = 0; line < (bytes); line += 64) {                                                \
        _mm_prefetch((const char *)(place) + line + 16384, _MM_HINT_T1);                            \
        _mm_prefetch((const char *)(place) + line + 2048, _MM_HINT_T0);                             \
    }

#define EACH_STEP(tiles, load, multiply)                                                            \
    switch (tiles) {                                                                                \
        case 4: load(4, 0); multiply(0, 4); load(4, 1); multiply(1, 4); load(4, 2); multiply(2, 4); load(5, 3); multiply(3, 5); break; \
        case 3: load(4, 0); multiply(0, 4); load(4, 1); multiply(1, 4); load(5, 2); multiply(2, 5); break;                             \
        case 2: load(4, 0); multiply(0, 4); load(5, 1); multiply(1, 5); break;                      \
        default: load(5, 0); multiply(0, 5);                                                        \
    }

AMX static void block_amx(const uint8_t *codes, const bf16 *x, int64_t stride, int64_t inputs, int64_t rows,
                          float (*sums)[BLOCK]) {
    int64_t tiles = (rows + 15) / 16;
    zero_tiles();
#define LOAD(tile, index) _tile_loadd(tile, x + (index) * 16 * stride + at, stride * 2)
#define MULTIPLY(sum, tile) _tile_dpbf16ps(sum, tile, 6)
    for (int64_t at = 0; at < inputs; at += 32) {
        PREFETCH(codes + at * 32, 1024)
        _tile_loadd(6, codes + at * 32, 64);
        EACH_STEP(tiles, LOAD, MULTIPLY)
    }
#undef LOAD
#undef MULTIPLY
    _tile_stored(0, sums, 64);
    if (tiles > 1) _tile_stored(1, sums + 16, 64);
    if (tiles > 2) _tile_stored(2, sums + 32, 64);
    if (tiles > 3) _tile_stored(3, sums + 48, 64);
}

DOT static inline __attribute__((always_inline)) void rows_dot(const uint8_t *codes, const bf16 *x, int64_t stride,
                                                               int64_t inputs, int count, float (*sums)[BLOCK]) {
    __m512 own[8];
    for (int r = 0; r < count; r++) own[r] = _mm512_setzero_ps();
    for (int64_t at = 0; at < inputs; at += 2) {
        __m512bh weights = (__m512bh)_mm512_loadu_si512(codes + at * 32);
        _mm_prefetch((const char *)codes + at * 32 + AHEAD, _MM_HINT_T0);
        for (int r = 0; r < count; r++) {
            int32_t pair;
            memcpy(&pair, x + r * stride + at, 4);
            own[r] = _mm512_dpbf16_ps(own[r], (__m512bh)_mm512_set1_epi32(pair), weights);
        }
    }
    for (int r = 0; r < count; r++) _mm512_storeu_ps(sums[r], own[r]);
}

DOT static void block_dot(const uint8_t *codes, const bf16 *x, int64_t stride, int64_t inputs, int64_t rows,
                          float (*sums)[BLOCK]) {
    for (int64_t from = 0; from < rows; from += 8) {
        const bf16 *own = x + from * stride;
        switch (rows - from) {
            case 1: rows_dot(codes, own, stride, inputs, 1, sums + from); break;
            case 2: rows_dot(codes, own, stride, inputs, 2, sums + from); break;
            case 3: rows_dot(codes, own, stride, inputs, 3, sums + from); break;
            case 4: rows_dot(codes, own, stride, inputs, 4, sums + from); break;
            case 5: rows_dot(codes, own, stride, inputs, 5, sums + from); break;
            case 6: rows_dot(codes, own, stride, inputs, 6, sums + from); break;
            case 7: rows_dot(codes, own, stride, inputs, 7, sums + from); break;
            default: rows_dot(codes, own, stride, inputs, 8, sums + from);
        }
    }
}

/* One group of inputs. What codes c of weights mean is (c - zero) times a scale, so zero times the sum of inputs goes. */
DOT static inline __attribute__((always_inline)) void add_group(__m512i found, __m512 *sum, int32_t zero, float of_row,
                                                                __m512 of_outputs) {
    __m512 exact = _mm512_cvtepi32_ps(_mm512_add_epi32(found, _mm512_set1_epi32(zero)));
    *sum = _mm512_fmadd_ps(exact, _mm512_mul_ps(_mm512_set1_ps(of_row), of_outputs), *sum);
}

DOT static inline __attribute__((always_inline)) void unpack(const uint8_t *codes, int quad, __m512i *low, __m512i *high) {
    __m512i both = _mm512_loadu_si512(codes + quad / 2 * 64), nibble = _mm512_set1_epi8(15);
    *low = _mm512_and_si512(both, nibble);
    *high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
}

/* The sums of one group of inputs for up to 4 rows. */
DOT static inline __attribute__((always_inline)) void group_dot(const uint8_t *codes, const int8_t *x, int64_t inputs, int four,
                                                                int group, int count, __m512i *found) {
    for (int r = 0; r < count; r++) found[r] = _mm512_setzero_si512();
    for (int quad = 0; quad < group / 4; quad += 2) {
        __m512i one, two;
        if (four)
            unpack(codes, quad, &one, &two);
        else
            one = _mm512_loadu_si512(codes + quad * 64), two = _mm512_loadu_si512(codes + quad * 64 + 64);
        for (int r = 0; r < count; r++) {
            int32_t first, second;
            memcpy(&first, x + r * inputs + quad * 4, 4);
            memcpy(&second, x + r * inputs + quad * 4 + 4, 4);
            found[r] = _mm512_dpbusd_epi32(found[r], one, _mm512_set1_epi32(first));
            found[r] = _mm512_dpbusd_epi32(found[r], two, _mm512_set1_epi32(second));
        }
    }
}

/* The scales of a group's weights; int8 in groups of 64 has some for whole outputs instead (scale_outputs). */
DOT static inline __attribute__((always_inline)) __m512 group_scales(const void *scales, int64_t g, int four, int group) {
    if (group == FINE) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)scales + g * BLOCK)));
    return four ? _mm512_loadu_ps((const float *)scales + g * BLOCK) : _mm512_set1_ps(1.0f);
}

DOT static inline __attribute__((always_inline)) void rows_codes(const Product *product, const uint8_t *codes,
                                                                 const void *scales, Quantised x, int64_t row, int four,
                                                                 int group, int count, float (*sums)[BLOCK]) {
    int64_t inputs = product->inputs, groups = inputs / group, bytes = four ? 8 * group : 16 * group;
    __m512 own[4];
    for (int r = 0; r < count; r++) own[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i found[4];
        for (int line = 0; line < bytes; line += 64) _mm_prefetch((const char *)codes + g * bytes + AHEAD + line, _MM_HINT_T0);
        group_dot(codes + g * bytes, x.codes + row * inputs + g * group, inputs, four, group, count, found);
        __m512 of_outputs = group_scales(scales, g, four, group);
        for (int r = 0; r < count; r++) {
            int64_t place = (row + r) * groups + g;
            add_group(found[r], &own[r], x.sums[place], x.scales[place], of_outputs);
        }
    }
    for (int r = 0; r < count; r++) _mm512_storeu_ps(sums[r], own[r]);
}

DOT static void block_codes(const Product *product, const uint8_t *codes, const void *scales, Quantised x, int64_t row,
                            int64_t rows, float (*sums)[BLOCK]) {
#define ROWS(four, group, r, count) rows_codes(product, codes, scales, x, row + (r), four, group, count, sums + (r))
    BY_KIND(product, rows)
#undef ROWS
}

/* int4 codes of a group of weights, a byte each, as tiles read them. */
AMX static inline __attribute__((always_inline)) void open_group(const uint8_t *codes, int64_t group, uint8_t *opened) {
    for (int quad = 0; quad < group / 4; quad += 2) {
        __m512i low, high;
        unpack(codes, quad, &low, &high);
        _mm512_store_si512(opened + quad * 64, low), _mm512_store_si512(opened + quad * 64 + 64, high);
    }
}

/* What tiles read and write is on the stack: each use of a thread's own memory would be a call, which spills all vectors. */
AMX static void block_codes_amx(const Product *product, const uint8_t *codes, const void *scales, Quantised x, int64_t row,
                                int64_t rows, float (*sums)[BLOCK]) {
    int64_t inputs = product->inputs, groups = inputs / product->group, tiles = (rows + 15) / 16;
    int four = product->kind == INT4, group = (int)product->group, bytes = four ? 8 * group : 16 * group;
    int32_t found[MOST][BLOCK] __attribute__((aligned(64)));
    uint8_t opened[2][1024] __attribute__((aligned(64)));
    memset(sums, 0, rows * BLOCK * sizeof(float));
    if (four) open_group(codes, group, opened[0]);
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *own = codes + g * bytes;
        const int8_t *inputs_of = x.codes + row * inputs + g * group;
        PREFETCH(own, bytes)
        if (four) {
            if (g + 1 < groups) open_group(own + bytes, group, opened[(g + 1) & 1]); /* a turn early, or tiles would wait */
            WRITTEN(opened);
            own = opened[g & 1];
        }
        _tile_loadd(6, own, 64);
        zero_tiles();
#define LOAD(tile, index) _tile_loadd(tile, inputs_of + (index) * 16 * inputs, inputs)
#define MULTIPLY(sum, tile) _tile_dpbsud(sum, tile, 6)
        EACH_STEP(tiles, LOAD, MULTIPLY)
#undef LOAD
#undef MULTIPLY
        _tile_stored(0, found, 64);
        if (tiles > 1) _tile_stored(1, found + 16, 64);
        if (tiles > 2) _tile_stored(2, found + 32, 64);
        if (tiles > 3) _tile_stored(3, found + 48, 64);
        WRITTEN(found);
        __m512 of_outputs = group_scales(scales, g, four, group);
        for (int64_t r = 0; r < rows; r++) {
            int64_t place = (row + r) * groups + g;
            __m512 sum = _mm512_loadu_ps(sums[r]);
            add_group(_mm512_load_si512(found[r]), &sum, x.sums[place], x.scales[place], of_outputs);
            _mm512_storeu_ps(sums[r], sum);
        }
    }
}

FOR_EACH_CPU static void scale_outputs(float (*sums)[BLOCK], int64_t rows, const float *scales) {
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < BLOCK; i++) sums[r][i] *= scales[i];
}

/* Rows up to which codes are multiplied without tiles, which want int4 opened first. */
static int64_t most_direct(const Product *product) { return product->kind == INT4 ? 4 : 1; }

void multiply(const Product *product, const bf16 *x, int64_t stride, Quantised codes, int64_t rows, bf16 *out, int64_t add,
              int64_t begin, int64_t end) {
    static _Thread_local float sums[TOGETHER][MOST][BLOCK] __attribute__((aligned(64)));
    int amx = has_tiles && (product->kind == BF16 || rows > most_direct(product)), several = product->kind == BF16 && !amx && !has_dot;
    int64_t inputs = product->inputs, configured = 0, together = product->kind == BF16 ? 64 : product->group;
    int64_t bytes = inputs * BLOCK * 2 >> product->kind; /* of a block: 2, 1, 1/2 for each weight */
    int64_t of_scales = product->group == FINE ? inputs / FINE * BLOCK * 2 : product->kind == INT4 ? inputs / GROUP * BLOCK * 4 : BLOCK * 4;
    for (int64_t block = begin, blocks; block < end; block += blocks) {
        const uint8_t *own = product->codes + block * bytes;
        const void *scales = product->kind == BF16 ? 0 : (const uint8_t *)product->scales + block * of_scales;
        blocks = !several ? 1 : end - block < TOGETHER ? end - block : TOGETHER;
        for (int64_t from = 0; from < rows; from += MOST) {
            int64_t count = rows - from < MOST ? rows - from : MOST;
            if (amx && count != configured) configure(configured = count, together);
            if (several)
                blocks_avx2(own, x + from * stride, stride, inputs, blocks, count, sums);
            else if (product->kind == BF16)
                (amx ? block_amx : block_dot)(own, x + from * stride, stride, inputs, count, sums[0]);
            else
                (amx ? block_codes_amx : has_dot ? block_codes : block_codes_avx2)(product, own, scales, codes, from, count, sums[0]);
            if (product->kind == INT8 && product->group == GROUP) scale_outputs(sums[0], count, scales);
            for (int64_t i = 0; i < blocks; i++)
                for (int64_t r = 0; r < count; r++)
                    finish(product, sums[i][r], out + (from + r) * product->outputs, add, block + i);
        }
    }
    if (configured) release_tiles();
}

/* Which kernels products and attention run on from now on, ``most`` or what this CPU has: 3 with tiles, which must be asked for
   once in a process, 2 with AVX512's dot products, 1 with AVX2 alone, 0 on none. Some of x86-64-v3 and v4 is masked in virtual
   machines. */
#define HAS __builtin_cpu_supports
int64_t usable(int64_t most) {
    int64_t level = HAS("avx2") && HAS("fma") && HAS("bmi") && HAS("bmi2") && HAS("f16c") && HAS("lzcnt") && HAS("movbe");
    has_dot = level && most >= 2 && HAS("avx512f") && HAS("avx512bw") && HAS("avx512cd") && HAS("avx512dq") && HAS("avx512vl")
        && HAS("avx512bf16") && HAS("avx512vnni");
    has_tiles = has_dot && most >= 3 && HAS("amx-tile") && HAS("amx-bf16") && HAS("amx-int8")
        && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
    return level + has_dot + has_tiles;
}

#else

void multiply(const Product *product, const bf16 *x, int64_t stride, Quantised codes, int64_t rows, bf16 *out, int64_t add,
              int64_t begin, int64_t end) {
    (void)product, (void)x, (void)stride, (void)codes, (void)rows, (void)out, (void)add, (void)begin, (void)end;
}
int64_t usable(int64_t most) { return most & 0; }

#endif

/* A whole product: x [rows, inputs], rows ``stride`` apart -> out [rows, outputs]. ``scratch`` has room for the codes. */
void linear(const Product *product, const bf16 *x, int64_t stride, int8_t *codes, float *scales, int32_t *sums, bf16 *out,
            int64_t rows) {
    Quantised own = {codes, scales, sums};
    if (product->kind != BF16) quantise(product, x, stride, own, 0, rows);
    int64_t blocks = num_blocks(product), part = blocks > 64 ? 16 : 4, parts = (blocks + part - 1) / part;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < parts; i++) {
        int64_t end = (i + 1) * part < blocks ? (i + 1) * part : blocks;
        multiply(product, x, stride, own, rows, out, 0, i * part, end);
    }
}
