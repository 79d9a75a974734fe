#include "common/thread_pool.h"

#include <chrono>
#include <cstdlib>

#include "common/float_mode.h"

namespace foreword {
namespace {

constexpr int64_t ALIGNMENT = 64;
constexpr uint64_t LOW = 0xffffffff;
constexpr int SPINS = 64;                              // pauses between reads of the clock
constexpr auto WORKER_SPIN = std::chrono::microseconds(80);  // then a worker sleeps
constexpr auto CALLER_SPIN = std::chrono::microseconds(20);  // then the caller yields

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Spin until `ready` or until `limit` has passed.
template <class Ready>
bool spin(const Ready& ready, std::chrono::microseconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    do {
        for (int i = 0; i < SPINS; i++) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

}  // namespace

Buffer::~Buffer() { std::free(data_); }

char* Buffer::get(int64_t bytes) {
    if (bytes > size_) {
        std::free(data_);
        size_ = (bytes + bytes / 2 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        data_ = static_cast<char*>(std::aligned_alloc(ALIGNMENT, size_));
        if (data_ == nullptr) std::abort();  // the kernel kills us before this happens
    }
    return data_;
}

ThreadPool::ThreadPool(int num_threads) : scratch_(new Buffer[num_threads]) {
    try {
        for (int thread = 1; thread < num_threads; thread++) workers_.emplace_back([this, thread] { work(thread); });
    } catch (...) {
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::share(Job job, int64_t count) {
    const uint64_t number = (size_of_job_.load() >> 32) + 1;
    job_ = job;
    done_ = 0;
    size_of_job_ = number << 32 | static_cast<uint64_t>(count);
    ticket_ = number << 32;
    if (sleepers_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    while (take_item(0)) {
    }
    const auto finished = [&] { return done_.load(std::memory_order_acquire) == count; };
    while (!spin(finished, CALLER_SPIN)) std::this_thread::yield();
}

// Run the next item of the current job; false if none is left. An unfinished item keeps its job from being replaced,
// so job_ may be read; the job number reveals a ticket of a finished job.
bool ThreadPool::take_item(int thread) {
    const uint64_t ticket = ticket_.fetch_add(1);
    const uint64_t size = size_of_job_.load();
    if (ticket >> 32 != size >> 32 || (ticket & LOW) >= (size & LOW)) return false;
    job_.call(job_.context, static_cast<int64_t>(ticket & LOW), thread);
    done_.fetch_add(1, std::memory_order_release);
    return true;
}

bool ThreadPool::idle() const {
    const uint64_t ticket = ticket_.load(), size = size_of_job_.load();
    return (ticket & LOW) >= (size & LOW) || ticket >> 32 != size >> 32;
}

void ThreadPool::work(int thread) {
    const FloatMode mode;
    const auto called = [this] { return !idle() || stopping_.load(); };
    while (true) {
        if (!spin(called, WORKER_SPIN)) {
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1);
            wake_.wait(lock, called);
            sleepers_.fetch_sub(1);
        }
        if (stopping_) return;
        while (take_item(thread)) {
        }
    }
}

}  // namespace foreword
