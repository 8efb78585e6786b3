// A team of threads that run one function together, in phases of shared work.
//
// A phase is over when its work is done, not when every thread has come by: one that the system has put aside holds
// up only what it has begun. Waiting is passive: a short spin, then a futex, so that other processes get the cores.
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

    // Run body(thread) on the caller, as thread 0, and on those others that wake in time to help; returns when all
    // of these are done. Every thread must come by the same phases in the same order.
    void run(const std::function<void(int)> &body);

    // Inside run, a phase: work(i) for every i below count, each by whichever thread is free; returns when all are
    // done. A thread that comes late finds nothing left. What it has read of earlier phases' results may then be
    // in change already, which does no harm as it is given no work to use it for.
    template <typename Do> void for_each(int64_t count, Do &&work) {
        if (count <= 0) return;
        const uint32_t phase = own_phase_++;
        for (;;) {
            const int64_t index = claim(phase, count);
            if (index < 0) return;
            work(index);
            if (done_.fetch_add(1) + 1 == count) {
                next_phase(phase);
                return;
            }
        }
    }

private:
    void serve(int thread);
    void end();
    // The next piece of work, or -1 once the phase is over: waits for that when all is given out.
    int64_t claim(uint32_t phase, int64_t count);
    void next_phase(uint32_t phase);
    void wait_while(std::atomic<uint32_t> &word, uint32_t value);
    void wake(std::atomic<uint32_t> &word);

    static thread_local uint32_t own_phase_;

    int threads_;
    const std::function<void(int)> *body_ = nullptr;
    uint32_t first_phase_ = 0;  // of this run
    std::atomic<bool> ends_{false};
    std::vector<std::thread> others_;
    alignas(64) std::atomic<uint32_t> runs_{0};
    alignas(64) std::atomic<uint64_t> gate_{0};   // run << 32 | open << 31 | threads that have joined it
    alignas(64) std::atomic<uint32_t> left_{0};   // threads that joined the run and are done with it
    alignas(64) std::atomic<uint64_t> claim_{0};  // phase << 32 | pieces given out
    alignas(64) std::atomic<int64_t> done_{0};    // pieces of the phase
    alignas(64) std::atomic<int> sleepers_{0};
};

}  // namespace headrace

struct headrace_team : headrace::Team {
    using headrace::Team::Team;
};
