/* Gated layers of which each row takes few: its router chooses them, and their weights are read once for all rows.

   Included where `step` and the shares of its threads are known. */
#pragma once

#define MOST_CHOSEN 64
#define TOGETHER_ROWS 16 /* that take an expert's weights together */

/* Of one row: what its router has for experts becomes the weights of those that are chosen, and -1 for others; inputs
   are normed and put in the order of weights. Of equals the first is chosen. NaN makes all weights NaN. */
static void choose_experts(const operation *o, float *memory, float *line) {
    int64_t best[MOST_CHOSEN], found = 0;
    float *of = memory + o->router, weights[MOST_CHOSEN], all = 0.0f, chosen = 0.0f;
    for (int64_t e = 0; e < o->experts; e++) {
        int64_t at = found;
        for (; at && of[e] > of[best[at - 1]]; at--)
            if (at < o->chosen) best[at] = best[at - 1];
        if (at < o->chosen) best[at] = e;
        if (found < o->chosen) found++;
    }
    const float most = of[best[0]];
    for (int64_t e = 0; e < o->experts; e++) all += of[e] = expf(of[e] - most);
    for (int64_t i = 0; i < found; i++) chosen += weights[i] = of[best[i]] / all;
    for (int64_t e = 0; e < o->experts; e++) of[e] = -1.0f;
    for (int64_t i = 0; i < found; i++) of[best[i]] = o->renormed ? weights[i] / chosen : weights[i];
    normed(line, memory + o->in, o->norm, o->eps, o->inputs);
    in_order(memory + o->ordered, line, o->inputs, o->of[0].format);
}

INLINE int asks(const operation *o, const float *memory, int64_t expert) { return !(memory[o->router + expert] < 0.0f); }

/* The memory of the next rows that ask an expert, TOGETHER_ROWS at most; `row` is where to look on. */
static int64_t next_rows(const step *s, const operation *o, int64_t expert, int64_t *row, float **found) {
    int64_t count = 0;
    for (; *row < s->rows && count < TOGETHER_ROWS; ++*row) {
        found[count] = s->memory + *row * s->width;
        count += asks(o, found[count], expert);
    }
    return count;
}

/* What an expert makes inside, behind that of the others that its row asks. */
static float *inside(const operation *o, float *memory, int64_t expert) {
    int64_t place = 0;
    for (int64_t e = 0; e < expert; e++) place += asks(o, memory, e);
    return memory + o->of[0].out + place * o->of[0].outputs;
}

typedef struct {
    int64_t first, last;
} span; /* of outputs */

static span span_of(int64_t share, int64_t outputs, int64_t total) {
    int64_t first = share * outputs;
    return (span){first, first + outputs < total ? first + outputs : total};
}

static void multiply(const matrix *of, int64_t expert, span at, int64_t inputs, const float *x, int64_t rows, float *y) {
    matrix own = *of;
    own.at += expert * own.each;
    PRODUCTS[own.format](&own, at.first, at.last, inputs, x, rows, y - at.first, MOST_OUTPUTS, 0);
}

/* Whole groups of numbers inside an expert, times its weight, of all rows that ask it: in the order of weights. */
static void inside_share(const step *s, const operation *o, int64_t expert, span at, float *x) {
    float *of[TOGETHER_ROWS], gates[TOGETHER_ROWS * MOST_OUTPUTS], ups[TOGETHER_ROWS * MOST_OUTPUTS];
    for (int64_t row = 0, count; (count = next_rows(s, o, expert, &row, of));) {
        for (int64_t k = 0; k < count; k++) memcpy(x + k * o->inputs, of[k] + o->ordered, 4 * o->inputs);
        multiply(&o->of[0], expert, at, o->inputs, x, count, gates);
        multiply(&o->of[1], expert, at, o->inputs, x, count, ups);
        for (int64_t k = 0; k < count; k++) {
            float *a = gates + k * MOST_OUTPUTS, *b = ups + k * MOST_OUTPUTS;
            for (int64_t i = 0; i < at.last - at.first; i += LANES)
                store_loose(a + i, gate(load_loose(a + i), o->then) * load_loose(b + i) * of[k][o->router + expert]);
            in_order(inside(o, of[k], expert) + at.first, a, at.last - at.first, o->of[2].format);
        }
    }
}

/* Some outputs of all experts of all rows, one expert after the other: a row's sum has one order. */
static void outputs_share(const step *s, const operation *o, span at, float *x) {
    const int64_t inputs = o->of[0].outputs;
    float *of[TOGETHER_ROWS], sums[TOGETHER_ROWS * MOST_OUTPUTS];
    for (int64_t expert = 0; expert < o->experts; expert++)
        for (int64_t row = 0, count; (count = next_rows(s, o, expert, &row, of));) {
            for (int64_t k = 0; k < count; k++) memcpy(x + k * inputs, inside(o, of[k], expert), 4 * inputs);
            multiply(&o->of[2], expert, at, inputs, x, count, sums);
            for (int64_t k = 0; k < count; k++) {
                float *to = of[k] + o->of[2].out, *sum = sums + k * MOST_OUTPUTS - at.first;
                for (int64_t i = at.first; i < at.last; i++) to[i] += sum[i];
            }
        }
}

static void experts(const step *s, const operation *o, crew *c, int threads, float *x) {
    const int64_t inner = o->of[0].outputs, outer = o->of[2].outputs, asked = s->rows * o->chosen;
    for (int64_t row; (row = next_share(c)) < s->rows;) choose_experts(o, s->memory + row * s->width, x);
    wait_for_all(c, threads);
    int64_t outputs = round_up(outputs_of_share(s, (asked < o->experts ? asked : o->experts) * inner), GROUP);
    const int64_t parts = (inner + outputs - 1) / outputs;
    for (int64_t share; (share = next_share(c)) < o->experts * parts;)
        inside_share(s, o, share / parts, span_of(share % parts, outputs, inner), x);
    wait_for_all(c, threads);
    outputs = outputs_of_share(s, 4 * outer); /* few shares, as each goes through all experts */
    for (int64_t share; (share = next_share(c)) * outputs < outer;)
        outputs_share(s, o, span_of(share, outputs, outer), x);
}
