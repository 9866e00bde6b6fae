/* Products of a decode step, y = x w^T: few rows of inputs, each with the weights that it was sent to.

   Reading weights is what takes the time. One or two rows of inputs take rows of weights one after the other, from
   beginning to end, as processors fetch ahead best; more of them take some rows of weights together and ask for the next.

   An output is one sum of eight lanes in one order: it depends neither on what other rows of inputs there are, nor on the
   number of threads, nor on where numbers begin in memory. Eight lanes are also taken where vectors have sixteen: memory
   was read 1.2 times as fast by halves on an EPYC with AVX-512. */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 8
typedef float vec __attribute__((vector_size(32), aligned(4), may_alias)); /* anywhere in memory */
typedef int32_t places __attribute__((vector_size(32)));
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

typedef struct {
    const float *w; /* [outputs, inputs] */
    int64_t inputs, outputs;
} matrix;

INLINE vec load(const float *p) { return *(const vec *)p; }

/* a b + sum, rounded once: said in so many words, as compilers fuse some of such sums and leave others. */
INLINE vec fused(vec a, vec b, vec sum) {
#if defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    float32x4_t x[2], y[2], z[2];
    memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y), memcpy(z, &sum, sizeof z);
    for (int half = 0; half < 2; half++) z[half] = vfmaq_f32(z[half], x[half], y[half]);
    memcpy(&sum, z, sizeof z);
    return sum;
#else
#error "these kernels need AVX2 with FMA, AVX-512 or NEON"
#endif
}

INLINE vec first_of(const float *p, int64_t there) {
    vec x = {0};
    memcpy(&x, p, 4 * there);
    return x;
}

/* Totals of eight vectors: halves added to halves, of all of them at once. */
INLINE vec totals(vec *sums) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            sums[i] = SHUFFLE(sums[i], sums[i + half], 0, 8, 1, 9, 2, 10, 3, 11) +
                      SHUFFLE(sums[i], sums[i + half], 4, 12, 5, 13, 6, 14, 7, 15);
    return sums[0];
}

/* `height` rows of weights together, `rounds` times one after the other from `first` on, with `width` rows of inputs.
   These three are constants wherever this is called, and their product is a multiple of LANES. Behind the last row of
   weights that one is read again. */
INLINE void tile(const int height, const int width, const int rounds, matrix m, int64_t first, const float *const *x,
                 float *const *y) {
    vec sums[24];
    for (int round = 0; round < rounds; round++) {
        vec *sum = sums + round * height * width;
        const float *w[4];
        for (int i = 0; i < height; i++) {
            int64_t row = first + round * height + i;
            w[i] = m.w + (row < m.outputs ? row : m.outputs - 1) * m.inputs;
        }
        for (int k = 0; k < height * width; k++) sum[k] = (vec){0};
        int64_t at = 0;
        for (; at + LANES <= m.inputs; at += LANES)
            for (int i = 0; i < height; i++) {
                if (height > 1) __builtin_prefetch(w[i] + height * m.inputs + at);
                vec one = load(w[i] + at);
                for (int j = 0; j < width; j++) sum[i * width + j] = fused(one, load(x[j] + at), sum[i * width + j]);
            }
        if (at < m.inputs)
            for (int i = 0; i < height; i++)
                for (int j = 0; j < width; j++)
                    sum[i * width + j] = fused(first_of(w[i] + at, m.inputs - at), first_of(x[j] + at, m.inputs - at),
                                               sum[i * width + j]);
    }
    for (int k = 0; k < height * width * rounds; k += LANES) {
        vec some = totals(sums + k);
        for (int i = 0; i < LANES; i++) {
            int64_t row = first + (k + i) / width;
            if (row < m.outputs) y[(k + i) % width][row] = some[i];
        }
    }
}

#define BLOCK 24 /* rows of weights that all rows of inputs take before the next ones: whole tiles of each kind */
#define TILES(height, width, rounds)                                                      \
    for (; n - j >= (width); j += (width))                                                \
        for (int64_t i = 0; i < BLOCK && first + i < m.outputs; i += (height) * (rounds)) \
            tile(height, width, rounds, m, first + i, x + j, y + j)

/* A block of outputs of `n` rows of inputs. */
static void block(matrix m, int64_t first, int64_t n, const float *const *x, float *const *y) {
    int64_t j = 0;
#if defined(__AVX512VL__) /* which has 32 registers of eight lanes */
    TILES(3, 8, 1);
    TILES(4, 4, 1);
#else
    TILES(2, 4, 1);
#endif
    TILES(1, 2, 4);
    TILES(1, 1, 8);
}

/* Row r of y, [rows, outputs], from row r / share of x and the weights number `chosen[r]` of [.., outputs, inputs]; NULL:
   there is one matrix. `x_of` and `y_of` are room for `rows` pointers each. */
void dist_attn_step_products(const float *x, const float *w, float *y, const int64_t *chosen, const float **x_of,
                             float **y_of, int64_t rows, int64_t share, int64_t outputs, int64_t inputs, int64_t threads) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t number = chosen ? chosen[r] : 0, n = 0, before = 0;
        while (before < r && chosen && chosen[before] != number) before++;
        if (before < r) continue; /* it went along with that row */
        for (int64_t q = r; q < rows; q++) {
            if (chosen && chosen[q] != number) continue;
            x_of[n] = x + q / share * inputs;
            y_of[n++] = y + q * outputs;
        }
        matrix m = {w + number * outputs * inputs, inputs, outputs};
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
        for (int64_t first = 0; first < outputs; first += BLOCK) block(m, first, n, x_of, y_of);
    }
}
