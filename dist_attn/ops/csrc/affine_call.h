/* What Python hands over of an affine recurrence. Mirrors `Call` of `affine/native.py`, field by field. */
#pragma once
#include "matrices.h"

typedef struct {
    int64_t batch, heads, tokens, size, values, decays; /* of a head: 1, or one for each of its `size` key channels */
    int64_t reads_before, threads;
    int64_t num_chunks, save_every; /* in chunks: the state is kept before every so many */
    const int64_t *chunks;          /* [num_chunks + 1]: where each begins, and the end; NULL: side by side */
    const unsigned char *fresh;     /* [num_chunks]: a document starts here; NULL: nowhere */
    view q, k, v, out, log_decay, a, b, beta;
    const float *bonus;             /* [H, K] */
    const float *s;                 /* the state before: [G, K, V] */
    float *s_after, *kept;          /* [G, saved, state_floats] */
    view grad_out, grad_q, grad_k, grad_v, grad_log_decay, grad_a, grad_b, grad_beta;
    float *grad_bonus;              /* [G, K] */
    const float *grad_s_after;
    float *grad_s;
    float *memory; /* [threads, memory_floats]: to work in */
    int64_t memory_floats;
} call;

/* Rows of an odd number of 64 bytes: columns of a matrix so fall on all of a cache's sets. */
INLINE int64_t row_floats(int64_t n) { return (round_up(n, 16) / 16 | 1) * 16; }
#define PAIR_ROW 80 /* row_floats(CHUNK) */

INLINE int64_t state_floats(const call *c) { return round_up(c->size, LANES) * row_floats(c->values); }

/* Rows are multiplied with the state and with columns before them, columns are written into the state. */
enum { OF_B, OF_Q };
enum { OF_K, OF_A };

INLINE int erases(const call *c) { return c->beta.at || c->b.at; }
/* Whether a row leaves out the decay of its own token. */
INLINE int exclusive(const call *c, int row) { return row == OF_Q ? c->reads_before != 0 : !c->beta.at; }
