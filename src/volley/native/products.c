/* Matmuls of a few rows with packed weights, which are read at the speed of memory.
 *
 * bf16 weights are summed in fp32, in one order for every number of rows. For quantised weights the inputs are quantised to int8,
 * with a scale for every group of inputs of a row. Sums within a group are integers, so they are exact in any order. A group's
 * minimum is multiplied by the sum of its inputs, which is computed once for all outputs.
 */
#include "products.h"

#include <float.h>
#include <omp.h>
#include <stdlib.h>

#if X86
#include <sys/syscall.h>
#include <unistd.h>

#define UNIT 4   /* bytes of a row in one dot product: two inputs in bf16, or four codes */
#define TILE 16  /* rows whose units are stored together in bf16 */
#define FEW 8    /* rows whose units are stored together in codes */
#define LONG 512 /* inputs from which several blocks are multiplied at once; shorter blocks are read faster one after another */

static int64_t num_blocks(const Product *product) { return (product->outputs + BLOCK - 1) / BLOCK; }

int has_tiles, has_dot;

/* Return whether tiles multiply. With codes of a few rows, or in groups of 16, dot products are faster: tiles store their sums, which
 * are then scaled. */
static int uses_tiles(const Product *product, int64_t rows) {
    return has_tiles && (is_wide(product->kind) || (rows > FEW && FORMATS[product->kind].group > 16));
}

/* Return whether the kernel reads x unpacked. */
static int reads_rows(const Product *product, int64_t rows) {
    return is_wide(product->kind) && (!has_dot || has_tiles || rows == 1);
}

/* Magnitude below which a group is zero: 127 divided by it would be infinite. */
static const float LEAST = 1e-30f;

INLINE void quantise_group(const bf16 *x, int size, int32_t zero, int8_t *codes, float *scale, void *sum) {
    int32_t magnitude = 0; /* as bits: NaN is above all numbers, so the scale becomes NaN too */
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
    float scaled = (float)total * *scale;
    total *= -zero;
    memcpy(sum, zero ? (void *)&total : (void *)&scaled, 4);
}

/* Return the number of rows of the tile of at most ``most`` that begins at row ``first``. */
static int64_t in_tile(int64_t rows, int64_t first, int64_t most) { return rows - first < most ? rows - first : most; }

/* Quantise inputs [begin, end) of all rows. ``in_units``: in the layout of dot products (prepare). */
FOR_EACH_CPU static void quantise(const Product *product, const bf16 *x, int64_t stride, int64_t rows, int in_units, Prepared to,
                                  int64_t begin, int64_t end) {
    int64_t inputs = product->inputs, group = FORMATS[product->kind].group;
    int32_t zero = FORMATS[product->kind].zero;
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = row / FEW * FEW, count = in_units ? in_tile(rows, first, FEW) : 1;
        int8_t *own = to.values + (in_units ? first * inputs + (row - first) * UNIT : row * inputs);
        for (int64_t at = begin; at < end; at += group) {
            int8_t codes[GROUP];
            int64_t place = at / group * rows + row;
            if (group == 16)
                quantise_group(x + row * stride + at, 16, zero, codes, to.scales + place, to.sums + place);
            else if (group == 32)
                quantise_group(x + row * stride + at, 32, zero, codes, to.scales + place, to.sums + place);
            else
                quantise_group(x + row * stride + at, GROUP, zero, codes, to.scales + place, to.sums + place);
            for (int64_t i = 0; i < group; i += UNIT) memcpy(own + (at + i) * count, codes + i, UNIT);
        }
    }
}

/* Write bf16 inputs [begin, end) of all rows in the layout of dot products. */
static void interleave(const Product *product, const bf16 *x, int64_t stride, int64_t rows, Prepared to, int64_t begin, int64_t end) {
    for (int64_t first = 0; first < rows; first += TILE) {
        int64_t count = in_tile(rows, first, TILE);
        int8_t *own = to.values + first * product->inputs * 2;
        for (int64_t at = begin; at < end; at += 2)
            for (int64_t r = 0; r < count; r++) memcpy(own + at * 2 * count + r * UNIT, x + (first + r) * stride + at, UNIT);
    }
}

/* Pack inputs [begin, end) of x [rows, inputs] for the kernel. Dot products read units of four bytes, with those of a tile's
 * rows side by side: [rows / 16][units][16, or the remaining rows], with 8 for 16 in codes. A single row stays as it is. */
static void prepare(const Product *product, const bf16 *x, int64_t stride, int64_t rows, Prepared to, int64_t begin, int64_t end) {
    int in_units = has_dot && !uses_tiles(product, rows);
    if (!is_wide(product->kind))
        quantise(product, x, stride, rows, in_units, to, begin, end);
    else if (in_units)
        interleave(product, x, stride, rows, to, begin, end);
}

INLINE void finish_some(const float *sums, const bf16 *bias, bf16 *out, int64_t add, int64_t width) {
    for (int64_t i = 0; i < width; i++) {
        float value = rounded(sums[i] + (bias ? widen(bias[i]) : 0.0f));
        out[i] = narrow(add ? widen(out[i]) + value : value);
    }
}

/* Write or add the ``sums [rows, BLOCK]`` of a block. Whole blocks without a bias are a case of their own, for vectors. */
FOR_EACH_CPU static void finish(const Product *product, float (*sums)[BLOCK], int64_t rows, bf16 *out, int64_t add, int64_t block) {
    int64_t first = block * BLOCK, width = product->outputs - first < BLOCK ? product->outputs - first : BLOCK;
    const bf16 *bias = product->bias ? product->bias + first : 0;
    out += first;
    for (int64_t r = 0; r < rows; r++, out += product->stride) {
        if (bias || width < BLOCK)
            finish_some(sums[r], bias, out, add, width);
        else if (add)
            finish_some(sums[r], 0, out, 1, BLOCK);
        else
            finish_some(sums[r], 0, out, 0, BLOCK);
    }
}

/* Configure tiles: 0 to 3 are accumulators of up to 64 rows, 4 and 5 are for ``bytes`` of inputs (5 has the rows of the last
 * accumulator), 6 is for weights. */
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

#define AHEAD 4096 /* distance of prefetching in bytes of weights */

/* Prefetch for tiles: far ahead into the second cache, and from there into the first. */
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

/* Add units [begin, end) of inputs to the sums of some blocks and of the ``count`` rows of a tile. */
DOT INLINE void add_units(const uint8_t *codes, const int8_t *x, int64_t inputs, int64_t begin, int64_t end, int64_t ahead,
                          int blocks, int count, __m512 *sums) {
    UNROLLED(int64_t unit = begin; unit < end; unit++) {
        __m512bh weights[3];
        for (int b = 0; b < blocks; b++) {
            const uint8_t *place = codes + (b * inputs + unit * 2) * 32;
            weights[b] = (__m512bh)_mm512_loadu_si512(place);
            _mm_prefetch((const char *)place + ahead, _MM_HINT_T0);
        }
        for (int r = 0; r < count; r++) {
            int32_t pair;
            memcpy(&pair, x + (unit * count + r) * UNIT, UNIT);
            for (int b = 0; b < blocks; b++)
                sums[b * count + r] = _mm512_dpbf16_ps(sums[b * count + r], (__m512bh)_mm512_set1_epi32(pair), weights[b]);
        }
    }
}

/* Compute the sums of ``blocks`` blocks and ``count`` rows, at most 24 sums, as many as registers hold beside weights. */
DOT INLINE void tile_dot(const uint8_t *codes, const int8_t *x, int64_t inputs, int blocks, int count, float (*sums)[MOST][BLOCK]) {
    __m512 own[24];
    int64_t units = inputs / 2, turn = blocks > 1 && units > AHEAD / 64 ? units - AHEAD / 64 : 0;
    for (int i = 0; i < blocks * count; i++) own[i] = _mm512_setzero_ps();
    add_units(codes, x, inputs, 0, turn, AHEAD, blocks, count, own);
    /* Memory after the end of a block is another of these blocks, so the next ones are further on. */
    add_units(codes, x, inputs, turn, units, AHEAD + (blocks - 1) * inputs * 32, blocks, count, own);
    for (int b = 0; b < blocks; b++)
        for (int r = 0; r < count; r++) _mm512_storeu_ps(sums[b][r], own[b * count + r]);
}

/* Compute the sums of blocks and of a tile of ``rows``. Sequential reads are fastest, and memory limits few rows. */
DOT static void blocks_dot(const uint8_t *codes, const int8_t *x, int64_t inputs, int64_t blocks, int64_t rows,
                           float (*sums)[MOST][BLOCK]) {
    int64_t b = 0;
#define RUN(wide, count)                                                                            \
    case count:                                                                                     \
        for (; b + wide <= blocks; b += wide) tile_dot(codes + b * inputs * 32, x, inputs, wide, count, sums + b); \
        break;
    if (inputs >= LONG)
        switch (rows) { RUN(3, 7) RUN(3, 8) RUN(2, 9) RUN(2, 10) RUN(2, 11) RUN(2, 12) }
    switch (rows) {
        RUN(1, 1) RUN(1, 2) RUN(1, 3) RUN(1, 4) RUN(1, 5) RUN(1, 6) RUN(1, 7) RUN(1, 8)
        RUN(1, 9) RUN(1, 10) RUN(1, 11) RUN(1, 12) RUN(1, 13) RUN(1, 14) RUN(1, 15) RUN(1, 16)
    }
#undef RUN
}

/* Move the bits of each byte from position ``from`` to ``to``. */
DOT INLINE __m512i moved(__m512i bytes, int from, int to, int mask) {
    __m512i there = from == to ? bytes : from > to ? _mm512_srli_epi16(bytes, from - to) : _mm512_slli_epi16(bytes, to - from);
    return _mm512_and_si512(there, _mm512_set1_epi8((char)mask));
}

/* Unpack quad ``quad`` and the next one, of 16 outputs; see put_pack. */
DOT INLINE void unpack(int kind, const uint8_t *pack, int quad, __m512i *one, __m512i *two) {
    int bits = FORMATS[kind].bits, second = quad % 4 * 2;
    if (bits == 8) {
        *one = _mm512_loadu_si512(pack + quad * 64), *two = _mm512_loadu_si512(pack + quad * 64 + 64);
        return;
    }
    __m512i low = _mm512_loadu_si512(pack + quad / (bits < 4 ? 4 : 2) * 64);
    if (bits < 4)
        *one = moved(low, second, 0, 3), *two = moved(low, second + 2, 0, 3);
    else
        *one = moved(low, 0, 0, 15), *two = moved(low, 4, 0, 15);
    if (bits == 3 || bits == 5) {
        __m512i high = _mm512_loadu_si512(pack + (bits - 1) * 64);
        *one = _mm512_or_si512(*one, moved(high, quad, bits - 1, 1 << (bits - 1)));
        *two = _mm512_or_si512(*two, moved(high, quad + 1, bits - 1, 1 << (bits - 1)));
    }
    if (bits == 6) {
        __m512i high = _mm512_loadu_si512(pack + 256 + quad / 4 * 64);
        *one = _mm512_or_si512(*one, moved(high, second, 4, 48)), *two = _mm512_or_si512(*two, moved(high, second + 2, 4, 48));
    }
    if (FORMATS[kind].table) {
        __m128i own = _mm_loadu_si128((const __m128i *)TABLES[FORMATS[kind].table]);
        __m512i table = _mm512_xor_si512(_mm512_broadcast_i32x4(own), _mm512_set1_epi8(-128));
        *one = _mm512_shuffle_epi8(table, *one), *two = _mm512_shuffle_epi8(table, *two);
    }
}

/* Add one group of inputs to the sums ``found`` of a tile of ``count`` rows; quads from ``first`` on of a pack. */
DOT INLINE void group_dot(int kind, const uint8_t *pack, int first, const int8_t *x, int count, __m512i *found) {
    _Pragma("GCC unroll 8") for (int quad = 0; quad < FORMATS[kind].group / 4; quad += 2) {
        __m512i one, two;
        unpack(kind, pack, first + quad, &one, &two);
        for (int r = 0; r < count; r++) {
            int32_t of_one, of_two;
            memcpy(&of_one, x + (quad * count + r) * UNIT, UNIT);
            memcpy(&of_two, x + ((quad + 1) * count + r) * UNIT, UNIT);
            found[r] = _mm512_dpbusd_epi32(found[r], one, _mm512_set1_epi32(of_one));
            found[r] = _mm512_dpbusd_epi32(found[r], two, _mm512_set1_epi32(of_two));
        }
    }
}

typedef struct { /* scales and minima of a group, for 16 outputs */
    __m512 scale, least;
} Scales;

DOT INLINE __m512 of_halves(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
DOT INLINE __m512 of_bytes(const uint8_t *at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}

/* Load the scales of a group; INT8 has scales of whole outputs instead (scale_outputs). */
DOT INLINE Scales group_scales(int kind, const uint8_t *scales, int64_t g) {
    const uint8_t *own = scales_at(kind, scales, g), *factors = factors_at(kind, scales, g);
    int more = num_scales(kind) > 1;
    __m512 none = _mm512_setzero_ps();
    switch (FORMATS[kind].scale) {
        case HALF: return (Scales){of_halves(own), more ? of_halves(own + 32) : none};
        case PRODUCT: {
            __m512 scale = _mm512_mul_ps(of_halves(own), of_bytes(factors));
            if (unit_of(kind) != 1.0f) scale = _mm512_mul_ps(scale, _mm512_set1_ps(unit_of(kind)));
            return (Scales){scale, more ? _mm512_mul_ps(of_halves(own + 32), of_bytes(factors + 16)) : none};
        }
        case BRAIN: {
            __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)own));
            return (Scales){_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)), none};
        }
        case FLOAT: return (Scales){_mm512_loadu_ps(own), none};
        default: return (Scales){_mm512_set1_ps(1.0f), none};
    }
}

/* Return the initial integer sums, -zero times the inputs, because a weight is (code - zero) times a scale. */
DOT INLINE __m512i first_sums(int kind, Prepared x, int64_t place) {
    return FORMATS[kind].zero ? _mm512_set1_epi32(x.sums[place]) : _mm512_setzero_si512();
}

/* Add the exact sums of a group. */
DOT INLINE __m512 add_group(int kind, __m512i found, __m512 sum, Prepared x, int64_t place, Scales of_outputs) {
    __m512 scale = _mm512_mul_ps(_mm512_set1_ps(x.scales[place]), of_outputs.scale);
    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(found), scale, sum);
    if (num_scales(kind) == 1) return sum;
    float inputs;
    memcpy(&inputs, x.sums + place, 4);
    return _mm512_fmadd_ps(_mm512_set1_ps(inputs), of_outputs.least, sum);
}

/* Return the number of groups multiplied at once, which fill a pack. */
INLINE int in_turn(int kind) { return FORMATS[kind].group < PACK ? PACK / FORMATS[kind].group : 1; }

/* Compute the sums of a tile of ``count`` rows, the first of which is ``row`` of all. */
DOT INLINE void tile_codes(int kind, int64_t inputs, const uint8_t *codes, const uint8_t *scales, Prepared x, int64_t row, int count,
                           float (*sums)[BLOCK]) {
    int group = FORMATS[kind].group, turn = in_turn(kind), bytes = group * turn * 2 * FORMATS[kind].bits;
    const int8_t *values = x.values + row * inputs;
    __m512 own[FEW];
    for (int r = 0; r < count; r++) own[r] = _mm512_setzero_ps();
    for (int64_t at = 0; at < inputs / group; at += turn, codes += bytes) {
        for (int line = 0; line < bytes; line += 64) _mm_prefetch((const char *)codes + AHEAD + line, _MM_HINT_T0);
        _Pragma("GCC unroll 2") for (int part = 0; part < turn; part++, values += group * count) {
            int64_t g = at + part, place = g * x.rows + row;
            __m512i found[FEW];
            for (int r = 0; r < count; r++) found[r] = first_sums(kind, x, place + r);
            group_dot(kind, codes, part * group / 4, values, count, found);
            Scales of_outputs = group_scales(kind, scales, g);
            for (int r = 0; r < count; r++) own[r] = add_group(kind, found[r], own[r], x, place + r, of_outputs);
        }
    }
    for (int r = 0; r < count; r++) _mm512_storeu_ps(sums[r], own[r]);
}

DOT INLINE void all_codes(int kind, int64_t inputs, const uint8_t *codes, const uint8_t *scales, Prepared x, int64_t row, int64_t rows,
                          float (*sums)[BLOCK]) {
    for (; rows > 0; row += FEW, rows -= FEW, sums += FEW)
#define TILE_OF(count) case count: tile_codes(kind, inputs, codes, scales, x, row, count, sums); break;
        switch (rows) {
            TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6) TILE_OF(7)
            default: tile_codes(kind, inputs, codes, scales, x, row, FEW, sums);
        }
#undef TILE_OF
}

DOT static void block_codes(const Product *product, const uint8_t *codes, const uint8_t *scales, Prepared x, int64_t row,
                            int64_t rows, float (*sums)[BLOCK]) {
#define CODES(kind) all_codes(kind, product->inputs, codes, scales, x, row, rows, sums)
    BY_KIND(product->kind, CODES)
#undef CODES
}

/* Unpack the codes of group ``g`` of weights to bytes, in the layout of tiles. */
AMX INLINE void open_group(int kind, const uint8_t *codes, int64_t g, uint8_t *opened) {
    int group = FORMATS[kind].group, turn = in_turn(kind), quads = group / 4;
    const uint8_t *pack = codes + g / turn * turn * group * 2 * FORMATS[kind].bits;
#define OPEN(first)                                                                                 \
    _Pragma("GCC unroll 8") for (int quad = 0; quad < quads; quad += 2) {                           \
        __m512i one, two;                                                                           \
        unpack(kind, pack, (first) + quad, &one, &two);                                             \
        _mm512_store_si512(opened + quad * 64, one), _mm512_store_si512(opened + quad * 64 + 64, two); \
    }
    if (g % turn)
        OPEN(quads)
    else
        OPEN(0)
#undef OPEN
}

/* Compute the sums with tiles, whose memory is on the stack: each access to thread-local memory would be a call that spills. */
AMX INLINE void tiles_codes(int kind, int64_t inputs, const uint8_t *codes, const uint8_t *scales, Prepared x, int64_t row,
                            int64_t rows, int32_t (*found)[BLOCK], uint8_t (*opened)[1024], float (*sums)[BLOCK]) {
    int group = FORMATS[kind].group, bits = FORMATS[kind].bits, bytes = group * 2 * bits;
    int64_t groups = inputs / group, tiles = (rows + 15) / 16;
    memset(sums, 0, rows * BLOCK * sizeof(float));
    if (bits < 8) open_group(kind, codes, 0, opened[0]);
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *own = codes + g * bytes;
        const int8_t *inputs_of = x.values + row * inputs + g * group;
        PREFETCH(own, bytes)
        if (bits < 8) {
            if (g + 1 < groups) open_group(kind, codes, g + 1, opened[(g + 1) & 1]); /* ahead, so that tiles do not wait */
            __asm__ volatile("" ::: "memory");
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
        __asm__ volatile("" ::: "memory");
        Scales of_outputs = group_scales(kind, scales, g);
        for (int64_t r = 0; r < rows; r++) {
            int64_t place = g * x.rows + row + r;
            __m512i exact = _mm512_add_epi32(_mm512_load_si512(found[r]), first_sums(kind, x, place));
            _mm512_storeu_ps(sums[r], add_group(kind, exact, _mm512_loadu_ps(sums[r]), x, place, of_outputs));
        }
    }
}

AMX static void block_codes_amx(const Product *product, const uint8_t *codes, const uint8_t *scales, Prepared x, int64_t row,
                                int64_t rows, float (*sums)[BLOCK]) {
    int32_t found[MOST][BLOCK] __attribute__((aligned(64)));
    uint8_t opened[2][1024] __attribute__((aligned(64)));
#define CODES(kind) tiles_codes(kind, product->inputs, codes, scales, x, row, rows, found, opened, sums)
    BY_KIND(product->kind, CODES)
#undef CODES
}

FOR_EACH_CPU static void scale_outputs(float (*sums)[BLOCK], int64_t rows, const float *scales) {
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < BLOCK; i++) sums[r][i] *= scales[i];
}

/* Return memory of this thread for ``count`` numbers, which stays in its cache from block to block. */
static bf16 *scratch_for(int64_t count) {
    static _Thread_local bf16 *scratch;
    static _Thread_local int64_t size;
    if (count > size) {
        free(scratch);
        scratch = aligned_alloc(64, (size_t)(size = (count + 31) / 32 * 32) * 2);
    }
    return scratch;
}

/* Compute the outputs of blocks [begin, end). */
static void multiply_blocks(const Product *product, const bf16 *x, int64_t stride, Prepared prepared, int64_t rows, bf16 *out,
                            int64_t add, int64_t begin, int64_t end) {
    static _Thread_local float sums[TOGETHER][MOST][BLOCK] __attribute__((aligned(64)));
    int tiles = uses_tiles(product, rows), dots = has_dot && !tiles, plain = is_wide(product->kind);
    int64_t inputs = product->inputs, configured = 0, most = dots ? TILE : MOST, together = product->kind != BF16 || tiles || (dots && rows > TILE) ? 1 : TOGETHER;
    int kind = (int)product->kind, by_output = FORMATS[kind].scale == OF_OUTPUT, narrow_codes = plain && kind != BF16;
    int64_t bytes = inputs * 2 * FORMATS[kind].bits; /* bytes of a block */
    int64_t of_scales = by_output ? BLOCK * 4 : narrow_codes ? own_scale_bytes(kind, inputs) : inputs / scaled_inputs(kind) * scale_bytes(kind);
    bf16 *wide = narrow_codes ? scratch_for(inputs * BLOCK) : 0;
    for (int64_t block = begin, blocks; block < end; block += blocks) {
        const uint8_t *own = product->codes + block * bytes;
        const uint8_t *scales = kind == BF16 ? 0 : (const uint8_t *)product->scales + block * of_scales;
        if (narrow_codes) widen_block(kind, own, scales, inputs, wide), own = (const uint8_t *)wide;
        blocks = end - block < together ? end - block : together;
        for (int64_t from = 0; from < rows; from += most) {
            int64_t count = rows - from < most ? rows - from : most;
            const bf16 *of_rows = x + from * stride;
            if (tiles && count != configured) configure(configured = count, plain ? 64 : FORMATS[kind].group);
            if (plain && tiles)
                block_amx(own, of_rows, stride, inputs, count, sums[0]);
            else if (plain && dots)
                blocks_dot(own, rows == 1 ? (const int8_t *)x : prepared.values + from * inputs * 2, inputs, blocks, count, sums);
            else if (plain)
                blocks_avx2(own, of_rows, stride, inputs, blocks, count, sums);
            else
                (tiles ? block_codes_amx : dots ? block_codes : block_codes_avx2)(product, own, scales, prepared, from, count, sums[0]);
            if (by_output) scale_outputs(sums[0], count, (const float *)scales);
            for (int64_t i = 0; i < blocks; i++) finish(product, sums[i], count, out + from * product->stride, add, block + i);
        }
    }
    if (configured) release_tiles();
}

static void multiply_part(const Product *product, const bf16 *x, int64_t stride, Prepared prepared, int64_t rows, bf16 *out,
                          int64_t add) {
    prepared.rows = rows;
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), blocks = num_blocks(product);
    if (!reads_rows(product, rows)) {
        int64_t inputs = product->inputs, parts = (inputs + GROUP - 1) / GROUP, end = parts * (thread + 1) / threads * GROUP;
        prepare(product, x, stride, rows, prepared, parts * thread / threads * GROUP, end < inputs ? end : inputs);
#pragma omp barrier
    }
    multiply_blocks(product, x, stride, prepared, rows, out, add, blocks * thread / threads, blocks * (thread + 1) / threads);
#pragma omp barrier
}

void multiply(const Product *product, const bf16 *x, int64_t stride, Prepared prepared, int64_t rows, bf16 *out, int64_t add) {
    for (; product; out += product->outputs, product = product->next) multiply_part(product, x, stride, prepared, rows, out, add);
}

/* Choose the instructions for matmuls and attention, at most ``most``, and return them: 3 with tiles, which a process must
   request once, 2 with AVX512's dot products, 1 with AVX2 alone, 0 for none. Virtual machines mask some features of x86-64-v3
   and v4. */
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

void multiply(const Product *product, const bf16 *x, int64_t stride, Prepared prepared, int64_t rows, bf16 *out, int64_t add) {
    (void)product, (void)x, (void)stride, (void)prepared, (void)rows, (void)out, (void)add;
}
int64_t usable(int64_t most) { return most & 0; }

#endif

/* Run ``multiply`` in a parallel region of its own, with the buffers ``values``, ``scales`` and ``sums``. */
void linear(const Product *product, const bf16 *x, int64_t stride, int8_t *values, float *scales, int32_t *sums, bf16 *out,
            int64_t rows) {
    Prepared prepared = {values, scales, sums, rows};
#pragma omp parallel
    multiply(product, x, stride, prepared, rows, out, 0);
}
