/* What all kernels share: where tensors lie, how their rows are read and written, chunks of tokens, and room to work in. */
#pragma once
#include "products.h"
#include <stdlib.h>

#define CHUNK 64  /* tokens that see each other through a product of their own; a multiple of LANES */
#define STRIPE 16 /* rows whose pairs are reckoned with together: a multiple of LANES */
#define BLOCK 8   /* chunks whose features and states the backward pass keeps at once */
#define PARTS 16  /* of a stretch of chunks, with the state before each at hand */
#define LEVELS 4  /* of parts of parts at least: 2^29 tokens side by side */

enum { FLOAT32 = 0, BFLOAT16 = 1 };

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
    void *at; /* NULL: not there */
    int64_t batch, head, token, type;
} view; /* [B, H, L, size], steps in elements; the last dimension is contiguous */

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

INLINE float number_at(view x, int64_t group, int64_t heads, int64_t token) {
    const char *at = row_of(x, group, heads, token);
    return x.type == BFLOAT16 ? read_row(at, BFLOAT16, 0, 1)[0] : *(const float *)at;
}

/* Rows [length, columns] times one number each. */
INLINE void weigh_rows(float *rows, int64_t columns, int64_t length, const float *weight) {
    for (int64_t t = 0; t < length; t++)
        for (int64_t j = 0; j < columns; j += LANES)
            store(rows + t * columns + j, load(rows + t * columns + j) * weight[t]);
}

/* Rows of a chunk as they are, zeros behind the last token and the last column, to whole vectors: [lanes, out_row]. */
static void pack(float *out, int64_t out_row, view x, int64_t heads, int64_t group, int64_t begin, int64_t length,
                 int64_t lanes, int64_t size) {
    const char *row = row_of(x, group, heads, begin);
    int64_t width = x.type == BFLOAT16 ? 2 : 4, step = x.token * width, columns = round_up(size, LANES);
    int whole = x.type == FLOAT32 && size == columns;
    for (int64_t t = 0; t < length; t++, row += step, out += out_row)
        for (int64_t j = 0; j < columns; j += LANES) {
            /* What the next chunk will want is on its way meanwhile. */
            __builtin_prefetch(row + step * CHUNK + width * j);
            store(out + j, whole ? load_loose((const float *)row + j) : read_row(row, x.type, j, size));
        }
    memset(out, 0, 4 * (lanes - length) * out_row);
}

/* [rows, in_row] -> [columns, out_row]; both sizes are multiples of LANES. */
static void transposed(float *out, int64_t out_row, const float *in, int64_t in_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            vec block[LANES];
            for (int k = 0; k < LANES; k++) block[k] = load(in + (i + k) * in_row + j);
            transpose(block);
            for (int k = 0; k < LANES; k++) store(out + (j + k) * out_row + i, block[k]);
        }
}

/* [size, CHUNK] in lanes -> rows of a tensor. */
static void unpack_transposed(view x, int64_t heads, int64_t group, int64_t begin, int64_t length, const float *in,
                              int64_t size) {
    for (int64_t j = 0; j < size; j += LANES)
        for (int64_t t = 0; t < length; t += LANES) {
            vec block[LANES];
            for (int k = 0; k < LANES; k++) block[k] = load(in + (j + k) * CHUNK + t);
            transpose(block);
            for (int k = 0; k < LANES && t + k < length; k++)
                write_row(row_of(x, group, heads, begin + t + k), x.type, j, size, block[k]);
        }
}

/* Room for one thread, cut from one piece of memory; without memory it only counts what is taken. */
typedef struct {
    float *next;
    int64_t floats;
} room;
INLINE float *take(room *r, int64_t floats) {
    float *at = r->next;
    r->floats += round_up(floats, 16);
    if (at) r->next += round_up(floats, 16);
    return at;
}
