/* Vectors of floats as wide as the machine's, and what they need beside + - *: sine and cosine, exp, transposition.

   Written with the vector extensions that gcc and clang share: one text for AVX-512, AVX2 and NEON. Coefficients are
   weighted minimax fits, made for these kernels; relative errors are below 2e-7. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define LOG_LANES 4
#define PANEL 4 /* vectors beside each other in a tile of a product: 6 x 4 sums stay in registers */
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define LOG_LANES 3
#define PANEL 2
#elif defined(__aarch64__)
#define LANES 4
#define LOG_LANES 2
#define PANEL 4
#else
#error "these kernels need AVX2 with FMA, AVX-512 or NEON"
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* anywhere in memory */
typedef int32_t ints __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t few __attribute__((vector_size(2 * LANES))); /* bfloat16, as bits */

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }
INLINE vec load_loose(const float *p) { return *(const loose *)p; }
INLINE void store_loose(float *p, vec x) { *(loose *)p = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec choose(ints mask, vec a, vec b) { return (vec)((mask & (ints)a) | (~mask & (ints)b)); }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec magnitude(vec x) { return (vec)((ints)x & 0x7fffffff); }

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif
#if LANES == 16
#define FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define SWAPPED 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#elif LANES == 8
#define FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#define SWAPPED 4, 5, 6, 7, 0, 1, 2, 3
#else
#define FIRST_HALVES 0, 4, 1, 5
#define SECOND_HALVES 2, 6, 3, 7
#define SWAPPED 2, 3, 0, 1
#endif

INLINE float total(vec x) {
    x += SHUFFLE(x, x, SWAPPED);
    float sum = 0.0f;
    for (int i = 0; i < LANES / 2; i++) sum += x[i];
    return sum;
}

/* In place: element j of rows[i] becomes element i of rows[j]. Each round interleaves the two halves of the rows. */
INLINE void transpose(vec rows[LANES]) {
    for (int round = 0; round < LOG_LANES; round++) {
        vec next[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = SHUFFLE(rows[i], rows[i + LANES / 2], FIRST_HALVES);
            next[2 * i + 1] = SHUFFLE(rows[i], rows[i + LANES / 2], SECOND_HALVES);
        }
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}

INLINE int any(ints mask) {
    int64_t parts[LANES / 2];
    memcpy(parts, &mask, sizeof parts);
    int64_t found = 0;
    for (int i = 0; i < LANES / 2; i++) found |= parts[i];
    return found != 0;
}

/* Both of one angle: reduced by multiples of pi/2 in three parts, so that 1e5 radians are still right to the last digit
   or two; angles from there on, infinities and NaN are left to the C library. */
static __attribute__((noinline)) void sine_cosine_anywhere(vec x, vec *sine, vec *cosine) {
    float in[LANES] __attribute__((aligned(64))), s[LANES] __attribute__((aligned(64))),
        c[LANES] __attribute__((aligned(64)));
    store(in, x);
    for (int i = 0; i < LANES; i++) s[i] = sinf(in[i]), c[i] = cosf(in[i]);
    *sine = load(s), *cosine = load(c);
}

INLINE void sine_cosine(vec x, vec *sine, vec *cosine) {
    if (__builtin_expect(any(~(magnitude(x) < 1e5f)), 0)) {
        sine_cosine_anywhere(x, sine, cosine);
        return;
    }
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    vec shifted = x * 0.636619772f + magic;
    ints quadrant = (ints)shifted;
    vec n = shifted - magic;
    vec r = x - n * 0x1.921fb6p+0f;
    r = r + n * 0x1.777a5cp-25f;
    r = r + n * 0x1.ee59dap-50f;
    vec r2 = r * r;
    vec s = ((r2 * -0.000195173f + 0.00833217810f) * r2 + -0.166666549f) * (r2 * r) + r;
    vec c = ((r2 * 2.44384513e-5f + -0.00138873675f) * r2 + 0.0416666469f) * (r2 * r2) + (r2 * -0.5f + 1.0f);
    ints odd = -(quadrant & 1);
    vec of_sine = choose(odd, c, s), of_cosine = choose(odd, s, c);
    *sine = (vec)((ints)of_sine ^ ((quadrant & 2) << 30));
    *cosine = (vec)((ints)of_cosine ^ (((quadrant + 1) & 2) << 30));
}

/* exp; exactly 0 below -87.3, infinity above 88.4. NaN stays NaN. */
INLINE vec exponential(vec x) {
    vec bounded = choose(x < -87.3f, all(-87.3f), choose(x > 89.0f, all(89.0f), x));
    const float magic = 12582912.0f;
    vec shifted = bounded * 1.44269504f + magic;
    vec n = shifted - magic;
    vec r = bounded - n * 0x1.62e43p-1f;
    r = r + n * 0x1.05c61p-29f;
    vec p = ((((r * 0.00139504790f + 0.00836888230f) * r + 0.0416662060f) * r + 0.166665189f) * r + 0.500000010f) * (r * r) + (r + 1.0f);
    ints power = ((ints)shifted << 23) + (127 << 23);
    return choose(x < -87.3f, all(0.0f), p * (vec)power);
}

/* Numbers below 1e-38, which decaying states are full of, count as 0 while a thread works here: they are slow. */
INLINE uint64_t flush_denormals(void) {
#if defined(__x86_64__)
    uint32_t before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | (1 << 24)));
    return before;
#else
    return 0;
#endif
}

INLINE void restore_denormals(uint64_t before) {
#if defined(__x86_64__)
    _mm_setcsr((uint32_t)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}
