/* Products of bfloat16 instructions, where the processor has them: pairs of numbers that are summed over lie side by
   side in one word, and a lane of the sum takes two products at once, in float32. Twice as fast as float32.

   Only what enters a product is rounded: states, sums and random projections stay float32. */
#pragma once
#include "tensors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#define HALF_PRODUCTS 1

typedef struct {
    const uint32_t *at;
    int64_t row, column; /* steps between words: of rows, and of pairs that are summed over */
} words;

/* Two rows, whose elements are summed over in turn, as words. */
INLINE void pair_up(uint32_t *out, vec first, vec second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_store_si512(out, _mm512_permutexvar_epi16(order, both));
}

/* [rows, columns] -> words [rows / 2 rounded up, columns] in rows of `row`: rows in pairs, an odd one beside zeros. */
static void pair_rows(uint32_t *out, int64_t row, const float *in, int64_t in_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += 2, in += 2 * in_row, out += row)
        for (int64_t j = 0; j < columns; j += LANES)
            pair_up(out + j, load(in + j), i + 1 < rows ? load(in + in_row + j) : (vec){0});
}

/* [rows, columns] -> words [rows, columns / 2] in rows of `row`: neighbours in pairs, an odd vector beside zeros. */
static void pair_neighbours(uint32_t *out, int64_t row, const float *in, int64_t in_row, int64_t rows,
                            int64_t columns) {
    for (int64_t i = 0; i < rows; i++, in += in_row, out += row)
        for (int64_t j = 0; j < columns; j += 2 * LANES) {
            vec second = j + LANES < columns ? load(in + j + LANES) : (vec){0};
            _mm512_store_si512(out + j / 2, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)load(in + j)));
        }
}

INLINE void half_tile(const int height, const int width, float *out, int64_t out_row, float keep, words a,
                      const uint32_t *b, int64_t b_row, int64_t depth) {
    __m512 sums[8][PANEL];
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++) sums[i][j] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k++) {
        __m512bh line[PANEL];
        for (int j = 0; j < width; j++) line[j] = (__m512bh)_mm512_load_si512(b + k * b_row + j * LANES);
        for (int i = 0; i < height; i++) {
            __m512bh one = (__m512bh)_mm512_set1_epi32((int)a.at[i * a.row + k * a.column]);
            for (int j = 0; j < width; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], one, line[j]);
        }
    }
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++) {
            float *to = out + i * out_row + j * LANES;
            vec sum = (vec)sums[i][j];
            if (keep != 0.0f) sum += keep * load(to);
            store(to, sum);
        }
}

#define HALF_TILES(height, width)                                                                            \
    for (; i + (height) <= rows; i += (height))                                                              \
        half_tile(height, width, out + i * out_row + j, out_row, keep,                                       \
                  (words){a.at + i * a.row, a.row, a.column}, b + j, b_row, depth)
/* As `product`, of depth pairs. */
static __attribute__((noinline)) void half_product(float *out, int64_t out_row, float keep, words a, const uint32_t *b,
                                                   int64_t b_row, int64_t rows, int64_t columns, int64_t depth) {
    BY_TILES(HALF_TILES)
}
#else
#define HALF_PRODUCTS 0
#endif
