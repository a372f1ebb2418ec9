/* Decoder layers, one after another, in one parallel region: see models/layers/fused.py. */
#include <omp.h>
#include <string.h>

#include "attention.h"
#include "products.h"
#include "rows.h"

typedef struct {
    const float *before_attention, *behind_attention, *before_mlp, *behind_mlp; /* norms: [hidden] or null */
    const float *query_norm, *key_norm;                                         /* [dim], of all heads as one, or null */
    const float *sinks;                                                         /* as attention has them */
    bf16 *key_pool, *value_pool;                                                /* [slots, shared, dim] */
    int64_t plan, turns; /* which of the plans it attends by, and which of the rotary embeddings it has; -1: none */
    Product project, output, gate_up, down;
} Layer;

typedef struct {
    int64_t hidden, inner, activation; /* SILU or GELU */
    Heads heads;                       /* eps and rounds hold for all norms */
    float scale, cap, residual;        /* residual: times what a part of a layer adds to the states */
} Shape;

typedef struct { /* room for one layer */
    bf16 *normed, *rows, *mixed, *gated, *active;
    int8_t *values;
    float *scales;
    int32_t *sums;
} Scratch;

/* The states as a part of a layer reads them: normed, if there is a weight. */
static const bf16 *norm(const bf16 *x, const float *weight, bf16 *out, int64_t tokens, const Shape *shape) {
    if (!weight) return x;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++)
        norm_row(x + row * shape->hidden, weight, out + row * shape->hidden, shape->hidden, shape->heads.eps, shape->heads.rounds);
    return out;
}

/* Add the output of a part of a layer to the states, normed behind it if there is a weight. */
static void add(const Product *product, const bf16 *inputs, const float *weight, bf16 *x, int64_t tokens, const Shape *shape,
                const Scratch *scratch) {
    Prepared room = {scratch->values, scratch->scales, scratch->sums};
    int64_t hidden = shape->hidden, at_once = !weight && shape->residual == 1.0f;
    multiply(product, inputs, product->inputs, room, tokens, at_once ? x : scratch->normed, at_once);
    if (at_once) return;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++) {
        bf16 *own = scratch->normed + row * hidden;
        if (weight) norm_row(own, weight, own, hidden, shape->heads.eps, shape->heads.rounds);
        add_row(x + row * hidden, own, shape->residual, hidden);
    }
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
static void run_layer(const Layer *layer, const Shape *shape, const Plan *plan, const Turns *turns, bf16 *x,
                      const Scratch *scratch) {
    const Heads *heads = &shape->heads;
    int64_t tokens = plan->tokens, inner = shape->inner, parts = (inner + 511) / 512;
    int64_t queries = heads->queries * heads->dim, width = queries + 2 * heads->keys * heads->dim;
    Prepared room = {scratch->values, scratch->scales, scratch->sums};
    bf16 *rows = scratch->rows, *keys = rows + queries;
    AttentionCall call = {rows, keys, keys + heads->keys * heads->dim, layer->key_pool, layer->value_pool, scratch->mixed,
                          layer->sinks, width, heads->queries, heads->keys, heads->dim, shape->scale, shape->cap};
    const bf16 *read = norm(x, layer->before_attention, scratch->normed, tokens, shape);
    multiply(&layer->project, read, shape->hidden, room, tokens, rows, 0);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++) {
        turn_row(rows + row * width, layer->query_norm, layer->key_norm, turns, row, heads);
        store_row(&call, plan, row);
    }
    attend_all(&call, plan);
    add(&layer->output, scratch->mixed, layer->behind_attention, x, tokens, shape, scratch);
    read = norm(x, layer->before_mlp, scratch->normed, tokens, shape);
    multiply(&layer->gate_up, read, shape->hidden, room, tokens, scratch->gated, 0);
#pragma omp for schedule(static)
    for (int64_t part = 0; part < tokens * parts; part++) {
        int64_t row = part / parts, from = part % parts * 512, size = inner - from < 512 ? inner - from : 512;
        const bf16 *gate = scratch->gated + row * 2 * inner + from;
        gate_row(gate, gate + inner, scratch->active + row * inner + from, size, shape->activation);
    }
    add(&layer->down, scratch->active, layer->behind_mlp, x, tokens, shape, scratch);
}

/* States x [tokens, hidden] through ``count`` layers, in place. The states after the layers ``tapped [taps]``, -1 being before the
   first, are left in features [tokens, taps, hidden]. */
void run_layers(const Layer *layers, int64_t count, const Shape *shape, const Plan *plans, const Turns *turns, bf16 *x,
                bf16 *features, const int64_t *tapped, int64_t taps, const Scratch *scratch) {
#pragma omp parallel
    for (int64_t index = -1; index < count; index++) {
        const Layer *layer = layers + index;
        if (index >= 0) run_layer(layer, shape, plans + layer->plan, layer->turns < 0 ? 0 : turns + layer->turns, x, scratch);
        tap(index, x, plans->tokens, shape->hidden, features, tapped, taps);
    }
}
