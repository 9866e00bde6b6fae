/* Outputs of an affine recurrence from chunk to chunk, and the state that tokens leave behind. */
#pragma once
#include "affine_pairs.h"
#include "affine_step.h"

/* (1 - lower)^-1 of a stripe, for a strictly lower triangle. */
static void invert_stripe(float *out, const float *lower) {
    vec x[STRIPE][STRIPE / LANES];
    for (int i = 0; i < STRIPE; i++)
        for (int l = 0; l < STRIPE / LANES; l++) {
            vec sum = {0};
            for (int e = 0; e < LANES; e++) sum[e] = l * LANES + e == i;
            for (int j = 0; j < i; j++) sum += lower[i * PAIR_ROW + j] * x[j][l];
            x[i][l] = sum;
            store(out + i * STRIPE + l * LANES, sum);
        }
}

/* (1 - lower) x = right side, in place, [lanes, V], stripe by stripe. */
static void solve(const call *c, desk *d, const float *lower, float *x, int64_t lanes) {
    int64_t V = d->V, columns = round_up(c->values, LANES);
    for (int64_t i = 0; i < lanes; i += STRIPE) {
        float *at = x + i * V;
        if (i) product(at, V, 1.0f, (factor){lower + i * PAIR_ROW, PAIR_ROW, 1}, x, V, STRIPE, columns, i);
        invert_stripe(d->inverse, lower + i * PAIR_ROW + i);
        memcpy(d->some, at, 4 * STRIPE * V);
        product(at, V, 0.0f, (factor){d->inverse, STRIPE, 1}, d->some, V, STRIPE, columns, STRIPE);
    }
}

/* beta W of a delta rule, once W is known. */
static void write_values(const call *c, desk *d, const chunk *at) {
    for (int64_t t = 0; t < at->lanes; t++)
        for (int64_t j = 0; j < c->values; j += LANES)
            store(d->value[OF_K] + t * d->V + j, load(d->solved + t * d->V + j) * at->beta[t]);
}

/* What columns are written with, from the state before the chunk. What a system was solved for stays in `solved`. */
static void make_values(const call *c, desk *d, const chunk *at, const float *s) {
    int64_t V = d->V, lanes = at->lanes, columns = round_up(c->values, LANES), floats = lanes * V;
    factor b = {d->full[OF_B], d->K, 1};
    if (c->beta.at) {
        memcpy(d->solved, d->v, 4 * floats);
        multiply(&d->m, d->solved, V, 1.0f, b, s, V, lanes, columns, c->size);
        for (int64_t i = 0; i < lanes; i++)
            for (int64_t j = 0; j < round_up(i + 1, STRIPE); j += LANES)
                store(d->system + i * PAIR_ROW + j, load(d->pairs[OF_B][OF_K] + i * PAIR_ROW + j) * load(at->beta + j));
        solve(c, d, d->system, d->solved, lanes);
        write_values(c, d, at);
        return;
    }
    memcpy(d->value[OF_K], d->v, 4 * floats);
    if (!c->a.at) return;
    multiply(&d->m, d->solved, V, 0.0f, b, s, V, lanes, columns, c->size);
    add_values(&d->m, lanes, lanes, d->solved, d->pairs[OF_B][OF_K], PAIR_ROW, d->v, V, columns);
    solve(c, d, d->pairs[OF_B][OF_A], d->solved, lanes);
    memcpy(d->value[OF_A], d->solved, 4 * floats);
}

/* Rows of a state, or of its gradient, times the decay of the whole chunk; what a product is to keep of it after that. */
static float decay_state(const call *c, const desk *d, const chunk *at, float *s) {
    if (c->decays == 1) return at->gain;
    for (int64_t k = 0; k < c->size; k++)
        for (int64_t j = 0; j < c->values; j += LANES) store(s + k * d->V + j, load(s + k * d->V + j) * d->total[k]);
    return 1.0f;
}

/* S <- D S + sum of columns with their values. */
static void advance(const call *c, desk *d, const chunk *at, float *s) {
    float keep = decay_state(c, d, at, s);
    for (int x = 0; x < 1 + (c->a.at != NULL); x++, keep = 1.0f)
        multiply(&d->m, s, d->V, keep, (factor){d->turned[x], PAIR_ROW, 1}, d->value[x], d->V, c->size,
                 round_up(c->values, LANES), at->lanes);
}

static void write_outputs(const call *c, int64_t group, desk *d, const chunk *at, const float *s) {
    int64_t V = d->V, columns = round_up(c->values, LANES);
    multiply(&d->m, d->num, V, 0.0f, (factor){d->full[OF_Q], d->K, 1}, s, V, at->lanes, columns, c->size);
    for (int x = 0; x < 1 + (c->a.at != NULL); x++)
        add_values(&d->m, at->lanes, at->lanes, d->num, d->pairs[OF_Q][x], PAIR_ROW, d->value[x], V, columns);
    for (int64_t t = 0; t < at->length; t++)
        for (int64_t j = 0; j < c->values; j += LANES)
            write_row(row_of(c->out, group, c->heads, at->begin + t), c->out.type, j, c->values, load(d->num + t * V + j));
}

static void load_state(const call *c, int64_t group, const float *from, float *s) {
    memset(s, 0, 4 * state_floats(c));
    for (int64_t k = 0; from && k < c->size; k++)
        memcpy(s + k * row_floats(c->values), from + (group * c->size + k) * c->values, 4 * c->values);
}

static void store_state(const call *c, int64_t group, const float *s, float *to) {
    for (int64_t k = 0; to && k < c->size; k++)
        memcpy(to + (group * c->size + k) * c->values, s + k * row_floats(c->values), 4 * c->values);
}

/* A chunk's tokens without their queries: what they write, and the state after them. */
static void step_over(const call *c, int64_t group, int64_t number, desk *d, float *s) {
    chunk at;
    read_chunk(c, group, number, d, &at);
    if (at.fresh) memset(s, 0, 4 * state_floats(c));
    make_pairs(c, group, d, &at, 0);
    make_values(c, d, &at, s);
    advance(c, d, &at, s);
}

static void forward_group(const call *c, int64_t group, float *memory) {
    if (is_step(c)) {
        step_group(c, group, memory);
        return;
    }
    room r = {memory, 0};
    desk d = take_desk(&r, c);
    float *s = take(&r, state_floats(c));
    int64_t saved = 0;
    load_state(c, group, c->s, s);
    for (int64_t n = 0; n < c->num_chunks; n++) {
        if (c->kept && n && n % c->save_every == 0)
            memcpy(c->kept + (group * ((c->num_chunks - 1) / c->save_every) + saved++) * state_floats(c), s,
                   4 * state_floats(c));
        if (!c->q.at) {
            step_over(c, group, n, &d, s);
            continue;
        }
        chunk at;
        read_chunk(c, group, n, &d, &at);
        read_queries(c, group, &d, &at);
        if (at.fresh) memset(s, 0, 4 * state_floats(c));
        make_pairs(c, group, &d, &at, 1);
        make_values(c, &d, &at, s);
        write_outputs(c, group, &d, &at, s);
        advance(c, &d, &at, s);
    }
    store_state(c, group, s, c->s_after);
}

INLINE int64_t forward_floats(const call *c) {
    room r = {NULL, 0};
    take_desk(&r, c);
    return r.floats + state_floats(c);
}
