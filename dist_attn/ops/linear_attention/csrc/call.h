/* What Python hands over: where tensors lie, and what is to be done with them. Mirrors `native_call.py`, field by field. */
#pragma once
#include "products.h"
#include <stdlib.h>

#define CHUNK 64 /* tokens that see each other through a product of their own; a multiple of LANES */
#define BLOCK 8  /* chunks whose features and states the backward pass keeps at once */
#define PARTS 16 /* of a stretch of chunks, with the state before each at hand */
#define LEVELS 4 /* of parts of parts at least: 2^29 tokens side by side */

enum { FLOAT32 = 0, BFLOAT16 = 1 };
enum { AS_GIVEN = 0, GAUSSIAN = 1, ARC_COSINE = 2, ELU = 3 };
enum { FLOOR = 0, EXACT = 1, CLAMP = 2, SIGN_CLAMP = 3, MASS = 4, ONE = 5 };

typedef struct {
    void *at; /* NULL: not there */
    int64_t batch, head, token, type;
} view; /* [B, H, L, size], steps in elements; the last dimension is contiguous */

typedef struct {
    int64_t batch, heads, tokens, size, values, projections, features;
    int64_t kind, unit_norm, policy, undivided, threads;
    int64_t num_chunks, save_every; /* in chunks: the state is kept before every so many */
    double eps;
    const int64_t *chunks;       /* [num_chunks + 1]: where each begins, and the end; NULL: side by side */
    const unsigned char *fresh;  /* [num_chunks]: a document starts here; NULL: nowhere */
    const float *w;              /* [H, D, K] */
    view q, k, v, out, log_gate, key_scale;
    const float *s, *zm;         /* the state before: [G, M, V], [G, M + 1] with the mass last */
    float *s_after, *zm_after;
    float *den, *mass;           /* [G, L], where they are asked for */
    float *kept;                 /* [G, saved, state_floats] */
    view grad_out, grad_q, grad_k, grad_v;
    float *grad_w;               /* [G, D, K] */
    float *grad_log_gate, *grad_key_scale; /* [G, L] */
    const float *grad_s_after, *grad_zm_after;
    float *grad_s, *grad_zm;
    view sums, grad_sums;        /* of a read: [B, H, L, V + 2] to be added */
    float *memory;               /* [threads, memory_floats]: to work in */
    int64_t memory_floats;
} call;

typedef struct {
    int64_t values, features; /* columns of S, rounded up; rows */
    float *s, *z, *mass;
} state;

/* Of S and z; a state has 16 more, the first of which is the mass. */
INLINE int64_t sum_floats(const call *c) {
    return c->features * round_up(c->values, LANES) + round_up(c->features, LANES);
}
INLINE int64_t state_floats(const call *c) { return round_up(sum_floats(c), 16) + 16; }
INLINE state state_at(const call *c, float *at) {
    int64_t values = round_up(c->values, LANES);
    return (state){values, c->features, at, at + c->features * values, at + state_floats(c) - 16};
}

INLINE char *row_of(view x, int64_t group, int64_t heads, int64_t token) {
    int64_t step = x.batch * (group / heads) + x.head * (group % heads) + x.token * token;
    return (char *)x.at + step * (x.type == BFLOAT16 ? 2 : 4);
}

INLINE vec widened(few x) { return (vec)(__builtin_convertvector(x, ints) << 16); }

/* LANES elements from `first` on of a row with `size` of them, zeros behind its end. */
INLINE vec read_row(const char *row, int64_t type, int64_t first, int64_t size) {
    int64_t there = size - first;
    if (type == BFLOAT16) {
        few half = {0};
        if (there >= LANES) memcpy(&half, row + 2 * first, sizeof half);
        else memcpy(&half, row + 2 * first, 2 * there);
        return widened(half);
    }
    if (there >= LANES) return load_loose((const float *)row + first);
    float some[LANES] __attribute__((aligned(64))) = {0};
    memcpy(some, row + 4 * first, 4 * there);
    return load(some);
}

/* To the nearest, of two to the even one; NaN stays NaN. */
INLINE few narrowed(vec x) {
    ints bits = (ints)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    ints nan = (bits & 0x7fffffff) > 0x7f800000;
    return __builtin_convertvector(((nan & 0x7fc00000) | (~nan & rounded)) >> 16, few);
}

INLINE void write_row(char *row, int64_t type, int64_t first, int64_t size, vec x) {
    int64_t there = size - first < LANES ? size - first : LANES;
    if (type == BFLOAT16) {
        few half = narrowed(x);
        if (there == LANES) memcpy(row + 2 * first, &half, sizeof half);
        else memcpy(row + 2 * first, &half, 2 * there);
    } else if (there == LANES) {
        store_loose((float *)row + first, x);
    } else {
        memcpy(row + 4 * first, &x, 4 * there);
    }
}

/* Rows of a chunk as they are, zeros behind the last token and the last column: [lanes, columns]. */
static void pack(float *out, int64_t columns, view x, const call *c, int64_t group, int64_t begin, int64_t length,
                 int64_t lanes, int64_t size) {
    const char *row = row_of(x, group, c->heads, begin);
    int64_t width = x.type == BFLOAT16 ? 2 : 4, step = x.token * width;
    int whole = x.type == FLOAT32 && size == columns;
    for (int64_t t = 0; t < length; t++, row += step, out += columns)
        for (int64_t j = 0; j < columns; j += LANES) {
            /* What the next chunk will want is on its way meanwhile. */
            __builtin_prefetch(row + step * CHUNK + width * j);
            store(out + j, whole ? load_loose((const float *)row + j) : read_row(row, x.type, j, size));
        }
    memset(out, 0, 4 * (lanes - length) * columns);
}

/* [rows, in_row] -> [columns, CHUNK]; both sizes are multiples of LANES. */
static void transposed(float *out, const float *in, int64_t in_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            vec block[LANES];
            for (int k = 0; k < LANES; k++) block[k] = load(in + (i + k) * in_row + j);
            transpose(block);
            for (int k = 0; k < LANES; k++) store(out + (j + k) * CHUNK + i, block[k]);
        }
}

/* [size, CHUNK] in lanes -> rows of a tensor. */
static void unpack_transposed(view x, const call *c, int64_t group, int64_t begin, int64_t length, const float *in,
                              int64_t size) {
    for (int64_t j = 0; j < size; j += LANES)
        for (int64_t t = 0; t < length; t += LANES) {
            vec block[LANES];
            for (int k = 0; k < LANES; k++) block[k] = load(in + (j + k) * CHUNK + t);
            transpose(block);
            for (int k = 0; k < LANES && t + k < length; k++)
                write_row(row_of(x, group, c->heads, begin + t + k), x.type, j, size, block[k]);
        }
}
