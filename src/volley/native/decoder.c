/* Decoder layers, one after another, in one parallel region: see models/layers/fused.py. */
#include <omp.h>
#include <string.h>

#include "attention.h"
#include "products.h"
#include "rows.h"

typedef struct { /* experts of a layer, of which each token uses ``chosen`` */
    int64_t count, chosen, normed; /* normed: the weights of a token's experts sum to 1 */
    const Product *gate_up, *down; /* [count] */
    Product scores;
} Experts;

typedef struct {
    const float *before_attention, *behind_attention, *before_mlp, *behind_mlp; /* norms: [hidden] or null */
    const float *query_norm, *key_norm;                                         /* [dim], of all heads as one, or null */
    const float *sinks;                                                         /* see AttentionCall */
    bf16 *key_pool, *value_pool;                                                /* [slots, shared, dim] */
    int64_t plan, turns; /* indices of its attention plan and of its rotary embedding (-1: none) */
    const Experts *experts; /* null: the MLP is gate_up and down */
    Product project, output, gate_up, down;
} Layer;

typedef struct {
    int64_t hidden;
    Heads heads; /* eps and rounds hold for all norms */
    Activation activation;
    float scale, cap, residual; /* residual: factor of the outputs of attention and MLP */
} Shape;

typedef struct { /* buffers for one layer */
    bf16 *normed, *rows, *mixed, *gated, *active;
    int8_t *values;
    float *scales;
    int32_t *sums;
    /* for experts: scores [tokens, count]; chosen experts and their weights, [tokens, chosen]; the start of each expert's
       entries, [count + 1], and the entries, token * chosen + index, sorted by expert; their states; sums of their outputs */
    bf16 *scores;
    int64_t *ids, *starts, *order;
    float *weights, *summed;
    bf16 *gathered;
} Scratch;

/* Return the input of attention or MLP: the states, normed if there is a weight. */
static const bf16 *norm(const bf16 *x, const float *weight, bf16 *out, int64_t tokens, const Shape *shape) {
    if (!weight) return x;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++)
        norm_row(x + row * shape->hidden, weight, out + row * shape->hidden, shape->hidden, shape->heads.eps, shape->heads.rounds);
    return out;
}

static Prepared prepared_of(const Scratch *scratch) { return (Prepared){scratch->values, scratch->scales, scratch->sums}; }

/* Add scratch->normed, the output of attention or MLP, to the states; norm it first if there is a weight. */
static void add(const float *weight, bf16 *x, int64_t tokens, const Shape *shape, const Scratch *scratch) {
    int64_t hidden = shape->hidden;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++) {
        bf16 *own = scratch->normed + row * hidden;
        if (weight) norm_row(own, weight, own, hidden, shape->heads.eps, shape->heads.rounds);
        add_row(x + row * hidden, own, shape->residual, hidden);
    }
}

/* Add the result of a matmul, in the same way. */
static void add_product(const Product *product, const bf16 *inputs, const float *weight, bf16 *x, int64_t tokens,
                        const Shape *shape, const Scratch *scratch) {
    int64_t at_once = !weight && shape->residual == 1.0f;
    multiply(product, inputs, product->inputs, prepared_of(scratch), tokens, at_once ? x : scratch->normed, at_once);
    if (!at_once) add(weight, x, tokens, shape, scratch);
}

/* Compute activation(gate) * up in scratch->active. */
static void gate(const Product *gate_up, const bf16 *x, int64_t tokens, int64_t inner, const Shape *shape, const Scratch *scratch) {
    int64_t parts = (inner + 511) / 512;
    multiply(gate_up, x, shape->hidden, prepared_of(scratch), tokens, scratch->gated, 0);
#pragma omp for schedule(static)
    for (int64_t part = 0; part < tokens * parts; part++) {
        int64_t row = part / parts, from = part % parts * 512, size = inner - from < 512 ? inner - from : 512;
        const bf16 *own = scratch->gated + row * 2 * inner + from;
        gate_row(own, own + inner, scratch->active + row * inner + from, size, &shape->activation);
    }
}

/* Choose the experts with the highest scores, the first of equal ones, and compute their weights. */
static void choose(const Experts *experts, const bf16 *scores, int64_t *ids, float *weights) {
    float most = -INFINITY, all = 0, chosen = 0;
    for (int64_t e = 0; e < experts->count; e++) most = widen(scores[e]) > most ? widen(scores[e]) : most;
    for (int64_t e = 0; e < experts->count; e++) all += exponential(widen(scores[e]) - most);
    for (int64_t place = 0; place < experts->chosen; place++) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts->count; e++) {
            int64_t taken = 0;
            for (int64_t before = 0; before < place; before++) taken |= ids[before] == e;
            if (!taken && (best < 0 || widen(scores[e]) > widen(scores[best]))) best = e;
        }
        ids[place] = best, weights[place] = exponential(widen(scores[best]) - most);
        chosen += weights[place];
    }
    for (int64_t place = 0; place < experts->chosen; place++)
        weights[place] = rounded(weights[place] / (experts->normed ? chosen : all));
}

static void sort_by_expert(const Experts *experts, int64_t tokens, const Scratch *scratch) {
    int64_t total = tokens * experts->chosen, *starts = scratch->starts;
    memset(starts, 0, (experts->count + 1) * sizeof *starts);
    for (int64_t i = 0; i < total; i++) starts[scratch->ids[i] + 1]++;
    for (int64_t e = 0; e < experts->count; e++) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < total; i++) scratch->order[starts[scratch->ids[i]]++] = i;
    for (int64_t e = experts->count; e; e--) starts[e] = starts[e - 1]; /* each start has moved on to the next expert's */
    starts[0] = 0;
}

/* Sum the weighted outputs of each token's experts, in the order of their numbers, in out [tokens, hidden]. */
static void mix_chosen(const Experts *experts, const bf16 *x, bf16 *out, int64_t tokens, const Shape *shape, const Scratch *scratch) {
    int64_t hidden = shape->hidden, chosen = experts->chosen;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tokens * hidden; i++) scratch->summed[i] = 0;
#pragma omp single
    sort_by_expert(experts, tokens, scratch);
    for (int64_t e = 0; e < experts->count; e++) {
        const int64_t *order = scratch->order + scratch->starts[e];
        int64_t count = scratch->starts[e + 1] - scratch->starts[e];
        if (!count) continue;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++)
            memcpy(scratch->gathered + i * hidden, x + order[i] / chosen * hidden, hidden * sizeof(bf16));
        gate(experts->gate_up + e, scratch->gathered, count, experts->down[e].inputs, shape, scratch);
        multiply(experts->down + e, scratch->active, experts->down[e].inputs, prepared_of(scratch), count, scratch->gathered, 0);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            float *sums = scratch->summed + order[i] / chosen * hidden, weight = scratch->weights[order[i]];
            for (int64_t j = 0; j < hidden; j++) sums[j] += rounded(widen(scratch->gathered[i * hidden + j]) * weight);
        }
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++)
        for (int64_t j = 0; j < hidden; j++) out[row * hidden + j] = narrow(scratch->summed[row * hidden + j]);
}

/* Choose each token's experts by their scores, and mix them. */
static void mix(const Experts *experts, const bf16 *x, bf16 *out, int64_t tokens, const Shape *shape, const Scratch *scratch) {
    int64_t chosen = experts->chosen;
    multiply(&experts->scores, x, shape->hidden, prepared_of(scratch), tokens, scratch->scores, 0);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++)
        choose(experts, scratch->scores + row * experts->count, scratch->ids + row * chosen, scratch->weights + row * chosen);
    mix_chosen(experts, x, out, tokens, shape, scratch);
}

/* Run ``mix`` in a parallel region of its own. */
void mix_experts(const Experts *experts, const bf16 *x, bf16 *out, int64_t tokens, const Shape *shape, const Scratch *scratch) {
#pragma omp parallel
    mix(experts, x, out, tokens, shape, scratch);
}

/* Run ``mix_chosen`` in a parallel region of its own, for the experts and weights in scratch. */
void mix_chosen_experts(const Experts *experts, const bf16 *x, bf16 *out, int64_t tokens, const Shape *shape,
                        const Scratch *scratch) {
#pragma omp parallel
    mix_chosen(experts, x, out, tokens, shape, scratch);
}

/* Copy the states after a layer to its entries in features [tokens, taps, hidden]. The copies need no barrier, because the
   states change only after the next barriers. */
static void tap(int64_t layer, const bf16 *x, int64_t tokens, int64_t hidden, bf16 *features, const int64_t *tapped, int64_t taps) {
    for (int64_t place = 0; place < taps; place++) {
        if (tapped[place] != layer) continue;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < tokens; row++)
            memcpy(features + (row * taps + place) * hidden, x + row * hidden, hidden * sizeof(bf16));
    }
}

/* Run one layer with all threads of the enclosing parallel region. */
static void run_layer(const Layer *layer, const Shape *shape, const Plan *plan, const Turns *turns, bf16 *x,
                      const Scratch *scratch) {
    const Heads *heads = &shape->heads;
    int64_t tokens = plan->tokens, queries = heads->queries * heads->dim, width = queries + 2 * heads->keys * heads->dim;
    bf16 *rows = scratch->rows, *keys = rows + queries;
    AttentionCall call = {rows, keys, keys + heads->keys * heads->dim, layer->key_pool, layer->value_pool, scratch->mixed,
                          layer->sinks, width, heads->queries, heads->keys, heads->dim, shape->scale, shape->cap};
    const bf16 *read = norm(x, layer->before_attention, scratch->normed, tokens, shape);
    multiply(&layer->project, read, shape->hidden, prepared_of(scratch), tokens, rows, 0);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++) {
        turn_row(rows + row * width, layer->query_norm, layer->key_norm, turns, row, heads);
        store_row(&call, plan, row);
    }
    attend_all(&call, plan);
    add_product(&layer->output, scratch->mixed, layer->behind_attention, x, tokens, shape, scratch);
    read = norm(x, layer->before_mlp, scratch->normed, tokens, shape);
    if (layer->experts) {
        mix(layer->experts, read, scratch->normed, tokens, shape, scratch);
        add(layer->behind_mlp, x, tokens, shape, scratch);
    } else {
        gate(&layer->gate_up, read, tokens, layer->down.inputs, shape, scratch);
        add_product(&layer->down, scratch->active, layer->behind_mlp, x, tokens, shape, scratch);
    }
}

/* Run states x [tokens, hidden] through ``count`` layers in place. Write the states after the layers ``tapped [taps]``, -1 being
   before the first, to features [tokens, taps, hidden]. */
void run_layers(const Layer *layers, int64_t count, const Shape *shape, const Plan *plans, const Turns *turns, bf16 *x,
                bf16 *features, const int64_t *tapped, int64_t taps, const Scratch *scratch) {
#pragma omp parallel
    for (int64_t index = -1; index < count; index++) {
        const Layer *layer = layers + index;
        if (index >= 0) run_layer(layer, shape, plans + layer->plan, layer->turns < 0 ? 0 : turns + layer->turns, x, scratch);
        tap(index, x, plans->tokens, shape->hidden, features, tapped, taps);
    }
}
