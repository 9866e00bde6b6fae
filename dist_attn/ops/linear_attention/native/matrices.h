/* The products of a chunk and of the state, in float32 or by bfloat16 instructions: where keys and values are bfloat16
   and the processor has such instructions. */
#pragma once
#include "halves.h"

/* Room for factors as words of two; nothing where products are float32. */
typedef struct {
    int half;
    uint32_t *keys, *queries; /* [M / 2, CHUNK] */
    uint32_t *turned;         /* [M, CHUNK / 2]: keys again, tokens in pairs */
    uint32_t *state;          /* [M / 2, values] */
    uint32_t *v;              /* [CHUNK / 2, values] */
    uint32_t *pairs;          /* [STRIPE, CHUNK / 2] */
} matrices;

INLINE int in_halves(const call *c) {
    view keys = c->k.at ? c->k : c->q, values = c->k.at ? c->v : c->q; /* of a read: its queries */
    return HALF_PRODUCTS && keys.type == BFLOAT16 && values.type == BFLOAT16;
}

INLINE int64_t matrices_floats(const call *c) {
    int64_t values = round_up(c->values, LANES), M = round_up(c->features, 2);
    return in_halves(c) ? M / 2 * (3 * CHUNK + values) + CHUNK / 2 * (values + STRIPE) + 6 * 16 : 0;
}

static matrices take_matrices(room *r, const call *c) {
    matrices m = {in_halves(c)};
    int64_t values = round_up(c->values, LANES), M = round_up(c->features, 2);
    if (!m.half) return m;
    m.keys = (uint32_t *)take(r, M / 2 * CHUNK), m.queries = (uint32_t *)take(r, M / 2 * CHUNK);
    m.turned = (uint32_t *)take(r, M * CHUNK / 2), m.state = (uint32_t *)take(r, M / 2 * values);
    m.v = (uint32_t *)take(r, CHUNK / 2 * values), m.pairs = (uint32_t *)take(r, STRIPE * CHUNK / 2);
    return m;
}

#if HALF_PRODUCTS
#define IN_HALVES(m, ...)   \
    if ((m)->half) {        \
        __VA_ARGS__         \
        return;             \
    }
#else
#define IN_HALVES(m, ...)
#endif

/* To be called when the state is another one than before. */
INLINE void new_state(const call *c, matrices *m, state now) {
    IN_HALVES(m, pair_rows(m->state, now.values, now.s, now.values, c->features, now.values);)
}

/* What queries, [M, CHUNK], find in the state: num = phi_q S, [length, values]. */
INLINE void read_out(const call *c, matrices *m, const chunk *at, const float *phi, state now, float *num) {
    IN_HALVES(m, {
        pair_rows(m->queries, CHUNK, phi, CHUNK, c->features, at->lanes);
        half_product(num, now.values, 0.0f, (words){m->queries, 1, CHUNK}, m->state, now.values, at->length, now.values,
                     (c->features + 1) / 2);
    })
    product(num, now.values, 0.0f, (factor){phi, 1, CHUNK}, now.s, now.values, at->length, now.values, c->features);
}

/* Pairs of queries and keys that are not masked, and the rest of their stripe; queries as `read_out` had them. */
INLINE void score(const call *c, matrices *m, const chunk *at, const float *phi_q, const float *phi_k, float *pairs) {
    IN_HALVES(m, {
        pair_rows(m->keys, CHUNK, phi_k, CHUNK, c->features, at->lanes);
        for (int64_t i = 0; i < at->lanes; i += STRIPE)
            half_product(pairs + i * CHUNK, CHUNK, 0.0f, (words){m->queries + i, 1, CHUNK}, m->keys, CHUNK,
                         smaller(STRIPE, at->lanes - i), smaller(at->lanes, i + STRIPE), (c->features + 1) / 2);
    })
    pair_products(at, pairs, (factor){phi_q, 1, CHUNK}, phi_k, c->features);
}

/* To be called when values, [lanes, columns], are another chunk's. */
INLINE void new_values(const chunk *at, matrices *m, const float *v, int64_t columns) {
    IN_HALVES(m, pair_rows(m->v, columns, v, columns, at->lanes, columns);)
}

/* num += pairs v, pairs masked and weighed. */
INLINE void add_values(const chunk *at, matrices *m, const float *pairs, const float *v, float *num, int64_t columns) {
    IN_HALVES(m, for (int64_t i = 0; i < at->length; i += STRIPE) {
        int64_t end = smaller(at->lanes, i + STRIPE), rows = smaller(STRIPE, at->length - i);
        pair_neighbours(m->pairs, pairs + i * CHUNK, rows, end);
        half_product(num + i * columns, columns, 1.0f, (words){m->pairs, CHUNK / 2, 1}, m->v, columns, rows, columns, end / 2);
    })
    for (int64_t i = 0; i < at->length; i += STRIPE)
        product(num + i * columns, columns, 1.0f, (factor){pairs + i * CHUNK, CHUNK, 1}, v, columns,
                smaller(STRIPE, at->length - i), columns, smaller(at->length, i + STRIPE));
}

/* The sums behind a chunk, S = keep S + sum phi_k v^T, of keys weighed by what is left of them. */
INLINE void add_keys(const call *c, matrices *m, const chunk *at, float keep, const float *phi, const float *v, state to) {
    IN_HALVES(m, {
        pair_neighbours(m->turned, phi, c->features, at->lanes);
        half_product(to.s, to.values, keep, (words){m->turned, CHUNK / 2, 1}, m->v, to.values, c->features, to.values,
                     at->lanes / 2);
    })
    product(to.s, to.values, keep, (factor){phi, CHUNK, 1}, v, to.values, c->features, to.values, at->length);
}
