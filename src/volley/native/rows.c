/* What lies between the products of a decoder layer, row by row. A row's result depends on that row alone.
 *
 * Roundings to bf16 are where transformers has them: after the norm and after its weight, after each product of the rotary
 * embedding, after silu.
 */
#include "rows.h"


FOR_EACH_CPU void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t size, float eps) {
    float parts[16] = {0};
    int64_t whole = size / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16)
        for (int j = 0; j < 16; j++) {
            float value = widen(x[i + j]);
            parts[j] += value * value;
        }
    float sum = 0;
    for (int j = 0; j < 16; j++) sum += parts[j];
    for (int64_t i = whole; i < size; i++) sum += widen(x[i]) * widen(x[i]);
    float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) out[i] = narrow(widen(weight[i]) * rounded(widen(x[i]) * scale));
}

/* The same in fp32, where the weight may be null. */
FOR_EACH_CPU static void norm_floats(const float *x, const float *weight, float *out, int64_t size, float eps) {
    float parts[16] = {0}, sum = 0;
    int64_t whole = size / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16)
        for (int j = 0; j < 16; j++) parts[j] += x[i + j] * x[i + j];
    for (int j = 0; j < 16; j++) sum += parts[j];
    for (int64_t i = whole; i < size; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) out[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
}

FOR_EACH_CPU static void turn_head(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float low = widen(x[i]), high = widen(x[i + half]);
        float first = rounded(low * widen(cos[i])) - rounded(high * widen(sin[i]));
        float second = rounded(high * widen(cos[i + half])) + rounded(low * widen(sin[i + half]));
        x[i] = narrow(first);
        x[i + half] = narrow(second);
    }
}

FOR_EACH_CPU void gate_row(const bf16 *gate, const bf16 *up, bf16 *out, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        float x = widen(gate[i]);
        out[i] = narrow(rounded(x / (1.0f + exponential(-x))) * widen(up[i]));
    }
}

#define FEW 65536 /* elements below which a second thread costs more than it takes over */

/* x [rows, size] with so many elements from row to row; out [rows, size] */
void rms_norm(const bf16 *x, int64_t stride, const bf16 *weight, bf16 *out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > FEW)
    for (int64_t row = 0; row < rows; row++) norm_row(x + row * stride, weight, out + row * size, size, eps);
}

/* The same in fp32, of x [rows, size]; the weight may be null. */
void rms_norm_floats(const float *x, const float *weight, float *out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > FEW)
    for (int64_t row = 0; row < rows; row++) norm_floats(x + row * size, weight, out + row * size, size, eps);
}

void turn_row(bf16 *row, const bf16 *of_queries, const bf16 *of_keys, const bf16 *cos, const bf16 *sin, int64_t queries,
              int64_t keys, int64_t dim, float eps) {
    for (int64_t head = 0; head < queries + keys; head++) {
        bf16 *own = row + head * dim;
        const bf16 *weight = head < queries ? of_queries : of_keys;
        if (weight) norm_row(own, weight, own, dim, eps);
        turn_head(own, cos, sin, dim / 2);
    }
}

/* In place: the first ``queries`` heads of x [rows, stride] normed by one weight, the ``keys`` heads behind them by another
 * (null: not normed), all of them turned by cos and sin [rows, dim]. */
void norm_and_turn(bf16 *x, int64_t stride, const bf16 *of_queries, const bf16 *of_keys, const bf16 *cos, const bf16 *sin,
                   int64_t rows, int64_t queries, int64_t keys, int64_t dim, float eps) {
#pragma omp parallel for if (rows * (queries + keys) * dim > FEW)
    for (int64_t row = 0; row < rows; row++)
        turn_row(x + row * stride, of_queries, of_keys, cos + row * dim, sin + row * dim, queries, keys, dim, eps);
}

/* silu(gate) * up of x [rows, gate | up] -> out [rows, size] */
void gated_silu(const bf16 *x, bf16 *out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > FEW / 4)
    for (int64_t row = 0; row < rows; row++) gate_row(x + row * 2 * size, x + (row * 2 + 1) * size, out + row * size, size);
}
