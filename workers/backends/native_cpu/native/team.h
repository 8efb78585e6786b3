// A team of threads that run one function together, with barriers and a shared counter for handing out work.
//
// Waiting is passive: a short spin, then a futex, so that other processes get the cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "headrace_cpu.h"

namespace headrace {

class Team {
public:
    // 0 threads: as many as the affinity mask allows.
    explicit Team(int threads);
    ~Team();
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    int threads() const { return threads_; }

    // Run body(thread) on every thread, the caller's being thread 0; returns when all are done.
    void run(const std::function<void(int)> &body);

    // Inside run: wait for all threads. The work counter starts again at 0.
    void barrier();

    // Inside run: do(i) for every i below count, each by whichever thread is free; then wait for all.
    template <typename Do> void for_each(int64_t count, Do &&work) {
        for (;;) {
            const int64_t index = counter_.fetch_add(1, std::memory_order_relaxed);
            if (index >= count) break;
            work(index);
        }
        barrier();
    }

private:
    void serve(int thread);
    void end();
    void wait_while(std::atomic<uint32_t> &word, uint32_t value);
    void wake(std::atomic<uint32_t> &word);

    int threads_;
    const std::function<void(int)> *body_ = nullptr;
    std::atomic<bool> ends_{false};
    std::vector<std::thread> others_;
    alignas(64) std::atomic<uint32_t> start_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> counter_{0};
    alignas(64) std::atomic<int> sleepers_{0};
};

}  // namespace headrace

struct headrace_team : headrace::Team {
    using headrace::Team::Team;
};
