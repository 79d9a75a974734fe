// Threads that take numbered work items from one counter. Between jobs they spin briefly, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace foreword {

// Growing memory, freed with its owner; growing discards its contents.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer();

    // At least `bytes` bytes, aligned to 64.
    char* get(int64_t bytes);

private:
    char* data_ = nullptr;
    int64_t size_ = 0;
};

class ThreadPool {
public:
    // The caller of run() is one of the threads.
    explicit ThreadPool(int num_threads);  // throws std::system_error if the system grants no more
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Call body(item, thread) for every item in [0, count), thread in [0, size()). Returns when all items are done
    // and their writes are visible. One caller at a time; body must not call run().
    template <class Body>
    void run(int64_t count, const Body& body) {
        if (count <= 1 || workers_.empty()) {
            for (int64_t item = 0; item < count; item++) body(item, 0);
            return;
        }
        share({[](const void* context, int64_t item, int thread) { (*static_cast<const Body*>(context))(item, thread); }, &body}, count);
    }

    // Scratch memory of a thread, for one item.
    char* scratch(int thread, int64_t bytes) { return scratch_[thread].get(bytes); }

private:
    struct Job {
        void (*call)(const void* context, int64_t item, int thread);
        const void* context;
    };

    void stop();
    void share(Job job, int64_t count);
    bool take_item(int thread);
    void work(int thread);
    bool idle() const;

    // Job number in the high half, next item in the low half: a ticket identifies its job.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint64_t> size_of_job_{0};  // job number in the high half, its items in the low half
    Job job_{};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::unique_ptr<Buffer[]> scratch_;
};

// The threads of an operation, and memory that they share until it returns.
struct Context {
    ThreadPool& pool;
    Buffer& shared;
};

}  // namespace foreword
