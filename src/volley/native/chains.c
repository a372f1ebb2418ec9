/* Chains of a sequential head: each token is the likeliest one after the previous token, or sampled. */
#include "common.h"

/* Map bf16 to integers in the same order, except NaN. */
static inline uint32_t in_order(bf16 x) { return x ^ (((0u - (x >> 15)) | 0x8000u) & 0xffffu); }

/* Map bf16 to integers in the same order, except that zeros are equal and NaN is above all. */
static inline int16_t in_order_with_nan(bf16 x) {
    int16_t bits = (int16_t)x, key = (int16_t)((bits ^ ((bits >> 15) & 0x7fff)) + (x == 0x8000));
    return (x & 0x7fff) > 0x7f80 ? 0x7fff : key;
}

#define PART 1024 /* logits of which only the largest is looked for first */

FOR_EACH_CPU static int64_t first_largest(const bf16 *logits, int64_t size) {
    int16_t largest = INT16_MIN;
    int64_t at = 0;
    for (int64_t from = 0; from < size; from += PART) {
        int64_t end = from + PART < size ? from + PART : size;
        int16_t own = INT16_MIN;
        for (int64_t i = from; i < end; i++) {
            int16_t key = in_order_with_nan(logits[i]);
            own = key > own ? key : own;
        }
        if (own > largest) largest = own, at = from;
    }
    while (in_order_with_nan(logits[at]) < largest) at++;
    return at;
}

/* Find the first of the largest ``logits [rows, size]`` of each row; -1 if it is not finite and this is ``checked``. */
void likeliest(const bf16 *logits, int64_t rows, int64_t size, int64_t checked, int64_t *tokens) {
#pragma omp parallel for if (rows > 1 && rows * size > 1 << 18)
    for (int64_t row = 0; row < rows; row++) {
        int64_t best = first_largest(logits + row * size, size);
        tokens[row] = checked && (logits[row * size + best] & 0x7f80) == 0x7f80 ? -1 : best;
    }
}

#define FEW 32768 /* keys that are counted at once in 16-bit counters */

/* Count the ``keys [count]`` that are at least ``least``. */
static inline int64_t num_from(const uint16_t *restrict keys, int64_t count, uint16_t least) {
    int64_t total = 0;
    for (int64_t from = 0; from < count; from += FEW) {
        int64_t end = count - from < FEW ? count : from + FEW;
        uint16_t some = 0;
        for (int64_t i = from; i < end; i++) some += keys[i] >= least;
        total += some;
    }
    return total;
}

/* Return the largest key that ``most`` of the ``keys [count]`` reach, found from its highest bit on. */
static inline uint16_t last_of(const uint16_t *keys, int64_t count, int64_t most) {
    uint16_t last = 0;
    for (int bit = 15; bit >= 0; bit--) {
        uint16_t higher = (uint16_t)(last | 1u << bit);
        if (num_from(keys, count, higher) >= most) last = higher;
    }
    return last;
}

#define CHUNK 64 /* keys of which only the largest is looked at first */

/* Find the indices of the ``most`` largest ``logits`` among ``drafted [count]``, and of all equal to the last one. Keys below
   the ``most``-th largest of the chunks' maxima are not among them. */
static inline int64_t pick(const bf16 *restrict logits, const int64_t *restrict drafted, int64_t count, int64_t most,
                           uint16_t *restrict keys, int32_t *restrict chosen) {
    int64_t found = 0, kept = 0, chunks = (count + CHUNK - 1) / CHUNK;
    if (count <= most) {
        for (; found < count; found++) chosen[found] = (int32_t)found;
        return found;
    }
    uint16_t maxima[chunks];
    for (int64_t c = 0; c < chunks; c++) {
        int64_t end = (c + 1) * CHUNK < count ? (c + 1) * CHUNK : count;
        uint16_t largest = 0;
        for (int64_t i = c * CHUNK; i < end; i++) {
            keys[i] = (uint16_t)in_order(logits[drafted ? drafted[i] : i]);
            largest = keys[i] > largest ? keys[i] : largest;
        }
        maxima[c] = largest;
    }
    uint16_t bound = chunks < most ? 0 : last_of(maxima, chunks, most);
    for (int64_t c = 0; c < chunks; c++)
        for (int64_t i = c * CHUNK; maxima[c] >= bound && i < count && i < (c + 1) * CHUNK; i++) {
            chosen[found] = (int32_t)i;
            found += keys[i] >= bound;
        }
    for (int64_t i = 0; i < found; i++) keys[i] = keys[chosen[i]];
    uint16_t last = last_of(keys, found, most);
    for (int64_t i = 0; i < found; i++) {
        chosen[kept] = chosen[i];
        kept += keys[i] >= last;
    }
    return kept;
}

/* Choose one chain of ``slots`` tokens from ``logits [slots, width]``. ``drafted [count]`` are the tokens that may be drafted,
   NULL for the first ``count``. A table has a row for each token. A token's logit grows by ``outputs[token] · u`` with
   ``u = rows[previous]``, or ``silu(rows[previous] + own)`` with ``own [slots, rank]``. Only the ``most`` tokens with the largest
   logits are candidates. ``sure`` is a token's probability among them. */
FOR_EACH_CPU void follow_one(const bf16 *restrict logits, int64_t width, const int64_t *restrict drafted, int64_t count,
                             int64_t most, const bf16 *restrict rows, const bf16 *restrict own,
                             const bf16 *restrict outputs, int64_t rank, int64_t before, int64_t slots,
                             int32_t *restrict chosen, float *restrict values, int64_t *restrict tokens,
                             float *restrict sure) {
    float mixed[rank];
    for (int64_t slot = 0; slot < slots; slot++, logits += width) {
        for (int64_t i = 0; i < rank; i++) {
            float x = widen(rows[before * rank + i]);
            if (own) x += widen(own[slot * rank + i]), x /= 1.0f + exponential(-x);
            mixed[i] = x;
        }
        int64_t few = pick(logits, drafted, count, most, (uint16_t *)values, chosen), best = 0; /* ``values`` is reused below */
        for (int64_t i = 0; i < few; i++) { /* rows are far apart in memory */
            const bf16 *row = outputs + (drafted ? drafted[chosen[i]] : chosen[i]) * rank;
            for (int64_t at = 0; at < rank; at += 32) __builtin_prefetch(row + at);
        }
        for (int64_t i = 0; i < few; i++) {
            int64_t token = drafted ? drafted[chosen[i]] : chosen[i];
            values[i] = widen(logits[token]) + dot(outputs + token * rank, mixed, rank);
            if (values[i] > values[best]) best = i;
        }
        float sum = 0;
        for (int64_t i = 0; i < few; i++) sum += exponential(values[i] - values[best]);
        before = tokens[slot] = drafted ? drafted[chosen[best]] : chosen[best];
        sure[slot] = 1 / sum;
    }
}

/* Choose ``blocks`` chains, one after the other in ``logits`` and ``own``. Chain b has the positions from ``starts[b]`` to
   ``starts[b + 1]`` and begins after the token of the row ``anchors[b]``. ``chosen`` and ``values`` are buffers of all chains. */
void follow(const bf16 *logits, int64_t width, const int64_t *drafted, int64_t count, int64_t most, const bf16 *rows, const bf16 *own,
            const bf16 *outputs, int64_t rank, const int64_t *starts, const int64_t *anchors, int64_t blocks, int32_t *chosen, float *values, int64_t *tokens, float *sure) {
#pragma omp parallel for schedule(dynamic) if (blocks > 1)
    for (int64_t b = 0; b < blocks; b++)
        follow_one(logits + starts[b] * width, width, drafted, count, most, rows,
                   own ? own + starts[b] * rank : NULL, outputs, rank, anchors[b], starts[b + 1] - starts[b],
                   chosen + b * count, values + b * count, tokens + starts[b], sure + starts[b]);
}

#define PART 1024 /* tokens whose weights are summed together, independent of the number of threads */

static inline int64_t part_size(int64_t count, int64_t part) { return count - part * PART < PART ? count - part * PART : PART; }

/* Compute (logits + outputs · mixed) · scale of ``size`` tokens; return the largest. */
FOR_EACH_CPU static float value_part(const bf16 *restrict logits, const bf16 *restrict outputs, const float *restrict mixed, int64_t rank,
                                     float scale, int64_t size, float *restrict values) {
    float most = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
        values[i] = (widen(logits[i]) + dot(outputs + i * rank, mixed, rank)) * scale;
        most = values[i] > most ? values[i] : most;
    }
    return most;
}

static inline float weight_of(float below) { return below < -87.0f ? 0.0f : exponential(below); }

/* Turn values into weights, 1 for ``most``; return their sum. */
FOR_EACH_CPU static float weigh_part(float *restrict values, int64_t size, float most) {
    float parts[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++) parts[j] += values[i + j] = weight_of(values[i + j] - most);
    for (; i < size; i++) sum += values[i] = weight_of(values[i] - most);
    for (int j = 0; j < 16; j++) sum += parts[j];
    return sum;
}

FOR_EACH_CPU static void scale_part(float *restrict values, int64_t size, float by) {
    for (int64_t i = 0; i < size; i++) values[i] *= by;
}

/* Find the index in ``weights`` at which their running sum exceeds ``left``, at most the last one that is not 0. */
static int64_t place_in(const float *weights, int64_t size, double left) {
    int64_t last = 0;
    for (int64_t i = 0; i < size; i++) {
        if (weights[i] <= 0) continue;
        last = i;
        if (left < weights[i]) break;
        left -= weights[i];
    }
    return last;
}

/* Write the softmax of ``(logits [count] + outputs [count, rank] · mixed) · scale`` to ``probs [count]``, and the index that
   ``uniform`` draws from it to ``place``. */
void draw_after(const bf16 *logits, const bf16 *outputs, const float *mixed, int64_t rank, int64_t count, float scale, double uniform,
                float *probs, int64_t *place) {
    int64_t parts = (count + PART - 1) / PART;
    float sums[parts], most = -INFINITY;
    double total = 0;
#pragma omp parallel
    {
#pragma omp for reduction(max : most)
        for (int64_t p = 0; p < parts; p++) {
            int64_t at = p * PART;
            float own = value_part(logits + at, outputs + at * rank, mixed, rank, scale, part_size(count, p), probs + at);
            most = own > most ? own : most;
        }
#pragma omp for
        for (int64_t p = 0; p < parts; p++) sums[p] = weigh_part(probs + p * PART, part_size(count, p), most);
#pragma omp single
        for (int64_t p = 0; p < parts; p++) total += sums[p];
#pragma omp for
        for (int64_t p = 0; p < parts; p++) scale_part(probs + p * PART, part_size(count, p), (float)(1 / total));
    }
    double left = uniform * total;
    int64_t part = place_in(sums, parts, left);
    for (int64_t p = 0; p < part; p++) left -= sums[p];
    *place = part * PART + place_in(probs + part * PART, part_size(count, part), left / total);
}
