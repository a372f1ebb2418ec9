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

/* One head in fp32, in place. */
FOR_EACH_CPU static void turn_floats(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * cos[i] - high * sin[i];
        x[i + half] = high * cos[i + half] + low * sin[i + half];
    }
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

/* gelu(gate) * up with GELU's tanh written as a logistic function: x (1 + tanh u) / 2 = x / (1 + exp(-2 u)) */
FOR_EACH_CPU static void gelu_row(const float *gate, const float *up, float *out, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        float x = gate[i], twice = 1.59576912f * (x + 0.044715f * x * x * x);
        out[i] = x / (1.0f + exponential(-twice)) * up[i];
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

/* before + the same norm, in fp32 */
void add_norm_floats(const float *before, const float *x, const float *weight, float *out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > FEW)
    for (int64_t row = 0; row < rows; row++) {
        float *own = out + row * size;
        norm_floats(x + row * size, weight, own, size, eps);
        for (int64_t i = 0; i < size; i++) own[i] += before[row * size + i];
    }
}

/* Of x [rows, queries + keys (+ keys)] heads in fp32: queries and keys normed by their weights and turned by cos and sin
 * [rows, dim], and values normed without a weight -> out [rows, queries + 2 keys]. Values are the last heads of x, or its keys. */
void norm_and_turn_floats(const float *x, const float *of_queries, const float *of_keys, const float *cos, const float *sin,
                          float *out, int64_t rows, int64_t queries, int64_t keys, int64_t has_values, int64_t dim, float eps) {
    int64_t turned = queries + keys, given = turned + (has_values ? keys : 0), values = has_values ? turned : queries;
#pragma omp parallel for if (rows * given * dim > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * given * dim;
        float *to = out + row * (turned + keys) * dim;
        for (int64_t head = 0; head < turned; head++) {
            norm_floats(from + head * dim, head < queries ? of_queries : of_keys, to + head * dim, dim, eps);
            turn_floats(to + head * dim, cos + row * dim, sin + row * dim, dim / 2);
        }
        for (int64_t head = 0; head < keys; head++)
            norm_floats(from + (values + head) * dim, 0, to + (turned + head) * dim, dim, eps);
    }
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

/* gelu(gate) * up of x [rows, gate | up] in fp32 -> out [rows, size] */
void gated_gelu_floats(const float *x, float *out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > FEW / 4)
    for (int64_t row = 0; row < rows; row++) gelu_row(x + row * 2 * size, x + (row * 2 + 1) * size, out + row * size, size);
}
