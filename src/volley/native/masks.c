/* Masks over logits: token t may be chosen if bit t % 8 of byte t / 8 is set. */
#include "common.h"

#define MINUS_INFINITY 0xff800000u


/* ``logits`` are the bits of floats: on integers the compiler finds the vector instructions. */
FOR_EACH_CPU void forbid(uint32_t *logits, const uint8_t *allowed, int64_t size) {
    int64_t whole = size / 64 * 64;
    for (int64_t start = 0; start < whole; start += 64) {
        uint64_t word;
        memcpy(&word, allowed + start / 8, 8);
        if (word == UINT64_MAX) continue;
        for (int64_t at = start; at < start + 64; at += 16, word >>= 16)
            for (int i = 0; i < 16; i++) {
                uint32_t kept = 0u - ((uint32_t)word >> i & 1u);
                logits[at + i] = (logits[at + i] & kept) | (MINUS_INFINITY & ~kept);
            }
    }
    for (int64_t i = whole; i < size; i++)
        if (!(allowed[i / 8] >> i % 8 & 1)) logits[i] = MINUS_INFINITY;
}
