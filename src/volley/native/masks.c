/* Masks over logits: token t may be chosen if bit t % 8 of byte t / 8 is set. */
#include "common.h"

#define MINUS_INFINITY 0xff800000u
#define WORD 64


/* ``logits`` are the bits of floats: on integers the compiler finds the vector instructions. */
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
