// Threads that run a function together, with barriers that suit both a quiet and a busy machine.
//
// A forward waits for its threads several times a layer. On a quiet machine a thread that goes to sleep at a barrier comes
// back too late, so it spins. On a busy one a thread that spins takes the processor from the very thread that it waits for,
// so it sleeps. `sched_yield` tells which it is: where nothing else wants to run it returns at once.

#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

// A number that threads wait for to change.
class Signal {
    std::atomic<uint32_t> value{0}, num_sleeping{0};

    static constexpr int NUM_SPINS = 500;                 // about 10 microseconds
    static constexpr int NUM_SPINS_BUSY = 50;             // about 1
    static constexpr int64_t LONGEST_YIELD = 500'000;  // nanoseconds; where it takes longer, something else ran
    static constexpr int64_t BUSY_TIME = 20'000'000;   // for so long the machine is then taken to be busy
    static constexpr int64_t PATIENCE = 5'000'000;     // after so long without a change a thread sleeps in any case

    static inline std::atomic<int64_t> busy_until{0};

    static int64_t now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return time.tv_sec * 1'000'000'000 + time.tv_nsec;
    }

    bool changed(uint32_t from) const { return value.load(std::memory_order_acquire) != from; }

    bool changed_while_spinning(uint32_t from) const {
        int64_t start = now();
        const bool busy = start < busy_until.load(std::memory_order_relaxed);
        for (int i = busy ? NUM_SPINS_BUSY : NUM_SPINS; i > 0; i--) {
            if (changed(from)) return true;
            _mm_pause();
        }
        if (busy) return false;
        for (const int64_t end = start + PATIENCE; start < end;) {
            start = now();
            sched_yield();
            if (now() - start > LONGEST_YIELD) busy_until.store(now() + BUSY_TIME, std::memory_order_relaxed);
            if (changed(from)) return true;
            if (now() < busy_until.load(std::memory_order_relaxed)) return false;
        }
        return false;
    }

  public:
    uint32_t get() const { return value.load(std::memory_order_acquire); }

    void set(uint32_t to) {
        value.store(to);
        if (num_sleeping.load()) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }

    void wait_for_change(uint32_t from) {
        while (!changed(from)) {
            if (changed_while_spinning(from)) return;
            num_sleeping.fetch_add(1);
            if (!changed(from)) syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, from, nullptr, nullptr, 0);
            num_sleeping.fetch_sub(1);
        }
    }
};

class Team {
    using Function = void (*)(void* argument, int thread, int num_threads);
    static constexpr int MOST_THREADS = 1023;

    std::mutex one_at_a_time;
    Signal started;  // how many threads run the function, and above these 10 bits how many calls there were
    Signal passed;   // how many barriers there were
    std::atomic<int> num_arrived{0};
    int num_workers = 0, num_threads = 1;
    Function function = nullptr;
    void* argument = nullptr;

    void work(int thread, uint32_t seen) {
        for (;;) {
            started.wait_for_change(seen);
            seen = started.get();
            const int threads = seen & MOST_THREADS;
            if (thread >= threads) continue;
            function(argument, thread, threads);
            barrier();
        }
    }

    // Start the threads that are missing.
    void grow(int wanted) {
        try {
            for (; num_workers < wanted; num_workers++)
                std::thread(&Team::work, this, num_workers + 1, started.get()).detach();
        } catch (const std::system_error&) {  // the function is then shared by fewer
        }
    }

    static inline std::atomic<Team*> instance{nullptr};

  public:
    static Team& get() {
        // A child process has none of its parent's threads, and makes a team of its own.
        static const int watching = pthread_atfork(nullptr, nullptr, [] { instance.store(nullptr); });
        (void)watching;
        if (!instance.load()) {
            Team *made = new Team, *none = nullptr;  // never freed: its threads wait until the process ends
            if (!instance.compare_exchange_strong(none, made)) delete made;
        }
        return *instance.load();
    }

    // Return when all threads of the running function have called it.
    void barrier() {
        if (num_threads == 1) return;
        const uint32_t seen = passed.get();
        if (num_arrived.fetch_add(1) + 1 == num_threads) {
            num_arrived.store(0);
            passed.set(seen + 1);
        } else {
            passed.wait_for_change(seen);
        }
    }

    // Call a function in several threads, the calling one among them. Calls from different threads wait for each other.
    template <class Callable>
    void run(int64_t wanted, Callable callable) {
        const std::lock_guard<std::mutex> lock(one_at_a_time);
        grow(std::min<int64_t>(wanted, MOST_THREADS) - 1);
        num_threads = std::min<int64_t>(wanted, num_workers + 1);
        function = [](void* argument, int thread, int count) { (*(Callable*)argument)(thread, count); };
        argument = &callable;
        const uint32_t num_calls = (started.get() >> 10) + 1;
        if (num_threads > 1) started.set(num_calls << 10 | (uint32_t)num_threads);
        callable(0, num_threads);
        barrier();
    }
};
