/* Gradients of causal attention, from the last chunk to the first.

   Features and states are made again, a block of chunks at a time, from the few states that the forward pass kept; where
   blocks outnumber these, a walk over the keys finds the states between them first. Nothing of the length of the
   sequence is held but the gradients themselves. */
#pragma once
#include "attention_chunk.h"

typedef struct {
    side queries, keys[BLOCK];
    float *raw_phi;              /* features of keys before they are weighed, where a key scale wants its gradient */
    float *rows, *grad_w, *grad_x;
    float *v, *v_turned, *of_num, *of_num_turned, *grad_v;
    float *pairs, *of_pairs, *of_pairs_turned, *weights;
    float *of_queries, *of_keys; /* [M, CHUNK] */
    float *before;               /* [BLOCK, state_floats]: the states before the chunks of a block */
    float *inner;                /* those before the parts of a stretch, level by level */
    matrices m;
} desk;

/* States at the beginnings of the parts of a stretch, of the parts of these, and so on; or a number for every chunk of
   a read. */
INLINE int64_t inner_floats(const call *c) {
    int64_t levels = LEVELS, blocks = PARTS;
    for (int64_t i = 0; i < LEVELS; i++) blocks *= PARTS;
    for (; blocks * BLOCK < c->num_chunks; blocks *= PARTS) levels++;
    int64_t states = levels * PARTS * state_floats(c), decays = 2 * c->num_chunks + 16;
    return states > decays ? states : decays;
}

static desk take_desk(room *r, const call *c) {
    desk d;
    int64_t values = round_up(c->values, LANES), size = round_up(c->size, LANES), M = round_up(c->features, LANES);
    d.queries = take_side(r, c);
    for (int i = 0; i < BLOCK; i++) d.keys[i] = take_side(r, c);
    d.raw_phi = take(r, M * CHUNK);
    d.rows = take(r, CHUNK * size), d.grad_x = take(r, CHUNK * size);
    d.grad_w = take(r, (c->projections + 1) * size);
    d.v = take(r, CHUNK * values), d.v_turned = take(r, CHUNK * values), d.grad_v = take(r, CHUNK * values);
    d.of_num = take(r, CHUNK * values), d.of_num_turned = take(r, CHUNK * values);
    d.pairs = take(r, CHUNK * CHUNK), d.of_pairs = take(r, CHUNK * CHUNK);
    d.of_pairs_turned = take(r, CHUNK * CHUNK), d.weights = take(r, CHUNK * CHUNK);
    d.of_queries = take(r, M * CHUNK), d.of_keys = take(r, M * CHUNK);
    d.before = take(r, BLOCK * state_floats(c));
    d.inner = take(r, inner_floats(c));
    d.m = matrices_of(r, c);
    return d;
}

INLINE int64_t backward_floats(const call *c) {
    int64_t values = round_up(c->values, LANES), size = round_up(c->size, LANES), M = round_up(c->features, LANES);
    return (BLOCK + 1) * SIDE_FLOATS(c) + CHUNK * (3 * M + 2 * size + 5 * values + 4 * CHUNK) +
           (c->projections + 1) * size + (BLOCK + 4) * state_floats(c) + inner_floats(c) + matrices_floats(c) + 1024;
}

/* Keys that nobody asks and nothing decays have gradients that do not depend on any state. */
INLINE int states_matter(const call *c) { return c->q.at || c->log_gate.at; }

/* The keys of a chunk: features, weighed, and `onward` the state after it. */
static void step_over(const call *c, int64_t group, const chunk *at, desk *d, side keys, state now, int onward) {
    int64_t values = now.values;
    make_features(c, group, c->k, at->begin, at->length, keys, d->rows);
    if (c->key_scale.at || at->length < at->lanes) weigh(keys.phi, c->features, at->lanes, at->weight);
    if (!onward || !states_matter(c)) return;
    pack(d->v, values, c->v, c->heads, group, at->begin, at->length, at->lanes, c->values);
    if (at->fresh) memset(now.s, 0, 4 * state_floats(c));
    float masses[CHUNK];
    *now.mass = add_masses(c, at, *now.mass, masses);
    if (c->log_gate.at) weigh_rows(d->v, values, at->length, at->left);
    /* Here the values are weighed by what is left of their keys, so that features stay as they are for later. */
    float keep = at->fresh ? 0.0f : at->gain;
    multiply(&d->m, now.s, values, keep, (factor){keys.phi, CHUNK, 1}, d->v, values, c->features, values, at->length);
    for (int64_t m = 0; m < c->features; m++) {
        vec sum = {0};
        for (int64_t t = 0; t < at->lanes; t += LANES) {
            vec phi = load(keys.phi + m * CHUNK + t);
            if (c->log_gate.at) phi *= load(at->left + t);
            sum += phi;
        }
        now.z[m] = (keep == 0.0f ? 0.0f : keep * now.z[m]) + total(sum);
    }
}

/* Gradients of numerators and denominators of a chunk from those of its outputs. */
static void divide_gradient(const call *c, int64_t group, const chunk *at, desk *d, const float *den,
                            const float *masses, float *of_den, float *of_mass) {
    int64_t values = round_up(c->values, LANES);
    memset(of_den, 0, 4 * CHUNK), memset(of_mass, 0, 4 * CHUNK);
    pack(d->of_num, values, c->grad_out, c->heads, group, at->begin, at->length, at->lanes, c->values);
    for (int64_t t = 0; t < at->length; t++) {
        if (c->undivided) {
            const float *row = (const float *)row_of(c->grad_out, group, c->heads, at->begin + t);
            of_den[t] = row[c->values], of_mass[t] = row[c->values + 1];
            continue;
        }
        float to_den, to_mass, inverse = 1.0f / divisor(c, den[t], masses[t], &to_den, &to_mass);
        const char *out = row_of(c->out, group, c->heads, at->begin + t);
        vec along = {0};
        for (int64_t j = 0; j < values; j += LANES) {
            vec one = load(d->of_num + t * values + j) * inverse;
            along += one * read_row(out, c->out.type, j, c->values);
            store(d->of_num + t * values + j, one);
        }
        float of_divisor = -total(along);
        of_den[t] = to_den == 0.0f ? 0.0f : of_divisor * to_den;
        of_mass[t] = to_mass == 0.0f ? 0.0f : of_divisor * to_mass;
    }
}

/* The same, and those of numerators turned too. */
static void through_divisor(const call *c, int64_t group, const chunk *at, desk *d, const float *den,
                            const float *masses, float *of_den, float *of_mass) {
    int64_t values = round_up(c->values, LANES);
    divide_gradient(c, group, at, d, den, masses, of_den, of_mass);
    transposed(d->of_num_turned, CHUNK, d->of_num, values, at->lanes, values);
}

/* What the gates between queries and keys of a chunk are worth: for each gate the sum over pairs that it lies between,
   as differences within the chunk. `pairs` are weighed, their gradients not yet. */
static void pair_gates(const chunk *at, const float *pairs, const float *of_pairs, float *crossing) {
    float of_key[CHUNK] __attribute__((aligned(64))) = {0}, of_query[CHUNK];
    for (int64_t i = 0; i < at->lanes; i++) {
        vec sum = {0};
        for (int64_t j = 0; j < smaller(at->lanes, round_up(i + 1, STRIPE)); j += LANES) {
            vec one = load(pairs + i * CHUNK + j);
            one = choose(one != 0.0f, one * load(of_pairs + i * CHUNK + j), all(0.0f));
            store(of_key + j, load(of_key + j) + one);
            sum += one;
        }
        of_query[i] = total(sum);
    }
    float sum = 0.0f;
    for (int64_t t = at->length - 1; t >= 0; t--) crossing[t] += sum += of_query[t] - of_key[t];
}

/* Gradients through the pairs of a chunk are added: of queries' features, of keys' and of values. In float32 always:
   half of each matrix is masked and left out here; as whole matrices of halves they would take as long. */
static void through_pairs(const call *c, const chunk *at, desk *d, const float *keys, const float *of_den,
                          float *crossing) {
    int64_t values = round_up(c->values, LANES), lanes = at->lanes, M = c->features;
    int gated = c->log_gate.at != NULL;
    pair_products(&d->m, lanes, d->of_pairs, CHUNK, (factor){d->of_num, values, 1}, d->v_turned, CHUNK, values);
    for (int64_t i = 0; i < lanes; i++)
        for (int64_t j = 0; j < smaller(lanes, round_up(i + 1, STRIPE)); j += LANES)
            store(d->of_pairs + i * CHUNK + j, load(d->of_pairs + i * CHUNK + j) + of_den[i]);
    if (gated) pair_gates(at, d->pairs, d->of_pairs, crossing);
    weigh_pairs(at, d->of_pairs, gated ? d->weights : NULL);
    for (int64_t i = 0; i < lanes; i += STRIPE) {
        int64_t there = smaller(STRIPE, lanes - i), end = smaller(lanes, i + STRIPE), rest = lanes - i;
        transposed(d->of_pairs_turned + i, CHUNK, d->of_pairs + i * CHUNK, CHUNK, there, end);
        product(d->of_queries + i, CHUNK, 1.0f, (factor){keys, CHUNK, 1}, d->of_pairs_turned + i, CHUNK, M, there, end);
        product(d->of_keys + i, CHUNK, 1.0f, (factor){d->queries.phi + i, CHUNK, 1}, d->of_pairs + i * CHUNK + i, CHUNK,
                M, there, rest);
        product(d->grad_v + i * values, values, 1.0f, (factor){d->pairs + i * CHUNK + i, 1, CHUNK},
                d->of_num + i * values, values, there, values, rest);
    }
}

INLINE float dot(const float *a, const float *b, int64_t floats) {
    vec sum = {0};
    for (int64_t i = 0; i < floats; i += LANES) sum += load(a + i) * load(b + i);
    return total(sum);
}

/* Columns of two [M, CHUNK] multiplied and summed. */
static void column_dots(const float *a, const float *b, int64_t rows, int64_t lanes, float *out) {
    for (int64_t t = 0; t < lanes; t += LANES) {
        vec sum = {0};
        for (int64_t m = 0; m < rows; m++) sum += load(a + m * CHUNK + t) * load(b + m * CHUNK + t);
        store(out + t, sum);
    }
}

/* One chunk, `before` the state before it; `grad` goes from that of the state after it to that of the state before. */
static void chunk_gradients(const call *c, int64_t group, const chunk *at, desk *d, side keys, state before,
                            state grad) {
    int64_t values = before.values, lanes = at->lanes, M = c->features;
    int gated = c->log_gate.at != NULL, asks = c->q.at != NULL;
    float of_den[CHUNK] __attribute__((aligned(64))) = {0}, of_mass[CHUNK] = {0}, masses[CHUNK];
    float den[CHUNK] __attribute__((aligned(64)));
    float at_token[CHUNK] __attribute__((aligned(64)));
    float of_scale[CHUNK] __attribute__((aligned(64))) = {0}, of_gate[CHUNK];
    /* A gate is worth what it lies between: states before and after, queries and the state before, keys and the state
       after, queries and keys. All but the last are sums of what a gate weakens, without differences. */
    float crossing = gated && !at->fresh ? at->gain * dot(before.s, grad.s, sum_floats(c)) : 0.0f;
    for (int64_t t = 0; t < CHUNK; t++) of_gate[t] = crossing;
    add_masses(c, at, *before.mass, masses);
    pack(d->v, values, c->v, c->heads, group, at->begin, at->length, lanes, c->values);
    transposed(d->v_turned, CHUNK, d->v, values, lanes, values);
    /* What reaches keys and values through the state after the chunk. */
    multiply(&d->m, d->of_keys, CHUNK, 0.0f, (factor){grad.s, values, 1}, d->v_turned, CHUNK, M, lanes, c->values);
    for (int64_t m = 0; m < M; m++)
        for (int64_t t = 0; t < lanes; t += LANES) {
            vec one = load(d->of_keys + m * CHUNK + t) + grad.z[m];
            if (gated) one *= load(at->left + t);
            store(d->of_keys + m * CHUNK + t, one);
        }
    if (gated) {
        column_dots(keys.phi, d->of_keys, M, lanes, at_token);
        float sum = 0.0f;
        for (int64_t t = 0; t < at->length; t++) of_gate[t] += sum, sum += at_token[t];
    }
    multiply(&d->m, d->grad_v, values, 0.0f, (factor){keys.phi, 1, CHUNK}, grad.s, values, lanes, values, M);
    if (gated) weigh_rows(d->grad_v, values, at->length, at->left);
    float keep = at->fresh ? 0.0f : at->gain;
    if (asks) {
        make_features(c, group, c->q, at->begin, at->length, d->queries, d->rows);
        if (at->length < lanes) weigh(d->queries.phi, M, lanes, at->present);
        if (gated) pair_weights(at, d->weights);
        pair_products(&d->m, lanes, d->pairs, CHUNK, (factor){d->queries.phi, 1, CHUNK}, keys.phi, CHUNK, M);
        weigh_pairs(at, d->pairs, gated ? d->weights : NULL);
        if (!c->undivided) denominators(c, at, d->queries.phi, before.z, d->pairs, den);
        through_divisor(c, group, at, d, den, masses, of_den, of_mass);
        multiply(&d->m, d->of_queries, CHUNK, 0.0f, (factor){before.s, values, 1}, d->of_num_turned, CHUNK, M, lanes,
                 c->values);
        for (int64_t m = 0; m < M; m++)
            for (int64_t t = 0; t < lanes; t += LANES) {
                vec one = load(d->of_queries + m * CHUNK + t) + before.z[m] * load(of_den + t);
                if (gated) one *= load(at->into + t);
                store(d->of_queries + m * CHUNK + t, one);
            }
        if (gated) {
            column_dots(d->queries.phi, d->of_queries, M, lanes, at_token);
            float sum = 0.0f;
            for (int64_t t = at->length - 1; t >= 0; t--) of_gate[t] += sum += at_token[t];
        }
        through_pairs(c, at, d, keys.phi, of_den, of_gate);
        if (c->grad_q.at || c->grad_w)
            features_gradient(c, group, d->queries, at->present, d->of_queries, c->grad_q, at->begin, at->length, d->grad_x,
                              d->rows, c->grad_w ? d->grad_w : NULL);
        /* The queries' part of the state's gradient; only now may their features be weighed. */
        if (gated) weigh(d->queries.phi, M, lanes, at->into);
        if (!at->fresh) {
            multiply(&d->m, grad.s, values, keep, (factor){d->queries.phi, CHUNK, 1}, d->of_num, values, M, values,
                     at->length);
            for (int64_t m = 0; m < M; m++) grad.z[m] = keep * grad.z[m] + dot(d->queries.phi + m * CHUNK, of_den, lanes);
        }
    } else if (gated && !at->fresh) {
        for (int64_t i = 0; i < sum_floats(c); i += LANES) store(grad.s + i, load(grad.s + i) * keep);
    }
    if (at->fresh) memset(grad.s, 0, 4 * sum_floats(c));
    if (c->grad_key_scale) {
        make_features(c, group, c->k, at->begin, at->length, (side){d->grad_x, d->queries.inverse, d->raw_phi}, d->rows);
        column_dots(d->raw_phi, d->of_keys, M, lanes, of_scale);
    }
    /* Masses, gates and scales: from the last token of the chunk to the first. */
    float m = *grad.mass;
    for (int64_t t = at->length - 1; t >= 0; t--) {
        float earlier = t ? masses[t - 1] : at->fresh ? 0.0f : *before.mass, gate = gated ? expf(at->gate[t]) : 1.0f;
        m += of_mass[t];
        of_scale[t] += m;
        if (gated) {
            of_gate[t] += m * gate * earlier;
            float given = number_at(c->log_gate, group, c->heads, at->begin + t);
            if (given < CLOSED) of_gate[t] = 0.0f;
        }
        m *= gate;
    }
    *grad.mass = at->fresh ? 0.0f : m;
    int64_t token = group * c->tokens + at->begin;
    if (c->grad_key_scale) memcpy(c->grad_key_scale + token, of_scale, 4 * at->length);
    if (c->grad_log_gate) memcpy(c->grad_log_gate + token, of_gate, 4 * at->length);
    if (c->grad_v.at)
        for (int64_t t = 0; t < at->length; t++)
            for (int64_t j = 0; j < values; j += LANES)
                write_row(row_of(c->grad_v, group, c->heads, at->begin + t), c->grad_v.type, j, c->values,
                          load(d->grad_v + t * values + j));
    if (c->grad_k.at || c->grad_w)
        features_gradient(c, group, keys, at->weight, d->of_keys, c->grad_k, at->begin, at->length, d->grad_x, d->rows,
                          c->grad_w ? d->grad_w : NULL);
}

/* From its state on, without looking back: the state after so many chunks. */
static void walk_on(const call *c, int64_t group, desk *d, state now, int64_t first, int64_t last) {
    chunk at;
    for (int64_t n = first; n < last; n++) {
        look_at(c, group, n, &at);
        step_over(c, group, &at, d, d->keys[0], now, 1);
    }
}

/* Gradients of a block of chunks from the state before it, which comes in `d->before`. */
static void block_gradients(const call *c, int64_t group, desk *d, int64_t first, int64_t last, state grad) {
    int64_t floats = state_floats(c), count = last - first;
    chunk at[BLOCK];
    for (int64_t i = 0; i < count; i++) {
        float *before = d->before + i * floats, *after = before + floats;
        int onward = i + 1 < count;
        look_at(c, group, first + i, &at[i]);
        if (onward) memcpy(after, before, 4 * floats);
        step_over(c, group, &at[i], d, d->keys[i], state_at(c, after), onward);
        if (at[i].fresh) memset(before, 0, 4 * floats);
    }
    for (int64_t i = count - 1; i >= 0; i--)
        chunk_gradients(c, group, &at[i], d, d->keys[i], state_at(c, d->before + i * floats), grad);
}

/* Gradients of a stretch of chunks from the state before it: in parts, the last one first. The states before them are
   found by a walk, and kept on this level's shelf; a part of several blocks goes to the next level. */
static void stretch_gradients(const call *c, int64_t group, desk *d, int level, const float *start, int64_t first,
                              int64_t last, state grad) {
    int64_t floats = state_floats(c), blocks = (last - first + BLOCK - 1) / BLOCK;
    if (blocks <= 1 || !states_matter(c)) {
        for (int64_t at = first + (blocks - 1) * BLOCK; at >= first; at -= BLOCK) {
            memcpy(d->before, start, 4 * floats);
            block_gradients(c, group, d, at, smaller(at + BLOCK, last), grad);
        }
        return;
    }
    int64_t chunks = (blocks + PARTS - 1) / PARTS * BLOCK, parts = (last - first + chunks - 1) / chunks;
    float *shelf = d->inner + level * PARTS * floats;
    memcpy(shelf, start, 4 * floats);
    for (int64_t i = 1; i < parts; i++) {
        memcpy(shelf + i * floats, shelf + (i - 1) * floats, 4 * floats);
        walk_on(c, group, d, state_at(c, shelf + i * floats), first + (i - 1) * chunks, first + i * chunks);
    }
    for (int64_t i = parts - 1; i >= 0; i--)
        stretch_gradients(c, group, d, level + 1, shelf + i * floats, first + i * chunks,
                          smaller(first + (i + 1) * chunks, last), grad);
}

static void backward_group(const call *c, int64_t group, float *memory) {
    room r = {memory, 0};
    desk d = take_desk(&r, c);
    int64_t floats = state_floats(c), columns = round_up(c->size, LANES);
    int64_t per_group = c->num_chunks ? (c->num_chunks - 1) / c->save_every : 0;
    state grad = state_at(c, take(&r, floats)), start = state_at(c, take(&r, floats));
    load_state(c, group, c->grad_s_after, c->grad_zm_after, grad);
    if (c->grad_w) memset(d.grad_w, 0, 4 * c->projections * columns);
    for (int64_t stretch = per_group; stretch >= 0 && c->num_chunks; stretch--) {
        int64_t first = stretch * c->save_every, last = smaller(first + c->save_every, c->num_chunks);
        if (stretch && states_matter(c))
            memcpy(start.s, c->kept + (group * per_group + stretch - 1) * floats, 4 * floats);
        else
            load_state(c, group, c->s, c->zm, start);
        stretch_gradients(c, group, &d, 0, start.s, first, last, grad);
    }
    store_state(c, group, grad, c->grad_s, c->grad_zm);
    for (int64_t i = 0; c->grad_w && i < c->projections; i++)
        memcpy(c->grad_w + (group * c->projections + i) * c->size, d.grad_w + i * columns, 4 * c->size);
}
