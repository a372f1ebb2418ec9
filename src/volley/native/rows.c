/* Operations between the matmuls of a decoder layer, row by row. A row's result depends on that row alone.
 *
 * Values are rounded to bf16 where transformers rounds them: before and after a norm's weight or only after it, after each
 * product of the rotary embedding or only after their sum, and after the activation.
 */
#include "rows.h"


FOR_EACH_CPU void norm_row(const bf16 *x, const float *weight, bf16 *out, int64_t size, float eps, int64_t rounds) {
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
    if (rounds)
        for (int64_t i = 0; i < size; i++) out[i] = narrow(weight[i] * rounded(widen(x[i]) * scale));
    else
        for (int64_t i = 0; i < size; i++) out[i] = narrow(weight[i] * (widen(x[i]) * scale));
}

/* Norm a row in fp32; the weight may be null. */
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

FOR_EACH_CPU static void turn_head(bf16 *x, const float *cos, const float *sin, int64_t half, int64_t rounds) {
    for (int64_t i = 0; i < half; i++) {
        float low = widen(x[i]), high = widen(x[i + half]);
        float first = low * cos[i], second = high * cos[i + half], of_high = high * sin[i], of_low = low * sin[i + half];
        if (rounds) first = rounded(first), second = rounded(second), of_high = rounded(of_high), of_low = rounded(of_low);
        x[i] = narrow(first - of_high);
        x[i + half] = narrow(second + of_low);
    }
}

/* GELU with its tanh written as a logistic function: x (1 + tanh u) / 2 = x / (1 + exp(-2 u)) */
INLINE float gelu(float x) { return x / (1.0f + exponential(-1.59576912f * (x + 0.044715f * x * x * x))); }
INLINE float silu(float x) { return x / (1.0f + exponential(-x)); }

FOR_EACH_CPU static void gelu_row(const float *gate, const float *up, float *out, int64_t size) {
    for (int64_t i = 0; i < size; i++) out[i] = gelu(gate[i]) * up[i];
}

/* gpt-oss's activation, rounded after each step */
INLINE float clamped(float gate, float up, float alpha, float limit) {
    gate = gate > limit ? limit : gate, up = up > limit ? limit : up < -limit ? -limit : up;
    float sigmoid = rounded(1.0f / (1.0f + exponential(-rounded(gate * alpha))));
    return rounded(up + 1.0f) * rounded(gate * sigmoid);
}

FOR_EACH_CPU void gate_row(const bf16 *gate, const bf16 *up, bf16 *out, int64_t size, const Activation *activation) {
    float alpha = activation->alpha, limit = activation->limit;
    if (activation->kind == CLAMPED)
        for (int64_t i = 0; i < size; i++) out[i] = narrow(clamped(widen(gate[i]), widen(up[i]), alpha, limit));
    else if (activation->kind == GELU)
        for (int64_t i = 0; i < size; i++) out[i] = narrow(rounded(gelu(widen(gate[i]))) * widen(up[i]));
    else
        for (int64_t i = 0; i < size; i++) out[i] = narrow(rounded(silu(widen(gate[i]))) * widen(up[i]));
}

FOR_EACH_CPU void add_row(bf16 *x, const bf16 *update, float scale, int64_t size) {
    for (int64_t i = 0; i < size; i++) x[i] = narrow(widen(x[i]) + rounded(widen(update[i]) * scale));
}

/* cap * tanh(x / cap), rounded after each step as transformers does. */
FOR_EACH_CPU static void cap_row(bf16 *x, int64_t size, float cap) {
    for (int64_t i = 0; i < size; i++) x[i] = narrow(rounded(tangent(rounded(widen(x[i]) / cap))) * cap);
}

#define FEW 65536 /* elements below which a second thread costs more than it saves */

/* Norm x [rows, size], rows ``stride`` apart, to out [rows, size]. */
void rms_norm(const bf16 *x, int64_t stride, const float *weight, bf16 *out, int64_t rows, int64_t size, float eps,
              int64_t rounds) {
#pragma omp parallel for if (rows * size > FEW)
    for (int64_t row = 0; row < rows; row++) norm_row(x + row * stride, weight, out + row * size, size, eps, rounds);
}

/* Norm x [rows, size] in fp32; the weight may be null. */
void rms_norm_floats(const float *x, const float *weight, float *out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > FEW)
    for (int64_t row = 0; row < rows; row++) norm_floats(x + row * size, weight, out + row * size, size, eps);
}

/* Norm several heads, each separately or all as one. */
static void norm_heads(bf16 *x, const float *weight, int64_t heads, const Heads *of) {
    int64_t size = of->whole ? heads * of->dim : of->dim, count = of->whole ? 1 : heads;
    for (int64_t i = 0; weight && i < count; i++) norm_row(x + i * size, weight, x + i * size, size, of->eps, of->rounds);
}

void turn_row(bf16 *row, const float *of_queries, const float *of_keys, const Turns *turns, int64_t token, const Heads *of) {
    norm_heads(row, of_queries, of->queries, of);
    norm_heads(row + of->queries * of->dim, of_keys, of->keys, of);
    if (!turns) return;
    const float *cos = turns->cos + token * turns->width, *sin = turns->sin + token * turns->width;
    for (int64_t head = 0; head < of->queries + of->keys; head++)
        turn_head(row + head * of->dim, cos, sin, turns->width / 2, turns->rounds);
}

/* Norm in place the queries of x [rows, stride] by one weight and the keys after them by another (null: no norm), then rotate
 * them (null: no rotation). */
void norm_and_turn(bf16 *x, int64_t stride, const float *of_queries, const float *of_keys, const Turns *turns, int64_t rows,
                   const Heads *of) {
#pragma omp parallel for if (rows * (of->queries + of->keys) * of->dim > FEW)
    for (int64_t row = 0; row < rows; row++) turn_row(x + row * stride, of_queries, of_keys, turns, row, of);
}

/* Compute activation(gate) * up of x [rows, gate | up] -> out [rows, size]. */
void gated(const bf16 *x, bf16 *out, int64_t rows, int64_t size, const Activation *activation) {
#pragma omp parallel for if (rows * size > FEW / 4)
    for (int64_t row = 0; row < rows; row++)
        gate_row(x + row * 2 * size, x + (row * 2 + 1) * size, out + row * size, size, activation);
}

/* Cap x [rows, size] in place. */
void cap(bf16 *x, int64_t rows, int64_t size, float most) {
    int64_t parts = (size + FEW - 1) / FEW;
#pragma omp parallel for if (rows * size > FEW / 4)
    for (int64_t part = 0; part < rows * parts; part++) {
        int64_t from = part % parts * FEW;
        cap_row(x + part / parts * size + from, size - from < FEW ? size - from : FEW, most);
    }
}

/* Compute gelu(gate) * up of x [rows, gate | up] in fp32 -> out [rows, size]. */
void gated_gelu_floats(const float *x, float *out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > FEW / 4)
    for (int64_t row = 0; row < rows; row++) gelu_row(x + row * 2 * size, x + (row * 2 + 1) * size, out + row * size, size);
}
