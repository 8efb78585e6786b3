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
constexpr uint64_t kOpen = 1u << 31;

int allowed_cpus() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set)) return 1;
    return CPU_COUNT(&set);
}

// The half of a 64-bit word that a futex can wait for; x86-64 keeps it last.
std::atomic<uint32_t> &upper_half(std::atomic<uint64_t> &word) {
    return reinterpret_cast<std::atomic<uint32_t> *>(&word)[1];
}

}  // namespace

thread_local uint32_t Team::own_phase_ = 0;

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
    runs_.fetch_add(1);
    wake(runs_);
    for (auto &thread : others_) thread.join();
}

void Team::run(const std::function<void(int)> &body) {
    body_ = &body;
    first_phase_ = own_phase_ = static_cast<uint32_t>(claim_.load() >> 32);
    left_.store(0);
    const uint64_t run = runs_.load() + 1;
    gate_.store(run << 32 | kOpen);
    runs_.store(static_cast<uint32_t>(run));
    wake(runs_);
    body(0);
    const auto joined = static_cast<uint32_t>(gate_.fetch_and(~kOpen) & (kOpen - 1));
    for (uint32_t left; (left = left_.load()) != joined;) wait_while(left_, left);
}

void Team::serve(int thread) {
    for (uint32_t seen = 0;;) {
        wait_while(runs_, seen);
        seen = runs_.load();
        if (ends_.load()) return;
        uint64_t gate = gate_.load();
        while ((gate & kOpen) && !gate_.compare_exchange_weak(gate, gate + 1)) {
        }
        if (!(gate & kOpen)) continue;  // over before this thread was awake
        seen = static_cast<uint32_t>(gate >> 32);
        own_phase_ = first_phase_;
        (*body_)(thread);
        left_.fetch_add(1);
        wake(left_);
    }
}

int64_t Team::claim(uint32_t phase, int64_t count) {
    uint64_t now = claim_.load();
    for (;;) {
        if (now >> 32 != phase) return -1;
        const auto index = static_cast<int64_t>(now & 0xffffffff);
        if (index < count) {
            if (claim_.compare_exchange_weak(now, now + 1)) return index;
            continue;
        }
        wait_while(upper_half(claim_), phase);
        return -1;
    }
}

void Team::next_phase(uint32_t phase) {
    done_.store(0);
    claim_.store(static_cast<uint64_t>(phase + 1) << 32);
    wake(upper_half(claim_));
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
