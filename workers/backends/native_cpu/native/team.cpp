#include "team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <system_error>

namespace headrace {

namespace {

// About 10 microseconds: longer than threads of a phase usually differ, shorter than a time slice.
constexpr int kSpins = 250;

int allowed_cpus() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set)) return 1;
    return CPU_COUNT(&set);
}

}  // namespace

Team::Team(int threads) : threads_(threads > 0 ? threads : allowed_cpus()) {
    try {
        for (int thread = 1; thread < threads_; thread++) others_.emplace_back([this, thread] { serve(thread); });
    } catch (const std::system_error &) {
        end();
        throw;
    }
}

Team::~Team() { end(); }

void Team::end() {
    ends_.store(true);
    start_.fetch_add(1);
    wake(start_);
    for (auto &thread : others_) thread.join();
}

void Team::run(const std::function<void(int)> &body) {
    body_ = &body;
    counter_.store(0, std::memory_order_relaxed);
    if (threads_ > 1) {
        start_.fetch_add(1);
        wake(start_);
    }
    body(0);
    barrier();
}

void Team::serve(int thread) {
    uint32_t seen = 0;
    for (;;) {
        wait_while(start_, seen);
        seen++;
        if (ends_.load()) return;
        (*body_)(thread);
        barrier();
    }
}

void Team::barrier() {
    if (threads_ == 1) {
        counter_.store(0, std::memory_order_relaxed);
        return;
    }
    const uint32_t generation = generation_.load();
    if (arrived_.fetch_add(1) + 1 == threads_) {
        arrived_.store(0);
        counter_.store(0);
        generation_.fetch_add(1);
        wake(generation_);
        return;
    }
    wait_while(generation_, generation);
}

void Team::wait_while(std::atomic<uint32_t> &word, uint32_t value) {
    for (int spin = 0; spin < kSpins; spin++) {
        if (word.load() != value) return;
        __builtin_ia32_pause();
    }
    sleepers_.fetch_add(1);
    while (word.load() == value)
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
}

// Whoever counts itself a sleeper looks at the word afterwards, so a waker that sees none has been seen itself.
void Team::wake(std::atomic<uint32_t> &word) {
    if (sleepers_.load())
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace headrace
