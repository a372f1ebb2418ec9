/* Decoder layers of the Llama and Qwen kind, one after another, in one parallel region: see models/layers/fused.py. */
#include <omp.h>
#include <string.h>

#include "attention.h"
#include "products.h"
#include "rows.h"

typedef struct {
    const bf16 *first_norm, *second_norm; /* [hidden] */
    const bf16 *query_norm, *key_norm;    /* [dim] or null */
    bf16 *key_pool, *value_pool;          /* [slots, shared, dim] */
    int64_t plan;                         /* which of the plans it attends by */
    Product project, output, gate_up, down;
} Layer;

typedef struct {
    int64_t hidden, heads, shared, dim, inner;
    float eps, scale;
} Shape;

typedef struct { /* room for one layer */
    bf16 *normed, *rows, *mixed, *gated, *active;
    int8_t *values;
    float *scales;
    int32_t *sums;
} Scratch;

static void norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t tokens, const Shape *shape) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++)
        norm_row(x + row * shape->hidden, weight, out + row * shape->hidden, shape->hidden, shape->eps);
}

/* Copy the states after a layer to its places in features [tokens, taps, hidden]. Nothing waits for the copies: the states change
   only behind the next barriers. */
static void tap(int64_t layer, const bf16 *x, int64_t tokens, int64_t hidden, bf16 *features, const int64_t *tapped, int64_t taps) {
    for (int64_t place = 0; place < taps; place++) {
        if (tapped[place] != layer) continue;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < tokens; row++)
            memcpy(features + (row * taps + place) * hidden, x + row * hidden, hidden * sizeof(bf16));
    }
}

/* One layer, by all threads of the region it is called in. */
static void run_layer(const Layer *layer, const Shape *shape, const Plan *plan, bf16 *x, const bf16 *cos, const bf16 *sin,
                      const Scratch *scratch) {
    int64_t tokens = plan->tokens, dim = shape->dim, inner = shape->inner, parts = (inner + 511) / 512;
    int64_t width = (shape->heads + 2 * shape->shared) * dim;
    Prepared room = {scratch->values, scratch->scales, scratch->sums};
    bf16 *rows = scratch->rows, *keys = rows + shape->heads * dim;
    AttentionCall call = {rows, keys, keys + shape->shared * dim, layer->key_pool, layer->value_pool, scratch->mixed,
                          width, shape->heads, shape->shared, dim, shape->scale};
    norm(x, layer->first_norm, scratch->normed, tokens, shape);
    multiply(&layer->project, scratch->normed, layer->project.inputs, room, tokens, rows, 0);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++) {
        turn_row(rows + row * width, layer->query_norm, layer->key_norm, cos + row * dim, sin + row * dim, shape->heads,
                 shape->shared, dim, shape->eps);
        store_row(&call, plan, row);
    }
    attend_all(&call, plan);
    multiply(&layer->output, scratch->mixed, layer->output.inputs, room, tokens, x, 1);
    norm(x, layer->second_norm, scratch->normed, tokens, shape);
    multiply(&layer->gate_up, scratch->normed, layer->gate_up.inputs, room, tokens, scratch->gated, 0);
#pragma omp for schedule(static)
    for (int64_t part = 0; part < tokens * parts; part++) {
        int64_t row = part / parts, from = part % parts * 512, size = inner - from < 512 ? inner - from : 512;
        const bf16 *gate = scratch->gated + row * 2 * inner + from;
        gate_row(gate, gate + inner, scratch->active + row * inner + from, size);
    }
    multiply(&layer->down, scratch->active, layer->down.inputs, room, tokens, x, 1);
}

/* States x [tokens, hidden] through ``count`` layers, in place; cos and sin are [tokens, dim]. The states after the layers
   ``tapped [taps]``, -1 being before the first, are left in features [tokens, taps, hidden]. */
void run_layers(const Layer *layers, int64_t count, const Shape *shape, const Plan *plans, bf16 *x, const bf16 *cos,
                const bf16 *sin, bf16 *features, const int64_t *tapped, int64_t taps, const Scratch *scratch) {
#pragma omp parallel
    for (int64_t index = -1; index < count; index++) {
        if (index >= 0) run_layer(layers + index, shape, plans + layers[index].plan, x, cos, sin, scratch);
        tap(index, x, plans->tokens, shape->hidden, features, tapped, taps);
    }
}
