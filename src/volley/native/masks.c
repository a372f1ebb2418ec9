/* Masks over logits: token t may be chosen if bit t % 8 of byte t / 8 is set. */
#include "common.h"

#define MINUS_INFINITY 0xff800000u
#define WORD 64


/* Set forbidden logits to -inf. ``logits`` are the bits of floats, because the compiler vectorises this for integers only. */
FOR_EACH_CPU void forbid(uint32_t *logits, const uint8_t *allowed, int64_t size) {
    int64_t whole = size / WORD * WORD;
    for (int64_t start = 0; start < whole; start += WORD) {
        uint64_t word;
        memcpy(&word, allowed + start / 8, 8);
        uint32_t *own = logits + start;
        if (word == UINT64_MAX) continue;
        if (word == 0) {
            for (int i = 0; i < WORD; i++) own[i] = MINUS_INFINITY;
            continue;
        }
        for (int half = 0; half < WORD; half += 32) {
            uint32_t bits = (uint32_t)(word >> half);
            for (int i = 0; i < 32; i++) {
                uint32_t kept = 0u - (bits >> i & 1u);
                own[half + i] = (own[half + i] & kept) | (MINUS_INFINITY & ~kept);
            }
        }
    }
    for (int64_t i = whole; i < size; i++)
        if (!(allowed[i / 8] >> i % 8 & 1)) logits[i] = MINUS_INFINITY;
}

static inline uint64_t word_at(const uint8_t *allowed, int64_t start, int64_t size) {
    uint64_t word = 0;
    int64_t left = size - start;
    memcpy(&word, allowed + start / 8, left < WORD ? (left + 7) / 8 : 8);
    return left < WORD ? word & ((1ull << left) - 1) : word;
}

#define FEW 12 /* allowed tokens of a word up to which a loop over them is faster */

/* Return ``x`` if bit ``i`` of ``bits`` is set, else ``other``. */
static inline float chosen(float x, uint32_t bits, int i, float other) { return bits >> i & 1u ? x : other; }

static inline float power_of(float x) { return x < -87.0f ? 0.0f : exponential(x); }

/* Compute the softmax of scale * logits over the allowed tokens; all others get 0. */
FOR_EACH_CPU void allowed_softmax(const float *restrict logits, const uint8_t *restrict allowed, float *restrict probs,
                                  int64_t size, float scale) {
    float largest = -INFINITY, parts[32];
    for (int j = 0; j < 32; j++) parts[j] = -INFINITY;
    for (int64_t start = 0; start < size; start += WORD) {
        uint64_t word = word_at(allowed, start, size);
        const float *own = logits + start;
        if (__builtin_popcountll(word) > FEW && size - start >= WORD)
            for (int half = 0; half < WORD; half += 32) {
                uint32_t bits = (uint32_t)(word >> half);
                for (int i = 0; i < 32; i++) {
                    float value = chosen(own[half + i], bits, i, -INFINITY);
                    parts[i] = value > parts[i] ? value : parts[i];
                }
            }
        else
            for (; word; word &= word - 1) {
                float value = own[__builtin_ctzll(word)];
                largest = value > largest ? value : largest;
            }
    }
    for (int j = 0; j < 32; j++) largest = parts[j] > largest ? parts[j] : largest;
    double sum = 0;
    for (int64_t start = 0; start < size; start += WORD) {
        uint64_t word = word_at(allowed, start, size);
        const float *own = logits + start;
        float *out = probs + start;
        if (__builtin_popcountll(word) > FEW && size - start >= WORD) {
            float sums[32] = {0}, total = 0;
            for (int half = 0; half < WORD; half += 32) {
                uint32_t bits = (uint32_t)(word >> half);
                for (int i = 0; i < 32; i++) {
                    float value = chosen(power_of((own[half + i] - largest) * scale), bits, i, 0.0f);
                    out[half + i] = value;
                    sums[i] += value;
                }
            }
            for (int i = 0; i < 32; i++) total += sums[i];
            sum += total;
        } else {
            memset(out, 0, (size - start < WORD ? size - start : WORD) * sizeof(float));
            for (; word; word &= word - 1) {
                int i = __builtin_ctzll(word);
                out[i] = power_of((own[i] - largest) * scale);
                sum += out[i];
            }
        }
    }
    float share = (float)(1.0 / sum);
    for (int64_t start = 0; start < size; start += WORD) {
        if (!word_at(allowed, start, size)) continue;
        int64_t end = start + WORD < size ? start + WORD : size;
        for (int64_t i = start; i < end; i++) probs[i] *= share;
    }
}

/* Find the allowed token with the largest logit, the first of equal ones, or −1 if all allowed tokens have −inf; and its
   probability among the allowed tokens, if ``sure`` is not NULL. With ``outputs [n, rank]`` a logit grows by the product of
   ``mixed`` and the token's row there, ``places[token]`` or the token itself. ``values`` is a buffer for all tokens. */
FOR_EACH_CPU void allowed_best(const bf16 *restrict logits, const uint8_t *restrict allowed, int64_t size,
                               const bf16 *restrict outputs, const float *restrict mixed, const int64_t *restrict places,
                               int64_t rank, float *restrict values, int64_t *best, float *sure) {
    float largest = -INFINITY;
    int64_t count = 0;
    *best = -1;
    for (int64_t start = 0; start < size; start += WORD)
        for (uint64_t word = word_at(allowed, start, size); word; word &= word - 1) {
            int64_t token = start + __builtin_ctzll(word);
            float value = widen(logits[token]);
            if (value == -INFINITY) continue;
            if (outputs) value += dot(outputs + (places ? places[token] : token) * rank, mixed, rank);
            if (value > largest) largest = value, *best = token;
            values[count++] = value;
        }
    if (!sure) return;
    float sums[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += power_of(values[i + j] - largest);
    for (int j = 0; j < 16; j++) sum += sums[j];
    for (; i < count; i++) sum += power_of(values[i] - largest);
    *sure = 1 / sum;
}
