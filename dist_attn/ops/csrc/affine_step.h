/* One token of an affine recurrence: its state is read and written once, columns by columns, which stay in cache. */
#pragma once
#include "affine_chunk.h"

#define STEP_VECTORS 4 /* of a block of columns: their sums stay in registers */

/* What the token brings: [K] each, of the ones that are there, and rows of values. */
typedef struct {
    float *gate, *k, *q, *a, *b; /* b: what the state before is read with, to be taken from it */
    float beta, bonus;           /* bonus: sum of q bonus k */
} token_rows;

/* A row of the only token, whole vectors with zeros behind its end. */
static float *token_row(room *r, const call *c, view x, int64_t group) {
    if (!x.at) return NULL;
    float *out = take(r, row_floats(c->size));
    for (int64_t k = 0; k < c->size; k += LANES)
        store(out + k, read_row(row_of(x, group, c->heads, 0), x.type, k, c->size));
    return out;
}

static token_rows read_token(room *r, const call *c, int64_t group) {
    token_rows t = {.k = token_row(r, c, c->k, group), .q = token_row(r, c, c->q, group),
                    .a = token_row(r, c, c->a, group), .b = token_row(r, c, c->b, group)};
    t.gate = take(r, row_floats(c->size));
    int64_t vectors = round_up(c->size, LANES);
    float log = c->decays == 1 ? number_at(c->log_decay, group, c->heads, 0) : 0.0f;
    const char *logs = row_of(c->log_decay, group, c->heads, 0);
    for (int64_t k = 0; k < vectors; k += LANES)
        store(t.gate + k, exponential(c->decays == 1 ? all(log) : read_row(logs, c->log_decay.type, k, c->size)));
    if (c->beta.at) {
        t.beta = number_at(c->beta, group, c->heads, 0);
        t.b = take(r, row_floats(c->size));
        for (int64_t k = 0; k < vectors; k += LANES) store(t.b + k, -load(t.k + k) * load(t.gate + k));
    }
    if (c->bonus && t.q)
        for (int64_t k = 0; k < c->size; k++) t.bonus += t.q[k] * c->bonus[group % c->heads * c->size + k] * t.k[k];
    return t;
}

/* LANES numbers of a row of the state; `whole` is a constant wherever this is called. */
INLINE vec state_at(const int whole, const float *row, int64_t there) {
    return whole ? load_loose(row) : read_row((const char *)row, FLOAT32, 0, there);
}

INLINE void read_state(const int width, const int whole, vec *sums, const float *with, const float *s, int64_t size,
                       int64_t row, int64_t there) {
    for (int j = 0; j < width; j++) sums[j] = (vec){0};
    for (int64_t k = 0; k < size; k++)
        for (int j = 0; j < width; j++) sums[j] += with[k] * state_at(whole, s + k * row + j * LANES, there);
}

/* `width` vectors of columns from `first` on. */
INLINE void step_columns(const int width, const int whole, const call *c, int64_t group, const token_rows *t,
                         int64_t first) {
    int64_t V = c->values, there = V - first;
    const float *s = c->s + group * c->size * V + first;
    float *after = c->s_after + group * c->size * V + first;
    vec value[STEP_VECTORS], taken[STEP_VECTORS], out[STEP_VECTORS];
    const char *v = row_of(c->v, group, c->heads, 0);
    for (int j = 0; j < width; j++) value[j] = read_row(v, c->v.type, first + j * LANES, V);
    if (t->b) read_state(width, whole, taken, t->b, s, c->size, V, there);
    if (t->q && c->reads_before) {
        read_state(width, whole, out, t->q, s, c->size, V, there);
        for (int j = 0; j < width; j++) out[j] += t->bonus * value[j];
    } else {
        for (int j = 0; j < width; j++) out[j] = (vec){0};
    }
    if (c->beta.at)
        for (int j = 0; j < width; j++) value[j] = t->beta * (value[j] + taken[j]);
    for (int64_t k = 0; k < c->size; k++)
        for (int j = 0; j < width; j++) {
            vec one = t->gate[k] * state_at(whole, s + k * V + j * LANES, there) + t->k[k] * value[j];
            if (t->a) one += t->a[k] * taken[j];
            if (t->q && !c->reads_before) out[j] += t->q[k] * one;
            if (whole) store_loose(after + k * V + j * LANES, one);
            else write_row((char *)(after + k * V), FLOAT32, 0, there, one);
        }
    for (int j = 0; t->q && j < width; j++)
        write_row(row_of(c->out, group, c->heads, 0), c->out.type, first + j * LANES, V, out[j]);
}

/* Whether a call is one token after a state, and no document's first. */
INLINE int is_step(const call *c) { return c->tokens == 1 && c->s && c->s_after && !(c->fresh && c->fresh[0]); }

/* The state after may lie where the state before does. */
static void step_group(const call *c, int64_t group, float *memory) {
    room r = {memory, 0};
    token_rows t = read_token(&r, c, group);
    int64_t j = 0;
    for (; j + STEP_VECTORS * LANES <= c->values; j += STEP_VECTORS * LANES)
        step_columns(STEP_VECTORS, 1, c, group, &t, j);
    for (; j + LANES <= c->values; j += LANES) step_columns(1, 1, c, group, &t, j);
    if (j < c->values) step_columns(1, 0, c, group, &t, j);
}
