/* Advance states of recurrent layers over accepted tokens: each state is read once and written once.
 *
 * A head's state S [keys, values] becomes e^G S + the sum of e^(G - G_j) k_j u_j over the tokens j that stay, where G_j is a
 * token's sum of decays and G that of the last one. Reference: memory/recurrence.py.
 */
#include "common.h"

#define SMALLEST -50.6568f /* logarithm below which a factor counts as 0 */
#define AT_ONCE 64         /* tokens added at once */
#define BLOCK 64           /* values of a row whose sums are held at once */
#define EACH_EIGHT for (int i = 0; i < BLOCK / 8; i++)
#define FEW 65536          /* elements of states below which a second thread costs more than it saves */

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

typedef struct { /* one layer's rule for the runs of a group; strides are those of runs, heads and tokens */
    float *states; /* [slots, heads, keys, values] */
    const float *keys, *updates, *totals;
    int64_t key_strides[3], update_strides[3], total_strides[3];
    int64_t heads, num_keys, num_values, by_channel;
} Rule;

typedef struct { /* slot ``target`` becomes the state of ``source`` (< 0: zeros) after token ``row`` of run ``run`` */
    int64_t run, row, source, target;
} Move;

static inline float factor(float logarithm) { return logarithm > SMALLEST ? exponential(logarithm) : 0.0f; }

/* Compute out = by * before (null: zeros) + the sum of weights[j] * rows[j]; ``out`` may be ``before``. */
INLINE void move_row(float *out, const float *before, float by, const float *weights, const float *const *rows,
                     int64_t count, int64_t size) {
    int64_t start = 0;
    for (; start + BLOCK <= size; start += BLOCK) {
        Eight sums[BLOCK / 8] = {0};
        if (before) EACH_EIGHT sums[i] = by * ((const Eight *)(before + start))[i];
        for (int64_t j = 0; j < count; j++) EACH_EIGHT sums[i] += weights[j] * ((const Eight *)(rows[j] + start))[i];
        EACH_EIGHT ((Eight *)(out + start))[i] = sums[i];
    }
    for (; start < size; start++) {
        float sum = before ? by * before[start] : 0;
        for (int64_t j = 0; j < count; j++) sum += weights[j] * rows[j][start];
        out[start] = sum;
    }
}

/* Add up to AT_ONCE tokens to one head; ``is_first``: these are the first ones, so the state decays as well. */
FOR_EACH_CPU static void move_head(const Rule *rule, const Move *move, int64_t head, const int64_t *tokens, int64_t count,
                                   const float *before, float *out, int is_first) {
    const float *keys[AT_ONCE], *rows[AT_ONCE], *totals[AT_ONCE];
    float decays[AT_ONCE], weights[AT_ONCE];
    const int64_t *of_keys = rule->key_strides, *of_rows = rule->update_strides, *of_totals = rule->total_strides;
    const float *last = rule->totals + move->run * of_totals[0] + head * of_totals[1] + move->row * of_totals[2];
    for (int64_t j = 0; j < count; j++) {
        keys[j] = rule->keys + move->run * of_keys[0] + head * of_keys[1] + tokens[j] * of_keys[2];
        rows[j] = rule->updates + move->run * of_rows[0] + head * of_rows[1] + tokens[j] * of_rows[2];
        totals[j] = rule->totals + move->run * of_totals[0] + head * of_totals[1] + tokens[j] * of_totals[2];
        decays[j] = factor(last[0] - totals[j][0]);
    }
    float by = is_first ? factor(last[0]) : 1.0f;
    for (int64_t key = 0; key < rule->num_keys; key++) {
        for (int64_t j = 0; j < count; j++)
            weights[j] = keys[j][key] * (rule->by_channel ? factor(last[key] - totals[j][key]) : decays[j]);
        if (rule->by_channel && is_first) by = factor(last[key]);
        int64_t start = key * rule->num_values;
        move_row(out + start, before ? before + start : 0, by, weights, rows, count, rule->num_values);
    }
}

static void move_state(const Rule *rule, const Move *move, int64_t head, const uint8_t *stays, int64_t length) {
    int64_t size = rule->num_keys * rule->num_values, tokens[AT_ONCE], count = 0, is_first = 1;
    const float *before = move->source < 0 ? 0 : rule->states + (move->source * rule->heads + head) * size;
    float *out = rule->states + (move->target * rule->heads + head) * size;
    for (int64_t token = 0; token < length; token++) {
        if (stays[token]) tokens[count++] = token;
        if (count < AT_ONCE && token < length - 1) continue;
        move_head(rule, move, head, tokens, count, before, out, is_first);
        before = out, is_first = 0, count = 0;
    }
}

/* Make all moves of a group in order, with ``stays [moves, length]``; a source may be the target of a later move. */
void move_states(const Rule *rules, int64_t num_rules, const Move *moves, const uint8_t *stays, int64_t num_moves,
                 int64_t length) {
    int64_t heads = rules[0].heads, size = heads * rules[0].num_keys * rules[0].num_values;
#pragma omp parallel for collapse(2) if (num_rules * num_moves * size > FEW)
    for (int64_t rule = 0; rule < num_rules; rule++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t move = 0; move < num_moves; move++)
                move_state(rules + rule, moves + move, head, stays + move * length, length);
}

typedef struct { /* one token of each run; all parts are contiguous, runs before heads */
    float *states;        /* [slots, heads, keys, values] */
    const int64_t *slots; /* [runs] */
    const float *queries, *keys, *values, *decays, *betas; /* betas null: nothing is subtracted */
    float *outputs;       /* [runs, heads, values] */
    int64_t runs, heads, num_keys, num_values, by_channel;
} Token;

/* Add the sum of of_first[i] * row i to first, and second likewise, for ``count`` (up to ROWS) rows of ``size`` numbers. */
#define ROWS 4
INLINE void two_products(float *first, float *second, const float *of_first, const float *of_second,
                         const float *rows, int64_t count, int64_t size) {
    int64_t value = 0;
    if (count == ROWS)
        for (; value + 8 <= size; value += 8) {
            Eight a = *(const Eight *)(first + value), b = *(const Eight *)(second + value);
            for (int i = 0; i < ROWS; i++) {
                Eight row = *(const Eight *)(rows + i * size + value);
                a += of_first[i] * row;
                b += of_second[i] * row;
            }
            *(Eight *)(first + value) = a, *(Eight *)(second + value) = b;
        }
    for (; value < size; value++)
        for (int64_t i = 0; i < count; i++) {
            first[value] += of_first[i] * rows[i * size + value];
            second[value] += of_second[i] * rows[i * size + value];
        }
}

/* Take the token of one run and head: u = beta (v - (e^g k) S), o = (e^g q) S + (q k) u, S = e^g S + k u. */
FOR_EACH_CPU static void take_head(const Token *token, int64_t run, int64_t head) {
    int64_t num_keys = token->num_keys, size = token->num_values, place = run * token->heads + head;
    float *state = token->states + (token->slots[run] * token->heads + head) * num_keys * size;
    const float *queries = token->queries + place * num_keys, *keys = token->keys + place * num_keys;
    const float *decays = token->decays + place * (token->by_channel ? num_keys : 1);
    float *output = token->outputs + place * size, update[size], product = 0;
    float factors[num_keys], of_keys[num_keys], of_queries[num_keys], beta = token->betas ? token->betas[place] : 0;
    for (int64_t key = 0; key < num_keys; key++) {
        factors[key] = token->by_channel || !key ? factor(decays[key]) : factors[0];
        of_keys[key] = factors[key] * keys[key], of_queries[key] = factors[key] * queries[key];
        product += queries[key] * keys[key];
    }
    memset(output, 0, size * sizeof(float)), memset(update, 0, size * sizeof(float));
    for (int64_t key = 0; key < num_keys; key += ROWS)
        two_products(update, output, of_keys + key, of_queries + key, state + key * size,
                     num_keys - key < ROWS ? num_keys - key : ROWS, size);
    for (int64_t value = 0; value < size; value++) {
        float own = token->values[place * size + value];
        update[value] = token->betas ? beta * (own - update[value]) : own;
        output[value] += product * update[value];
    }
    const float *rows[1] = {update};
    for (int64_t key = 0; key < num_keys; key++)
        move_row(state + key * size, state + key * size, factors[key], keys + key, rows, 1, size);
}

void take_token(const Token *token) {
    int64_t size = token->num_keys * token->num_values;
#pragma omp parallel for collapse(2) if (token->runs * token->heads * size > FEW)
    for (int64_t run = 0; run < token->runs; run++)
        for (int64_t head = 0; head < token->heads; head++) take_head(token, run, head);
}
