/* The products of a chunk and of states, in float32, or by bfloat16 instructions where keys and values are bfloat16 and
   the processor has such instructions. */
#pragma once
#include "halves.h"

/* Room for two factors as words, where products are of halves. */
typedef struct {
    int half;
    uint32_t *left, *right;
} matrices;

INLINE int in_halves(const call *c) {
    view keys = c->k.at ? c->k : c->q, values = c->k.at ? c->v : c->q; /* of a read: its queries */
    return HALF_PRODUCTS && keys.type == BFLOAT16 && values.type == BFLOAT16;
}

/* Of the largest factor: features, values or tokens beside each other, two in a word. */
INLINE int64_t factor_floats(const call *c) {
    int64_t values = round_up(c->values, 2 * LANES), M = round_up(c->features, 2 * LANES);
    int64_t most = values > CHUNK ? values : CHUNK, rows = M > CHUNK ? M : CHUNK;
    return rows / 2 * most;
}

INLINE int64_t matrices_floats(const call *c) { return in_halves(c) ? 2 * factor_floats(c) + 2 * 16 : 0; }

static matrices take_matrices(room *r, const call *c) {
    matrices m = {in_halves(c)};
    if (!m.half) return m;
    m.left = (uint32_t *)take(r, factor_floats(c)), m.right = (uint32_t *)take(r, factor_floats(c));
    return m;
}

#if HALF_PRODUCTS
/* The left factor as words. What is beyond `depth` in its last vector must be finite. */
static words left_words(const matrices *m, factor a, int64_t rows, int64_t depth) {
    if (a.column == 1) {
        int64_t row = round_up(depth, 2 * LANES) / 2;
        pair_neighbours(m->left, row, a.at, a.row, rows, depth);
        return (words){m->left, row, 1};
    }
    int64_t row = round_up(rows, LANES);
    pair_rows(m->left, row, a.at, a.column, depth, row);
    return (words){m->left, 1, row};
}
#endif

/* As `product`. The left factor has whole vectors, in rows or in columns. */
static void multiply(const matrices *m, float *out, int64_t out_row, float keep, factor a, const float *b,
                     int64_t b_row, int64_t rows, int64_t columns, int64_t depth) {
#if HALF_PRODUCTS
    if (m->half) {
        words left = left_words(m, a, rows, depth);
        pair_rows(m->right, columns, b, b_row, depth, columns);
        half_product(out, out_row, keep, left, m->right, columns, rows, columns, (depth + 1) / 2);
        return;
    }
#endif
    product(out, out_row, keep, a, b, b_row, rows, columns, depth);
}

/* a b^T for the pairs of queries and keys of a chunk that are not masked, and the rest of their stripe. */
static void pair_products(const matrices *m, const chunk *at, float *out, factor a, const float *b, int64_t depth) {
#if HALF_PRODUCTS
    if (m->half) {
        words left = left_words(m, a, at->lanes, depth);
        pair_rows(m->right, CHUNK, b, CHUNK, depth, at->lanes);
        for (int64_t i = 0; i < at->lanes; i += STRIPE)
            half_product(out + i * CHUNK, CHUNK, 0.0f, (words){left.at + i * left.row, left.row, left.column}, m->right,
                         CHUNK, smaller(STRIPE, at->lanes - i), smaller(at->lanes, i + STRIPE), (depth + 1) / 2);
        return;
    }
#endif
    for (int64_t i = 0; i < at->lanes; i += STRIPE)
        product(out + i * CHUNK, CHUNK, 0.0f, (factor){a.at + i * a.row, a.row, a.column}, b, CHUNK,
                smaller(STRIPE, at->lanes - i), smaller(at->lanes, i + STRIPE), depth);
}

/* num += pairs v: what the queries of a chunk find in its own values. */
static void add_values(const matrices *m, const chunk *at, float *num, const float *pairs, const float *v,
                       int64_t values) {
#if HALF_PRODUCTS
    if (m->half) {
        pair_rows(m->right, values, v, values, at->lanes, values);
        for (int64_t i = 0; i < at->length; i += STRIPE) {
            int64_t rows = smaller(STRIPE, at->length - i), end = smaller(at->lanes, i + STRIPE);
            words left = left_words(m, (factor){pairs + i * CHUNK, CHUNK, 1}, rows, end);
            half_product(num + i * values, values, 1.0f, left, m->right, values, rows, values, end / 2);
        }
        return;
    }
#endif
    for (int64_t i = 0; i < at->length; i += STRIPE)
        product(num + i * values, values, 1.0f, (factor){pairs + i * CHUNK, CHUNK, 1}, v, values,
                smaller(STRIPE, at->length - i), values, smaller(at->length, i + STRIPE));
}
