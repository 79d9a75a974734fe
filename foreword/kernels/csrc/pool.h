// Threads that take numbered items of work from one counter. They spin for a moment between jobs, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace foreword {

// Memory that grows and is never given back before its owner ends; what it held is lost when it grows.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer();

    // At least so many bytes, aligned to 64.
    char* get(int64_t bytes);

private:
    char* data_ = nullptr;
    int64_t size_ = 0;
};

class Pool {
public:
    // The caller of run() is one of the threads.
    explicit Pool(int num_threads);  // throws std::system_error if the system grants no more
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // body(item, thread) for every item in [0, count), thread in [0, size()). Returns when all items are done; what
    // they wrote is then visible. One caller at a time; body may not call run().
    template <class Body>
    void run(int64_t count, const Body& body) {
        if (count <= 1 || workers_.empty()) {
            for (int64_t item = 0; item < count; item++) body(item, 0);
            return;
        }
        share({[](const void* context, int64_t item, int thread) { (*static_cast<const Body*>(context))(item, thread); }, &body}, count);
    }

    // Memory of one thread, for one item at a time.
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

    // Number of the job in the high half, of the next item in the low half: taking an item tells whose it is.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint64_t> size_of_job_{0};  // number of the job in the high half, its items in the low half
    Job job_{};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::unique_ptr<Buffer[]> scratch_;
};

// Where an operation computes: its threads, and memory that all of them see until it returns.
struct Context {
    Pool& pool;
    Buffer& shared;
};

}  // namespace foreword
