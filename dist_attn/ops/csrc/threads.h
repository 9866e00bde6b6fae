/* A call's heads shared out over threads, each with memory of its own to work in.

   Included where `call` is known, of one operation or another. */
#pragma once
#include <stdint.h>
#include <omp.h>

static void share_out(const call *c, void work(const call *, int64_t, float *)) {
#pragma omp parallel num_threads(c->threads)
    {
        uint64_t before = flush_denormals();
#pragma omp for schedule(dynamic, 1)
        for (int64_t group = 0; group < c->batch * c->heads; group++)
            work(c, group, c->memory + omp_get_thread_num() * c->memory_floats);
        restore_denormals(before);
    }
}
