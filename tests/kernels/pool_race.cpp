// The thread pool under ThreadSanitizer: many short jobs, with pauses long enough for workers to sleep.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "common/thread_pool.h"

int main() {
    constexpr int THREADS = 4, JOBS = 20000;
    foreword::ThreadPool pool(THREADS);
    std::vector<int64_t> sums(THREADS), values(257);
    for (int job = 0; job < JOBS; job++) {
        const int64_t count = 1 + job % 257;
        pool.run(count, [&](int64_t item, int thread) {
            values[item] = job + item;
            sums[thread] += item;
            *reinterpret_cast<int64_t*>(pool.scratch(thread, 8 * (1 + item))) = item;
        });
        for (int64_t item = 0; item < count; item++)
            if (values[item] != job + item) return std::printf("item %ld of job %d was not done\n", static_cast<long>(item), job), 1;
        if (job % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    int64_t total = 0, expected = 0;
    for (int64_t sum : sums) total += sum;
    for (int job = 0; job < JOBS; job++) expected += static_cast<int64_t>(job % 257) * (1 + job % 257) / 2;
    if (total != expected) return std::printf("sums differ\n"), 1;
    return std::printf("%d jobs\n", JOBS), 0;
}
