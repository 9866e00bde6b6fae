/* The products of a chunk and of states, in float32, or by bfloat16 instructions where a call's tokens are bfloat16 and
   the processor has such instructions. */
#pragma once
#include "halves.h"

/* Room for two factors as words, where products are of halves. */
typedef struct {
    int half;
    uint32_t *left, *right;
} matrices;

/* Of the largest factor of states [rows, columns] and of chunks: two numbers in a word. */
INLINE int64_t largest_factor(int64_t rows, int64_t columns) {
    int64_t values = round_up(columns, 2 * LANES), M = round_up(rows, 2 * LANES);
    int64_t most = values > CHUNK ? values : CHUNK, deep = M > CHUNK ? M : CHUNK;
    return deep / 2 * most;
}

static matrices take_matrices(room *r, int half, int64_t floats) {
    matrices m = {half, NULL, NULL};
    if (!m.half) return m;
    m.left = (uint32_t *)take(r, floats), m.right = (uint32_t *)take(r, floats);
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

/* a b for the pairs of tokens of a chunk that are not masked, and the rest of their stripe. */
static void pair_products(const matrices *m, int64_t lanes, float *out, int64_t out_row, factor a, const float *b,
                          int64_t b_row, int64_t depth) {
#if HALF_PRODUCTS
    if (m->half) {
        words left = left_words(m, a, lanes, depth);
        pair_rows(m->right, CHUNK, b, b_row, depth, lanes);
        for (int64_t i = 0; i < lanes; i += STRIPE)
            half_product(out + i * out_row, out_row, 0.0f, (words){left.at + i * left.row, left.row, left.column},
                         m->right, CHUNK, smaller(STRIPE, lanes - i), smaller(lanes, i + STRIPE), (depth + 1) / 2);
        return;
    }
#endif
    for (int64_t i = 0; i < lanes; i += STRIPE)
        product(out + i * out_row, out_row, 0.0f, (factor){a.at + i * a.row, a.row, a.column}, b, b_row,
                smaller(STRIPE, lanes - i), smaller(lanes, i + STRIPE), depth);
}

/* out += pairs v, for `length` tokens: what the queries of a chunk see of its own values, both in rows of `row`. */
static void add_values(const matrices *m, int64_t length, int64_t lanes, float *out, const float *pairs,
                       int64_t pairs_row, const float *v, int64_t row, int64_t columns) {
#if HALF_PRODUCTS
    if (m->half) {
        pair_rows(m->right, columns, v, row, lanes, columns);
        for (int64_t i = 0; i < length; i += STRIPE) {
            int64_t rows = smaller(STRIPE, length - i), end = smaller(lanes, i + STRIPE);
            words left = left_words(m, (factor){pairs + i * pairs_row, pairs_row, 1}, rows, end);
            half_product(out + i * row, row, 1.0f, left, m->right, columns, rows, columns, end / 2);
        }
        return;
    }
#endif
    for (int64_t i = 0; i < length; i += STRIPE)
        product(out + i * row, row, 1.0f, (factor){pairs + i * pairs_row, pairs_row, 1}, v, row,
                smaller(STRIPE, length - i), columns, smaller(length, i + STRIPE));
}
