/* Gradients of an affine recurrence, from the last chunk to the first.

   States, and what chunks were solved for, are made again, a block of chunks at a time, from the few states that the
   forward pass kept; where blocks outnumber these, a walk over the tokens makes the states between them first. Nothing
   of the length of the sequence is held but the gradients themselves. */
#pragma once
#include "affine_gradients.h"

typedef struct {
    desk d;
    slopes g;
    float *before; /* [BLOCK, state_floats]: the states before the chunks of a block */
    float *solved; /* [BLOCK, CHUNK, V]: what they were solved for */
    float *inner;  /* the states before the parts of a stretch, level by level */
} bench;

INLINE int64_t inner_floats(const call *c) {
    int64_t levels = LEVELS, blocks = PARTS;
    for (int64_t i = 0; i < LEVELS; i++) blocks *= PARTS;
    for (; blocks * BLOCK < c->num_chunks; blocks *= PARTS) levels++;
    return levels * PARTS * state_floats(c);
}

static bench take_bench(room *r, const call *c) {
    bench w;
    w.d = take_desk(r, c), w.g = take_slopes(r, c, &w.d);
    w.before = take(r, BLOCK * state_floats(c));
    w.solved = take(r, erases(c) ? BLOCK * CHUNK * w.d.V : 0);
    w.inner = take(r, inner_floats(c));
    return w;
}

INLINE int64_t backward_floats(const call *c) {
    room r = {NULL, 0};
    take_bench(&r, c);
    return r.floats + 2 * state_floats(c);
}

/* (1 - lower)^T x = right side, in place; y = beta x, or x. The triangle is `lower` with columns times beta. */
static void solve_back(const call *c, desk *d, const chunk *at, const float *lower, float *x, float *y) {
    int64_t V = d->V, columns = round_up(c->values, LANES), scaled = c->beta.at != NULL;
    for (int64_t i = at->lanes - STRIPE; i >= 0; i -= STRIPE) {
        float *here = x + i * V, *block = d->system + i * PAIR_ROW;
        int64_t later = i + STRIPE;
        if (later < at->lanes)
            product(here, V, 1.0f, (factor){lower + later * PAIR_ROW + i, 1, PAIR_ROW}, y + later * V, V, STRIPE, columns,
                    at->lanes - later);
        for (int64_t t = 0; t < STRIPE; t++)
            for (int64_t j = 0; j < STRIPE; j += LANES)
                store(block + t * PAIR_ROW + j,
                      load(lower + (i + t) * PAIR_ROW + i + j) * (scaled ? at->beta[i + t] : 1.0f));
        invert_stripe(d->inverse, block);
        memcpy(d->some, here, 4 * STRIPE * V);
        product(here, V, 0.0f, (factor){d->inverse, 1, STRIPE}, d->some, V, STRIPE, columns, STRIPE);
        for (int64_t t = i; t < later; t++)
            for (int64_t j = 0; j < columns; j += LANES)
                store(y + t * V + j, load(x + t * V + j) * (scaled ? at->beta[t] : 1.0f));
    }
}

/* The gradients of what a chunk's columns are written with, of values and of what rows of b see: `of_value` of k is
   that of v in the end. */
static void through_values(const call *c, desk *d, const chunk *at, slopes *g, const float *grad) {
    int64_t V = d->V, lanes = at->lanes, columns = round_up(c->values, LANES);
    for (int x = 0; x < 1 + (c->a.at != NULL); x++) {
        multiply(&d->m, g->of_value[x], V, 0.0f, (factor){d->turned[x], 1, PAIR_ROW}, grad, V, lanes, columns, c->size);
        if (c->q.at) add_later(g->of_value[x], d->pairs[OF_Q][x], g->of_out, lanes, V, columns);
    }
    if (c->beta.at) {
        solve_back(c, d, at, d->pairs[OF_B][OF_K], g->of_value[OF_K], g->of_read);
        for (int64_t t = 0; t < lanes; t++)
            g->of_beta[t] = dot(g->of_value[OF_K] + t * V, d->solved + t * V, columns);
        memcpy(g->of_value[OF_K], g->of_read, 4 * lanes * V);
    } else if (c->a.at) {
        solve_back(c, d, at, d->pairs[OF_B][OF_A], g->of_value[OF_A], g->of_read);
        add_later(g->of_value[OF_K], d->pairs[OF_B][OF_K], g->of_read, lanes, V, columns);
    }
}

/* Of decayed rows and columns, and of pairs; then `grad` is that of the state before the chunk. Returns what the states
   say of a scalar decay; of a vector decay that goes to `total`, times which it is no more needed. */
static float through_states(const call *c, desk *d, const chunk *at, slopes *g, const int there[2], const float *before,
                            float *grad) {
    int64_t K = d->K, V = d->V, lanes = at->lanes, keys = round_up(c->size, LANES), columns = round_up(c->values, LANES);
    const float *of_read[2] = {g->of_read, g->of_out};
    transposed(g->turned_state, K, grad, V, keys, columns);
    for (int x = 0; x < 1 + (c->a.at != NULL); x++) {
        multiply(&d->m, g->of_col[x], K, 0.0f, (factor){d->value[x], V, 1}, g->turned_state, K, lanes, keys, c->values);
        transposed(g->turned_value, PAIR_ROW, d->value[x], V, lanes, columns);
        for (int r = 0; r < 2; r++)
            if (there[r])
                pair_products(&d->m, lanes, g->of_pairs[r][x], PAIR_ROW, (factor){of_read[r], V, 1}, g->turned_value,
                              PAIR_ROW, c->values);
    }
    transposed(g->turned_state, K, before, V, keys, columns);
    for (int r = 0; r < 2; r++)
        if (there[r])
            multiply(&d->m, g->of_row[r], K, 0.0f, (factor){of_read[r], V, 1}, g->turned_state, K, lanes, keys, c->values);
    float crossing = 0.0f;
    for (int64_t k = 0; k < c->size && !at->fresh; k++) {
        float sum = dot(before + k * V, grad + k * V, columns);
        crossing += sum, d->walk[k] = c->decays > 1 ? d->total[k] * sum : 0.0f;
    }
    float keep = decay_state(c, d, at, grad);
    for (int r = 0; r < 2; r++)
        if (there[r])
            multiply(&d->m, grad, V, keep, (factor){d->full[r], 1, K}, of_read[r], V, c->size, columns, lanes), keep = 1.0f;
    for (int64_t i = 0; i < state_floats(c) && keep != 1.0f; i += LANES) store(grad + i, load(grad + i) * keep);
    return at->gain * crossing;
}

static void write_rows(const call *c, view to, int64_t group, const chunk *at, const float *rows, int64_t row,
                       int64_t size) {
    for (int64_t t = 0; to.at && t < at->length; t++)
        for (int64_t j = 0; j < size; j += LANES)
            write_row(row_of(to, group, c->heads, at->begin + t), to.type, j, size, load(rows + t * row + j));
}

static void write_numbers(const call *c, view to, int64_t group, const chunk *at, const float *numbers) {
    for (int64_t t = 0; to.at && t < at->length; t++)
        write_row(row_of(to, group, c->heads, at->begin + t), to.type, 0, 1, all(numbers[t]));
}

static void write_gradients(const call *c, int64_t group, desk *d, const chunk *at, slopes *g) {
    int64_t K = d->K;
    if (c->beta.at) /* its b is -k */
        for (int64_t i = 0; i < at->lanes * K; i += LANES)
            store(g->of_col[OF_K] + i, load(g->of_col[OF_K] + i) - load(g->of_row[OF_B] + i));
    write_rows(c, c->grad_q, group, at, g->of_row[OF_Q], K, c->size);
    write_rows(c, c->grad_k, group, at, g->of_col[OF_K], K, c->size);
    write_rows(c, c->grad_v, group, at, g->of_value[OF_K], d->V, c->values);
    write_rows(c, c->grad_a, group, at, g->of_col[OF_A], K, c->size);
    write_rows(c, c->grad_b, group, at, g->of_row[OF_B], K, c->size);
    if (c->decays > 1) write_rows(c, c->grad_log_decay, group, at, g->of_log, K, c->size);
    else write_numbers(c, c->grad_log_decay, group, at, g->of_log);
    write_numbers(c, c->grad_beta, group, at, g->of_beta);
}

/* One chunk, `before` the state before it; `grad` goes from that of the state after it to that of the state before. */
static void chunk_gradients(const call *c, int64_t group, int64_t number, bench *w, const float *before,
                            const float *solved, float *grad) {
    desk *d = &w->d;
    slopes *g = &w->g;
    chunk at;
    int there[2] = {erases(c), c->q.at != NULL};
    read_chunk(c, group, number, d, &at);
    if (there[OF_Q]) {
        read_queries(c, group, d, &at);
        pack(g->of_out, d->V, c->grad_out, c->heads, group, at.begin, at.length, at.lanes, c->values);
    }
    make_pairs(c, group, d, &at, there[OF_Q]);
    if (there[OF_B]) memcpy(d->solved, solved, 4 * at.lanes * d->V);
    if (c->beta.at) write_values(c, d, &at);
    else memcpy(d->value[OF_K], d->v, 4 * at.lanes * d->V);
    if (c->a.at) memcpy(d->value[OF_A], d->solved, 4 * at.lanes * d->V);
    through_values(c, d, &at, g, grad);
    float crossing = through_states(c, d, &at, g, there, before, grad);
    if (at.fresh) memset(grad, 0, 4 * state_floats(c));
    for (int x = 0; there[OF_Q] && x < 1 + (c->a.at != NULL); x++)
        for (int64_t t = 0; t < at.lanes; t++) g->own[x][t] = g->of_pairs[OF_Q][x][t * PAIR_ROW + t];
    if (c->decays > 1) {
        memcpy(d->total, d->walk, 4 * d->K);
        if (at.fresh) memset(d->total, 0, 4 * d->K);
        vector_gradients(c, d, &at, g, there, d->total);
    } else {
        scalar_gradients(c, d, &at, g, there, crossing);
    }
    for (int x = 0; there[OF_Q] && x < 1 + (c->a.at != NULL); x++) own_gradients(c, group, d, &at, g, x);
    write_gradients(c, group, d, &at, g);
}

/* Gradients of a block of chunks from the state before it, which comes in `before`. */
static void block_gradients(const call *c, int64_t group, bench *w, int64_t first, int64_t last, float *grad) {
    int64_t floats = state_floats(c), count = last - first, values = CHUNK * w->d.V;
    for (int64_t i = 0; i < count; i++) {
        float *before = w->before + i * floats;
        chunk at;
        look_at(c, first + i, &at);
        if (at.fresh) memset(before, 0, 4 * floats);
        if (i + 1 == count && !erases(c)) continue;
        read_chunk(c, group, first + i, &w->d, &at);
        make_pairs(c, group, &w->d, &at, 0);
        make_values(c, &w->d, &at, before);
        if (erases(c)) memcpy(w->solved + i * values, w->d.solved, 4 * at.lanes * w->d.V);
        if (i + 1 == count) continue;
        memcpy(before + floats, before, 4 * floats);
        advance(c, &w->d, &at, before + floats);
    }
    for (int64_t i = count - 1; i >= 0; i--)
        chunk_gradients(c, group, first + i, w, w->before + i * floats, w->solved + i * values, grad);
}

/* Gradients of a stretch of chunks from the state before it: in parts, the last one first. The states before them are
   made by a walk, and kept on this level's shelf; a part of several blocks goes to the next level. */
static void stretch_gradients(const call *c, int64_t group, bench *w, int level, const float *start, int64_t first,
                              int64_t last, float *grad) {
    int64_t floats = state_floats(c), blocks = (last - first + BLOCK - 1) / BLOCK;
    if (blocks <= 1) {
        memcpy(w->before, start, 4 * floats);
        block_gradients(c, group, w, first, last, grad);
        return;
    }
    int64_t chunks = (blocks + PARTS - 1) / PARTS * BLOCK, parts = (last - first + chunks - 1) / chunks;
    float *shelf = w->inner + level * PARTS * floats;
    memcpy(shelf, start, 4 * floats);
    for (int64_t i = 1; i < parts; i++) {
        memcpy(shelf + i * floats, shelf + (i - 1) * floats, 4 * floats);
        for (int64_t n = first + (i - 1) * chunks; n < first + i * chunks; n++)
            step_over(c, group, n, &w->d, shelf + i * floats);
    }
    for (int64_t i = parts - 1; i >= 0; i--)
        stretch_gradients(c, group, w, level + 1, shelf + i * floats, first + i * chunks,
                          smaller(first + (i + 1) * chunks, last), grad);
}

static void backward_group(const call *c, int64_t group, float *memory) {
    room r = {memory, 0};
    bench w = take_bench(&r, c);
    int64_t floats = state_floats(c), per_group = c->num_chunks ? (c->num_chunks - 1) / c->save_every : 0;
    float *grad = take(&r, floats), *start = take(&r, floats);
    load_state(c, group, c->grad_s_after, grad);
    memset(w.g.of_bonus, 0, 4 * w.d.K);
    for (int64_t stretch = per_group; stretch >= 0 && c->num_chunks; stretch--) {
        int64_t first = stretch * c->save_every, last = smaller(first + c->save_every, c->num_chunks);
        if (stretch) memcpy(start, c->kept + (group * per_group + stretch - 1) * floats, 4 * floats);
        else load_state(c, group, c->s, start);
        stretch_gradients(c, group, &w, 0, start, first, last, grad);
    }
    store_state(c, group, grad, c->grad_s);
    if (c->grad_bonus) memcpy(c->grad_bonus + group * c->size, w.g.of_bonus, 4 * c->size);
}
