/* Products of small matrices that lie in cache: out = keep * out + a b, tile by tile with the sums in registers.

   b and out have rows of whole vectors, aligned; a may lie in any order (`row` and `column` are the steps between its
   elements), so a transposed left factor costs nothing. */
#pragma once
#include "vector.h"

typedef struct {
    const float *at;
    int64_t row, column;
} factor;

/* `height` and `width` are constants wherever this is called, so that the sums become registers. */
INLINE void tile(const int height, const int width, float *out, int64_t out_row, float keep, factor a, const float *b,
                 int64_t b_row, int64_t depth) {
    vec sums[8][PANEL];
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++) sums[i][j] = (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec line[PANEL];
        for (int j = 0; j < width; j++) line[j] = load(b + k * b_row + j * LANES);
        for (int i = 0; i < height; i++) {
            vec one = all(a.at[i * a.row + k * a.column]);
            for (int j = 0; j < width; j++) sums[i][j] += one * line[j];
        }
    }
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++) {
            float *to = out + i * out_row + j * LANES;
            if (keep != 0.0f) sums[i][j] += keep * load(to);
            store(to, sums[i][j]);
        }
}

#define TILES(height, width)                                                                          \
    for (; i + (height) <= rows; i += (height))                                                       \
        tile(height, width, out + i * out_row + j, out_row, keep,                                     \
             (factor){a.at + i * a.row, a.row, a.column}, b + j, b_row, depth)
/* High tiles load b seldom; what is left of the rows is taken by lower ones. */
#define ALL_ROWS(TILES, high, width) \
    do {                             \
        TILES(high, width);          \
        TILES(4, width);             \
        TILES(2, width);             \
        TILES(1, width);             \
    } while (0)
#if PANEL == 4
#define ALL_WIDTHS(TILES)      \
    if (width == 1)            \
        ALL_ROWS(TILES, 8, 1); \
    else if (width == 2)       \
        ALL_ROWS(TILES, 8, 2); \
    else if (width == 3)       \
        ALL_ROWS(TILES, 6, 3); \
    else                       \
        ALL_ROWS(TILES, 6, 4)
#else
#define ALL_WIDTHS(TILES)      \
    if (width == 1)            \
        ALL_ROWS(TILES, 8, 1); \
    else                       \
        ALL_ROWS(TILES, 6, 2)
#endif
/* Rows i and columns j of a product, panel by panel. */
#define BY_TILES(TILES)                                           \
    for (int64_t j = 0, width; j < columns; j += width * LANES) { \
        width = (columns - j) / LANES;                            \
        if (width > PANEL) width = PANEL;                         \
        int64_t i = 0;                                            \
        ALL_WIDTHS(TILES);                                        \
    }

/* [rows, columns] of depth sums; columns is a multiple of LANES. keep 0 never reads what is in `out`. */
static __attribute__((noinline)) void product(float *out, int64_t out_row, float keep, factor a, const float *b,
                                              int64_t b_row, int64_t rows, int64_t columns, int64_t depth) {
    BY_TILES(TILES)
}
