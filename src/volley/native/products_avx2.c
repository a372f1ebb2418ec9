/* Matmuls for CPUs with AVX2 and FMA but without AVX-512. The layout of weights is that of products.c. */
#include "products.h"

#if X86
#define AHEAD 2048
#define MOST_ROWS 6   /* rows whose sums stay in registers */
#define WIDENED 16384 /* inputs of all rows converted to fp32 at once, which fit in the second cache */

static const int32_t second_halves[8] __attribute__((aligned(32))) = {-65536, -65536, -65536, -65536, -65536, -65536, -65536, -65536};

/* Return the first of two adjacent bf16 numbers in fp32; masking with ``second_halves`` gives the second. */
AVX2 INLINE __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

AVX2 INLINE __m256i broadcast(const void *four_bytes) {
    int32_t value;
    memcpy(&value, four_bytes, 4);
    return _mm256_set1_epi32(value);
}

/* Multiply and add in place. With few registers GCC copies and spills sums around its own multiply-adds. */
#define ADD_PRODUCT(sum, one, two) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(one), "x"(two))

/* Add the products of ``size`` inputs to the sums of rows; each input is loaded where it is used. */
AVX2 INLINE void few_rows(const uint8_t *codes, const float *x, int64_t stride, int64_t size, int count, float (*sums)[BLOCK]) {
    __m256 own[MOST_ROWS][2];
    const float *mask = (const float *)second_halves;
    __asm__("" : "+r"(mask)); /* hides that it is constant, so it stays in memory */
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
        __asm__ volatile("" ::: "memory"); /* reload it, because there are too few registers */
        for (int h = 0; h < 2; h++) weights[h] = _mm256_and_ps(_mm256_loadu_ps((const float *)(line + h)), _mm256_load_ps(mask));
        for (int r = 0; r < count; r++) {
            __m256 two = _mm256_broadcast_ss(x + r * stride + at + 1);
            for (int h = 0; h < 2; h++) ADD_PRODUCT(own[r][h], two, weights[h]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(sums[r] + 8 * h, own[r][h]);
}

/* Split rows into even groups, because a group of one takes almost as long as one of four. */
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

/* Convert inputs to fp32 once for several blocks, in parts; sums continue across parts, so parts change no bit. */
AVX2 void blocks_avx2(const uint8_t *codes, const bf16 *x, int64_t stride, int64_t inputs, int64_t blocks, int64_t rows,
                      float (*sums)[MOST][BLOCK]) {
    static _Thread_local float wide[WIDENED + 16 * MOST] __attribute__((aligned(64)));
    int64_t part = WIDENED / rows / 32 * 32, spread = part + 16; /* keeps the distance of rows from being a power of two */
    for (int64_t block = 0; block < blocks; block++) memset(sums[block], 0, rows * sizeof(sums[0][0]));
    for (int64_t at = 0; at < inputs; at += part) {
        int64_t size = inputs - at < part ? inputs - at : part;
        for (int64_t r = 0; r < rows; r++) widen_row(x + r * stride + at, size, wide + r * spread);
        for (int64_t block = 0; block < blocks; block++)
            add_block(codes + (block * inputs + at) * 32, wide, spread, size, rows, sums[block]);
    }
}

/* Move the bits of each byte from position ``from`` to ``to``. */
AVX2 INLINE __m256i moved(__m256i bytes, int from, int to, int mask) {
    __m256i there = from == to ? bytes : from > to ? _mm256_srli_epi16(bytes, from - to) : _mm256_slli_epi16(bytes, to - from);
    return _mm256_and_si256(there, _mm256_set1_epi8((char)mask));
}

/* Unpack a quad for eight of 16 outputs; see put_pack. */
AVX2 INLINE __m256i unpack(int kind, const uint8_t *pack, int quad) {
    int bits = FORMATS[kind].bits, second = quad % 4 * 2;
#define LINE(place) _mm256_loadu_si256((const __m256i *)(pack + (place) * 64))
    if (bits == 8) return LINE(quad);
    __m256i codes = bits < 4 ? moved(LINE(quad / 4), second, 0, 3) : moved(LINE(quad / 2), quad % 2 * 4, 0, 15);
    if (bits == 3 || bits == 5) codes = _mm256_or_si256(codes, moved(LINE(bits - 1), quad, bits - 1, 1 << (bits - 1)));
    if (bits == 6) codes = _mm256_or_si256(codes, moved(LINE(4 + quad / 4), second, 4, 48));
#undef LINE
    return codes;
}

/* Add products of pairs to 16-bit or 32-bit sums. GCC would keep all products of a group on the stack and add them at its end. */
#define ADD_PAIRS(sum, weights, four)                                                               \
    do {                                                                                            \
        __m256i pairs;                                                                              \
        __asm__ volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(pairs) : "x"(weights), "x"(four)); \
    } while (0)
#define ADD_SIGNED(sum, weights, sizes, four, ones)                                                 \
    do {                                                                                            \
        __m256i pairs;                                                                              \
        __asm__ volatile("vpsignb %2, %4, %1\n\tvpmaddubsw %1, %3, %1\n\tvpmaddwd %5, %1, %1\n\tvpaddd %1, %0, %0"      \
                         : "+x"(sum), "=&x"(pairs) : "x"(weights), "x"(sizes), "x"(four), "xm"(ones)); \
    } while (0)

/* Add the integer sums of one group of inputs to ``found``, for signed codes. The instruction takes one unsigned factor, and two
   products must not overflow 16 bits, so a weight's sign moves to its input. */
AVX2 INLINE void signed_group(int kind, const uint8_t *pack, int first, const int8_t *x, int64_t inputs, int count,
                              __m256i (*found)[2]) {
    __m256i ones = _mm256_set1_epi16(1);
    __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)TABLES[FORMATS[kind].table]));
    _Pragma("GCC unroll 8") for (int quad = 0; quad < FORMATS[kind].group / 4; quad++) {
        __m256i weights[2], sizes[2];
        for (int h = 0; h < 2; h++) {
            __m256i codes = unpack(kind, pack + h * 32, first + quad);
            weights[h] = FORMATS[kind].table ? _mm256_shuffle_epi8(table, codes) : _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
            sizes[h] = _mm256_abs_epi8(weights[h]);
        }
        for (int r = 0; r < count; r++) {
            __m256i four = broadcast(x + r * inputs + quad * 4);
            for (int h = 0; h < 2; h++) ADD_SIGNED(found[r][h], weights[h], sizes[h], four, ones);
        }
    }
}

/* Add the sums for unsigned codes: ``run`` sums of two products with inputs of at most 127 fit in 16 bits. */
AVX2 INLINE void unsigned_group(int kind, const uint8_t *pack, int first, const int8_t *x, int64_t inputs, int count,
                                __m256i (*found)[2]) {
    int quads = FORMATS[kind].group / 4, bits = FORMATS[kind].bits, most = bits == 6 ? 2 : bits == 5 ? 4 : 8;
    int run = quads < most ? quads : most;
    __m256i ones = _mm256_set1_epi16(1);
    _Pragma("GCC unroll 4") for (int from = 0; from < quads; from += run) {
        __m256i sums[4][2];
        _Pragma("GCC unroll 8") for (int quad = from; quad < from + run; quad++) {
            __m256i weights[2];
            for (int h = 0; h < 2; h++) weights[h] = unpack(kind, pack + h * 32, first + quad);
            for (int r = 0; r < count; r++) {
                __m256i four = broadcast(x + r * inputs + quad * 4);
                for (int h = 0; h < 2; h++)
                    if (quad == from)
                        sums[r][h] = _mm256_maddubs_epi16(weights[h], four);
                    else
                        ADD_PAIRS(sums[r][h], weights[h], four);
            }
        }
        for (int r = 0; r < count; r++)
            for (int h = 0; h < 2; h++) found[r][h] = _mm256_add_epi32(found[r][h], _mm256_madd_epi16(sums[r][h], ones));
    }
}

typedef struct { /* scales and minima of a group, for eight outputs */
    __m256 scale, least;
} Scales;

AVX2 INLINE __m256 of_halves(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
AVX2 INLINE __m256 of_bytes(const uint8_t *at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}

/* Load the scales of a group for outputs from 8 * ``h`` on; INT8 has scales of whole outputs instead. */
AVX2 INLINE Scales group_scales(int kind, const uint8_t *scales, int64_t g, int h) {
    const uint8_t *own = scales_at(kind, scales, g) + 16 * h, *factors = factors_at(kind, scales, g) + 8 * h;
    int more = num_scales(kind) > 1;
    __m256 none = _mm256_setzero_ps();
    switch (FORMATS[kind].scale) {
        case HALF: return (Scales){of_halves(own), more ? of_halves(own + 32) : none};
        case PRODUCT: {
            __m256 scale = _mm256_mul_ps(of_halves(own), of_bytes(factors));
            if (unit_of(kind) != 1.0f) scale = _mm256_mul_ps(scale, _mm256_set1_ps(unit_of(kind)));
            return (Scales){scale, more ? _mm256_mul_ps(of_halves(own + 32), of_bytes(factors + 16)) : none};
        }
        case BRAIN: {
            __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)own));
            return (Scales){_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)), none};
        }
        case FLOAT: return (Scales){_mm256_loadu_ps((const float *)(own + 16 * h)), none};
        default: return (Scales){_mm256_set1_ps(1.0f), none};
    }
}

AVX2 INLINE void few_codes(int kind, int64_t inputs, const uint8_t *codes, const uint8_t *scales, Prepared x, int64_t row, int count,
                           float (*sums)[BLOCK]) {
    int group = FORMATS[kind].group, turn = group < PACK ? PACK / group : 1, bytes = group * turn * 2 * FORMATS[kind].bits;
    int is_signed = FORMATS[kind].zero == 128;
    int64_t groups = inputs / group;
    __m256 own[4][2];
    for (int r = 0; r < count; r++) own[r][0] = own[r][1] = _mm256_setzero_ps();
    for (int64_t at = 0; at < groups; at += turn, codes += bytes) {
        for (int line = 0; line < bytes; line += 64) _mm_prefetch((const char *)codes + AHEAD + line, _MM_HINT_T0);
        _Pragma("GCC unroll 2") for (int part = 0; part < turn; part++) {
            int64_t g = at + part;
            const int8_t *of_rows = x.values + row * inputs + g * group;
            __m256i found[4][2];
            for (int r = 0; r < count; r++)
                found[r][0] = found[r][1] =
                    is_signed || !FORMATS[kind].zero ? _mm256_setzero_si256() : _mm256_set1_epi32(x.sums[g * x.rows + row + r]);
            if (is_signed)
                signed_group(kind, codes, part * group / 4, of_rows, inputs, count, found);
            else
                unsigned_group(kind, codes, part * group / 4, of_rows, inputs, count, found);
            Scales of_outputs[2];
            for (int h = 0; h < 2; h++) of_outputs[h] = group_scales(kind, scales, g, h);
            for (int r = 0; r < count; r++) {
                int64_t place = g * x.rows + row + r;
                __m256 of_row = _mm256_set1_ps(x.scales[place]), of_inputs = _mm256_broadcast_ss((const float *)x.sums + place);
                for (int h = 0; h < 2; h++) {
                    __m256 scale = _mm256_mul_ps(of_row, of_outputs[h].scale);
                    own[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(found[r][h]), scale, own[r][h]);
                    if (num_scales(kind) > 1) own[r][h] = _mm256_fmadd_ps(of_inputs, of_outputs[h].least, own[r][h]);
                }
            }
        }
    }
    for (int r = 0; r < count; r++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(sums[r] + 8 * h, own[r][h]);
}

AVX2 INLINE void all_codes(int kind, int64_t inputs, const uint8_t *codes, const uint8_t *scales, Prepared x, int64_t row,
                           int64_t rows, float (*sums)[BLOCK]) {
#define ROWS(r, count) few_codes(kind, inputs, codes, scales, x, row + (r), count, sums + (r))
    BY_FOUR(rows, ROWS)
#undef ROWS
}

AVX2 void block_codes_avx2(const Product *product, const uint8_t *codes, const uint8_t *scales, Prepared x, int64_t row, int64_t rows,
                           float (*sums)[BLOCK]) {
#define CODES(kind) all_codes(kind, product->inputs, codes, scales, x, row, rows, sums)
    BY_KIND(product->kind, CODES)
#undef CODES
}
#endif
