/* Paged attention. Keys are processed in parts that begin at multiples of 64 positions, and a token's sums run over the keys
 * that it sees alone. So the result is batch-invariant: equal to the bit in any call.
 */
#include "attention.h"

#define FEW 65536  /* query-key pairs below which a second thread costs more than it saves */

#if X86
/* Transpose 16 rows of 16 elements: element i of row j goes to to[i][j]. */
DOT INLINE void transpose(__m512 *a, float *to) {
    __m512 b[16];
    for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int i = 0; i < 4; i++) { /* a[4 * q + i]: rows 4 q to 4 q + 3 of elements i, i + 4, i + 8, i + 12 */
        __m512 one = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88), two = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
        __m512 three = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd), four = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
        _mm512_storeu_ps(to + i * PART, _mm512_shuffle_f32x4(one, two, 0x88));
        _mm512_storeu_ps(to + (i + 8) * PART, _mm512_shuffle_f32x4(one, two, 0xdd));
        _mm512_storeu_ps(to + (i + 4) * PART, _mm512_shuffle_f32x4(three, four, 0x88));
        _mm512_storeu_ps(to + (i + 12) * PART, _mm512_shuffle_f32x4(three, four, 0xdd));
    }
}

/* Store keys as columns: work->keys is [dim / 2][PART][2]. */
DOT static void turn_keys(Work *work, const bf16 *const *keys, int count, int dim) {
    for (int from = 0; from < count; from += 16)
        for (int i = 0; i < dim; i += 32) {
            __m512 rows[16];
            for (int key = 0; key < 16; key++)
                rows[key] = from + key < count ? _mm512_loadu_ps(keys[from + key] + i) : _mm512_setzero_ps();
            transpose(rows, (float *)work->keys + i / 2 * PART + from);
        }
}

/* Compute scores of a few queries with 64 keys; scores beyond the last key are undefined. */
DOT INLINE void score_few(Work *work, int first, int vectors, int dim, float scale) {
    __m512 own[4][4], times = _mm512_set1_ps(scale);
    UNROLLED(int v = 0; v < vectors; v++) UNROLLED(int k = 0; k < 4; k++) own[v][k] = _mm512_setzero_ps();
    for (int i = 0; i < dim; i += 2) {
        __m512bh keys[4];
        UNROLLED(int k = 0; k < 4; k++) keys[k] = (__m512bh)_mm512_loadu_si512(work->keys + i * PART + 32 * k);
        UNROLLED(int v = 0; v < vectors; v++) {
            int32_t pair;
            memcpy(&pair, work->gathered + (first + v) * dim + i, 4);
            __m512bh query = (__m512bh)_mm512_set1_epi32(pair);
            UNROLLED(int k = 0; k < 4; k++) own[v][k] = _mm512_dpbf16_ps(own[v][k], query, keys[k]);
        }
    }
    UNROLLED(int v = 0; v < vectors; v++)
        UNROLLED(int k = 0; k < 4; k++) _mm512_storeu_ps(&work->scores[first + v][16 * k], _mm512_mul_ps(own[v][k], times));
}

DOT static void score_dot(Work *work, const bf16 *const *keys, int count, int vectors, int dim, float scale) {
    turn_keys(work, keys, count, dim);
#define FEW_SCORES(v, count) score_few(work, v, count, dim, scale)
    BY_FOUR(vectors, FEW_SCORES)
}

DOT static void pair_values(Work *work, const bf16 *const *values, int count, int pairs, int dim) {
    static const bf16 nothing[LARGEST];
    uint16_t low[32], high[32];
    for (int i = 0; i < 16; i++) {
        low[2 * i] = (uint16_t)i, low[2 * i + 1] = (uint16_t)(32 + i);
        high[2 * i] = (uint16_t)(16 + i), high[2 * i + 1] = (uint16_t)(48 + i);
    }
    __m512i at_low = _mm512_loadu_si512(low), at_high = _mm512_loadu_si512(high);
    for (int pair = 0; pair < pairs; pair++) {
        const bf16 *one = 2 * pair < count ? values[2 * pair] : nothing;
        const bf16 *two = 2 * pair + 1 < count ? values[2 * pair + 1] : nothing;
        for (int i = 0; i < dim / 32; i++) {
            __m512i a = _mm512_loadu_si512(one + 32 * i), b = _mm512_loadu_si512(two + 32 * i);
            bf16 *place = work->paired + (pair * dim + 32 * i) * 2;
            _mm512_storeu_si512(place, _mm512_permutex2var_epi16(a, at_low, b));
            _mm512_storeu_si512(place + 32, _mm512_permutex2var_epi16(a, at_high, b));
        }
    }
}

/* Mix 32 numbers of a few vectors. */
DOT INLINE void mix_few(Work *work, int first, int vectors, int from, int pairs, int dim) {
    __m512 sums[4][2];
    UNROLLED(int v = 0; v < vectors; v++)
        UNROLLED(int i = 0; i < 2; i++) sums[v][i] = _mm512_loadu_ps(work->mixed[first + v] + from + 16 * i);
    for (int pair = 0; pair < pairs; pair++) {
        const bf16 *own = work->paired + (pair * dim + from) * 2;
        __m512bh low = (__m512bh)_mm512_loadu_si512(own), high = (__m512bh)_mm512_loadu_si512(own + 32);
        UNROLLED(int v = 0; v < vectors; v++) {
            int32_t both;
            memcpy(&both, &work->weights[first + v][2 * pair], 4);
            __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
            sums[v][0] = _mm512_dpbf16_ps(sums[v][0], weight, low);
            sums[v][1] = _mm512_dpbf16_ps(sums[v][1], weight, high);
        }
    }
    UNROLLED(int v = 0; v < vectors; v++)
        UNROLLED(int i = 0; i < 2; i++) _mm512_storeu_ps(work->mixed[first + v] + from + 16 * i, sums[v][i]);
}

DOT static void mix_dot(Work *work, const bf16 *const *values, int count, int vectors, int dim) {
    int pairs = (count + 1) / 2;
    pair_values(work, values, count, pairs, dim);
    for (int from = 0; from < dim; from += 32) {
#define FEW_SUMS(v, count) mix_few(work, v, count, from, pairs, dim)
        BY_FOUR(vectors, FEW_SUMS)
    }
}

/* ---- with tiles: 16 keys by 16 queries, then 16 queries by 16 numbers ---- */

static void turn_queries(Work *work, int vectors, int dim) {
    for (int tile = 0; tile < (vectors + 15) / 16; tile++)
        for (int pair = 0; pair < dim / 2; pair++)
            for (int v = 0; v < 16; v++) {
                bf16 *place = work->turned + ((tile * dim / 2 + pair) * 16 + v) * 2;
                int vector = tile * 16 + v;
                for (int i = 0; i < 2; i++) place[i] = vector < vectors ? work->gathered[vector * dim + 2 * pair + i] : 0;
            }
}

AMX static void score_amx(Work *work, const bf16 *const *keys, int count, int vectors, int dim, float scale) {
    int tiles = (vectors + 15) / 16, key_tiles = (count + 15) / 16;
    for (int key = 0; key < count; key++) memcpy(work->keys + key * dim, keys[key], dim * sizeof(bf16));
    memset(work->keys + count * dim, 0, (key_tiles * 16 - count) * dim * sizeof(bf16));
    __asm__ volatile("" ::: "memory");
    for (int tile = 0; tile < tiles; tile++)
        for (int key = 0; key < key_tiles; key++) {
            float found[16][16] __attribute__((aligned(64)));
            _tile_zero(0);
            for (int i = 0; i < dim / 32; i++) {
                _tile_loadd(1, work->keys + key * 16 * dim + i * 32, dim * 2);
                _tile_loadd(2, work->turned + (tile * dim / 2 + i * 16) * 32, 64);
                _tile_dpbf16ps(0, 1, 2);
            }
            _tile_stored(0, found, 64);
            __m512 rows[16], times = _mm512_set1_ps(scale);
            for (int i = 0; i < 16; i++) rows[i] = _mm512_mul_ps(_mm512_load_ps(found[i]), times);
            transpose(rows, &work->scores[tile * 16][key * 16]); /* to rows of queries */
        }
}

AMX static void mix_amx(Work *work, const bf16 *const *values, int count, int vectors, int dim) {
    int tiles = (vectors + 15) / 16;
    pair_values(work, values, count, PART / 2, dim);
    __asm__ volatile("" ::: "memory");
    for (int tile = 0; tile < tiles; tile++)
        for (int from = 0; from < dim; from += 16) {
            _tile_loadd(0, &work->mixed[tile * 16][from], LARGEST * 4);
            for (int half = 0; half < 2; half++) {
                _tile_loadd(1, &work->weights[tile * 16][half * 32], PART * 2);
                _tile_loadd(2, work->paired + (half * 16 * dim + from) * 2, dim * 4);
                _tile_dpbf16ps(0, 1, 2);
            }
            _tile_stored(0, &work->mixed[tile * 16][from], LARGEST * 4);
        }
}

typedef void (*Score)(Work *, const bf16 *const *, int, int, int, float);
typedef void (*Mix)(Work *, const bf16 *const *, int, int, int);

/* Compute the weights of one part for one vector, which sees the keys [begin, end); the mixture so far is scaled down if a
 * larger score occurs. */
FOR_EACH_CPU static void weigh(Work *work, int v, int begin, int end, int dim, float cap) {
    float weights[PART], parts[16], visible[PART];
    if (cap != 0.0f)
        for (int key = 0; key < PART; key++) work->scores[v][key] = cap * tangent(work->scores[v][key] / cap);
    for (int key = 0; key < PART; key++) visible[key] = key >= begin && key < end ? 1.0f : 0.0f;
    for (int key = 0; key < PART; key++) weights[key] = visible[key] != 0.0f ? work->scores[v][key] : -INFINITY;
    for (int j = 0; j < 16; j++) parts[j] = work->most[v];
    for (int key = 0; key < PART; key += 16)
        for (int j = 0; j < 16; j++) parts[j] = weights[key + j] > parts[j] ? weights[key + j] : parts[j];
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) parts[j] = parts[j + half] > parts[j] ? parts[j + half] : parts[j];
    float most = parts[0], old = work->most[v] == -INFINITY ? 0.0f : exponential(work->most[v] - most);
    for (int key = 0; key < PART; key++) weights[key] = visible[key] * exponential(weights[key] - most);
    for (int j = 0; j < 16; j++) parts[j] = (weights[j] + weights[j + 16]) + (weights[j + 32] + weights[j + 48]);
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) parts[j] += parts[j + half];
    for (int key = 0; key < PART; key++) work->weights[v][key] = narrow(weights[key]);
    work->sum[v] = work->sum[v] * old + parts[0];
    work->most[v] = most;
    if (old != 1.0f)
        for (int i = 0; i < dim; i++) work->mixed[v][i] *= old;
}

FOR_EACH_CPU static void finish(const float *mixed, float sum, bf16 *out, int dim) {
    for (int i = 0; i < dim; i++) out[i] = narrow(mixed[i] / sum);
}

static void attend(const AttentionCall *call, const Plan *plan, const Unit *unit, int64_t from, int64_t rows, int64_t head,
                   Score score, Mix mix) {
    Work work;
    int group = (int)(call->heads / call->shared), dim = (int)call->dim, vectors = (int)rows * group;
    int64_t lowest = INT64_MAX, highest = 0, row0 = unit->row + from;
    for (int64_t row = row0; row < row0 + rows; row++) {
        lowest = plan->begins[row] < lowest ? plan->begins[row] : lowest;
        highest = plan->ends[row] > highest ? plan->ends[row] : highest;
        for (int g = 0; g < group; g++)
            memcpy(work.gathered + ((row - row0) * group + g) * dim,
                   call->queries + row * call->stride + (head * group + g) * dim, dim * sizeof(bf16));
    }
    int padded = (vectors + 15) / 16 * 16;
    for (int v = 0; v < padded; v++) {
        int has_sink = call->sinks && v < vectors;
        work.most[v] = has_sink ? call->sinks[head * group + v % group] : -INFINITY, work.sum[v] = (float)has_sink;
        memset(work.mixed[v], 0, dim * sizeof(float));
    }
    memset(work.scores, 0, padded * sizeof work.scores[0]);
    memset(work.weights, 0, padded * sizeof work.weights[0]);
    if (score == score_amx) load_tiles(whole_tiles()), turn_queries(&work, vectors, dim);
    if (score == score_avx2)
        for (int i = 0; i < vectors * dim; i++) work.widened[i] = widen(work.gathered[i]);
    for (int64_t part = lowest / PART * PART; part < highest; part += PART) {
        const bf16 *keys[PART], *values[PART];
        int64_t begin = part > lowest ? part : lowest, end = part + PART < highest ? part + PART : highest;
        for (int64_t position = part; position < end; position++) { /* keys that no token sees get weight 0 */
            int64_t known = position > unit->first ? position - unit->first : 0;
            int64_t place = (plan->slots[unit->slots + known] * call->shared + head) * dim;
            keys[position - part] = call->key_pool + place, values[position - part] = call->value_pool + place;
        }
        int count = (int)(end - part);
        score(&work, keys, count, vectors, dim, call->scale);
        for (int v = 0; v < vectors; v++) {
            int64_t row = row0 + v / group;
            int64_t own = plan->begins[row] > begin ? plan->begins[row] : begin;
            int64_t stop = plan->ends[row] < end ? plan->ends[row] : end;
            if (own < stop)
                weigh(&work, v, (int)(own - part), (int)(stop - part), dim, call->cap);
            else
                memset(work.weights[v], 0, sizeof work.weights[v]);
        }
        mix(&work, values, count, vectors, dim);
    }
    if (score == score_amx) release_tiles();
    for (int v = 0; v < vectors; v++)
        finish(work.mixed[v], work.sum[v], call->out + ((row0 + v / group) * call->heads + head * group + v % group) * dim, dim);
}

void attend_all(const AttentionCall *call, const Plan *plan) {
    Score score = score_avx2;
    Mix mix = mix_avx2;
    if (has_dot && call->dim % 32 == 0) score = score_dot, mix = mix_dot;
    if (has_tiles && call->dim % 32 == 0) score = score_amx, mix = mix_amx;
    int64_t tile = VECTORS / (call->heads / call->shared), pieces = 0;
    for (int64_t u = 0; u < plan->num_units; u++) pieces += (plan->units[u].rows + tile - 1) / tile;
#pragma omp for schedule(dynamic)
    for (int64_t index = 0; index < pieces * call->shared; index++) {
        int64_t piece = index / call->shared, u = 0;
        const Unit *units = plan->units;
        while (piece >= (units[u].rows + tile - 1) / tile) piece -= (units[u].rows + tile - 1) / tile, u++;
        int64_t from = piece * tile, rows = units[u].rows - from < tile ? units[u].rows - from : tile;
        attend(call, plan, &units[u], from, rows, index % call->shared, score, mix);
    }
}
#else
void attend_all(const AttentionCall *call, const Plan *plan) { (void)call, (void)plan; }
#endif

void store_row(const AttentionCall *call, const Plan *plan, int64_t token) {
    int64_t width = call->shared * call->dim, place = plan->written[token] * width;
    memcpy(call->key_pool + place, call->keys + token * call->stride, width * sizeof(bf16));
    memcpy(call->value_pool + place, call->values + token * call->stride, width * sizeof(bf16));
}

/* Store K and V of all tokens, then attend for all of them. */
void paged_attention(const AttentionCall *call, const Plan *plan) {
    int64_t work = 0;
    for (int64_t u = 0; u < plan->num_units; u++) work += plan->units[u].rows * plan->units[u].length;
    for (int64_t token = 0; token < plan->tokens; token++) store_row(call, plan, token);
#pragma omp parallel if (work * call->heads * call->dim > FEW)
    attend_all(call, plan);
}
