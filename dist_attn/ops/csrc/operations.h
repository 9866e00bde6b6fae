/* Operations of a model's layers, and what becomes of a head's queries and keys: for decode steps and for prompts.

   What Python hands over; mirrors `_Matrix`, `_Operation` and `HEAD` of `decode_step.py`, field by field. */
#pragma once
#include "vector.h"

#define MOST_SIZE 512 /* numbers of a head */
#define GROUP 32 /* weights that are widened together, as most blocks of GGUF files have them; those of _K have eight */
enum { FLOAT32, BFLOAT16, INT8, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K }; /* as `FORMATS` in decode_step.py */

typedef struct {
    const uint8_t *at;     /* [outputs, inputs] */
    const uint16_t *scale; /* of rows of INT8, bfloat16 */
    const float *bias;     /* or NULL */
    int64_t outputs, format, out; /* where outputs go: a column of the working memory */
    int64_t each; /* bytes from one expert's matrix to the next one's */
} matrix;

enum { STORE, ADD, SILU, GELU_TANH }; /* what becomes of outputs: the last two activate, and gate a second matrix's */

enum { MULTIPLIES, ATTENDS, CONVOLVES, RECURS, CHOOSES, ATTENDS_BY_FEATURES }; /* fields of the other kinds are 0 */

/* Columns of a head's numbers; `write`: of beta in the delta rule, -1 without one. */
typedef struct {
    int64_t query, key, value, gate, step, write;
} head_columns;

typedef struct {
    int64_t kind;
    int64_t in, inputs, matrices, then; /* a product: of columns from `in` on */
    const float *norm, *key_norm;       /* root mean square norms: of inputs, or of queries and keys; or NULL */
    const float *norm_bias;             /* of inputs, whose mean is then taken off first; or NULL */
    double eps;
    int64_t normed_together; /* inputs of a product */
    matrix of[3];
    int64_t query, key, value, out, heads, groups, size, values, rotated, state;
    int64_t query_step; /* attention: from head to head */
    int64_t gate;       /* attention: columns from a query to its gate; product: the one whose sigmoid inputs take; by
                           features: that of the first head's gate; or 0 */
    int64_t guarded;    /* by features: columns that say whose denominator was replaced, of the first head */
    int64_t experts, chosen, renormed, router, ordered; /* the last two are columns, as in `Experts` of Python */
    double scale;
    const int64_t *columns;     /* of the channels of a convolution */
    const head_columns *places; /* of a recurrence */
    const float *weights, *bias; /* a convolution: [size, inputs], the oldest token first unless `newest_first`; or
                                    [inputs] or NULL; random vectors of features: [heads, inputs, size] */
    int64_t newest_first;
    const float *sigma; /* by features: [heads, size] */
    const float *log_rates, *step_bias, *skip, *out_norm; /* a recurrence: [heads] but out_norm, [values]; or NULL */
    double out_eps, least, most;
} operation;

/* What a row had before a step. Attention: keys and values [groups, tokens, size], the last token yet to be written.
   Others: what it has before and after, which may be one place. */
typedef struct {
    uint8_t *keys, *values;
    int64_t key_group, value_group, tokens; /* numbers from group to group; none: a row without a sequence */
} cache;

INLINE float from_bfloat16(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
}

INLINE uint16_t to_bfloat16(float x) { /* nearest, ties to even; NaN stays NaN */
    uint32_t word;
    memcpy(&word, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

/* x / sqrt(mean(x^2) + eps) weight */
static void normed(float *out, const float *x, const float *weight, double eps, int64_t count) {
    double squares = 0.0;
    float lanes[16] = {0};
    for (int64_t at = 0; at < count; at += 16)
        for (int i = 0; i < 16; i++) lanes[i] += x[at + i] * x[at + i];
    for (int i = 0; i < 16; i++) squares += lanes[i];
    float by = (float)(1.0 / sqrt(squares / (double)count + eps));
    for (int64_t i = 0; i < count; i++) out[i] = x[i] * by * weight[i];
}

/* The norm of an operation's inputs, `count` from number `first` on: with a bias it is that of x less its mean. */
static void normed_inputs(float *out, const float *x, const operation *o, int64_t first, int64_t count) {
    if (o->norm_bias) {
        double sum = 0.0;
        float lanes[16] = {0};
        for (int64_t at = 0; at < count; at += 16)
            for (int i = 0; i < 16; i++) lanes[i] += x[at + i];
        for (int i = 0; i < 16; i++) sum += lanes[i];
        float mean = (float)(sum / (double)count);
        for (int64_t i = 0; i < count; i++) out[i] = x[i] - mean;
        x = out;
    }
    normed(out, x, o->norm + first, o->eps, count);
    for (int64_t i = 0; o->norm_bias && i < count; i++) out[i] += o->norm_bias[first + i];
}

/* A query or key as attention takes it: normed, and its first `rotated` numbers turned by the angles of its position. */
static void placed(float *out, const float *x, const float *norm, const operation *o, const float *cosine,
                   const float *sine) {
    float plain[MOST_SIZE];
    memcpy(plain, x, 4 * o->size);
    if (norm) normed(plain, plain, norm, o->eps, o->size);
    memcpy(out, plain, 4 * o->size);
    int64_t half = o->rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        out[i] = plain[i] * cosine[i] - plain[i + half] * sine[i];
        out[i + half] = plain[i + half] * cosine[i + half] + plain[i] * sine[i + half];
    }
}

static void keep(uint8_t *out, const float *x, int64_t count, int64_t half) {
    if (!half) memcpy(out, x, 4 * count);
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t *)out)[i] = to_bfloat16(x[i]);
}

