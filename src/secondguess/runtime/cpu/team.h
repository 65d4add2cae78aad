// Thread pool with barriers that are fast on idle machines and do not waste time on busy ones.
//
// The threads of a forward pass are synchronised several times a layer. On an idle machine a
// thread that sleeps at a barrier wakes up too late, so it spins. On a busy machine a spinning
// thread takes the processor from the thread that it waits for, so it sleeps. The two are
// distinguished by the time of `sched_yield`, which returns at once if no other thread is ready to
// run. A thread that runs for less than a scheduler's time slice, such as that of a client which
// reads an event, is no reason to sleep: it is over before a sleeping thread has woken up.
//
// Threads of a busy machine seldom run at the same time, so that each barrier costs a time slice.
// Calls therefore use fewer threads there (`ThreadLimit`).

#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

inline int64_t nanoseconds_now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// Time until which the machine counts as busy: a thread that waited has found another one on its core.
inline std::atomic<int64_t> busy_until{0};
constexpr int64_t BUSY_TIME = 20'000'000;  // ns for which it counts as busy after that

// Let the processor rest for some cycles.
inline void spin_pause() {
#ifdef __x86_64__
    _mm_pause();
#else
    asm volatile("isb");  // `yield` does nothing on most processors
#endif
}

// Number whose change threads can wait for.
class Signal {
    std::atomic<uint32_t> value{0}, num_sleeping{0};

    static constexpr int NUM_SPINS = 500;                 // about 10 microseconds
    static constexpr int NUM_SPINS_BUSY = 50;             // about 1 microsecond
    static constexpr int64_t LONGEST_YIELD = 1'300'000;  // ns; a longer yield shows a busy machine
    static constexpr int64_t MAX_SPIN_TIME = 5'000'000;     // ns without a change until a thread sleeps

    bool changed(uint32_t from) const { return value.load(std::memory_order_acquire) != from; }

    bool changed_while_spinning(uint32_t from) const {
        int64_t start = nanoseconds_now();
        const bool busy = start < busy_until.load(std::memory_order_relaxed);
        for (int i = busy ? NUM_SPINS_BUSY : NUM_SPINS; i > 0; i--) {
            if (changed(from)) return true;
            spin_pause();
        }
        if (busy) return false;
        for (const int64_t end = start + MAX_SPIN_TIME; start < end;) {
            start = nanoseconds_now();
            sched_yield();
            if (nanoseconds_now() - start > LONGEST_YIELD) busy_until.store(nanoseconds_now() + BUSY_TIME, std::memory_order_relaxed);
            if (changed(from)) return true;
            if (nanoseconds_now() < busy_until.load(std::memory_order_relaxed)) return false;
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

// Number of threads of a call: one fewer each time that a machine that was busy still is. One more is tried
// after a while, which doubles up to `LONGEST_HOLD` as long as that shows a busy machine again.
class ThreadLimit {
    static constexpr int64_t LONGEST_HOLD = 640'000'000;  // ns

    int limit = 0;  // 0 for none
    int64_t hold = BUSY_TIME;
    int64_t next = 0;       // time at which one more thread is tried
    int64_t last_busy = 0;  // `busy_until` when it was last read

    void lower(int max_threads, int64_t now) {
        hold = now < next ? std::min(2 * hold, LONGEST_HOLD) : BUSY_TIME;
        limit = std::max(1, (limit ? std::min(limit, max_threads) : max_threads) - 1);
        next = now + hold;
    }

    void raise(int max_threads, int64_t now) {
        limit = limit < max_threads ? limit + 1 : 0;
        next = now + hold;
    }

  public:
    // The number of threads of a call at the time `now`, which wants `wanted`, of a team that has had
    // calls of up to `max_threads`. `busy` is `busy_until`.
    int of(int wanted, int max_threads, int64_t busy, int64_t now) {
        if (busy != last_busy) {
            if (now < next || busy - last_busy < 2 * BUSY_TIME) lower(max_threads, now);
            last_busy = busy;
        } else if (limit && now >= next) {
            raise(max_threads, now);
        }
        return limit ? std::min(limit, wanted) : wanted;
    }
};

class Team {
    using Function = void (*)(void* argument, int thread, int num_threads);
    static constexpr int MAX_THREADS = 1023;

    std::mutex one_at_a_time;
    Signal started;  // number of threads of the call in the low 10 bits, number of calls above
    Signal passed;   // number of barriers passed
    std::atomic<int> num_arrived{0};
    int num_workers = 0, num_threads = 1;
    ThreadLimit limit;
    Function function = nullptr;
    void* argument = nullptr;

    void work(int thread, uint32_t seen) {
        for (;;) {
            started.wait_for_change(seen);
            seen = started.get();
            const int threads = seen & MAX_THREADS;
            if (thread >= threads) continue;
            function(argument, thread, threads);
            barrier();
        }
    }

    // Start threads until there are `wanted` workers, or fewer if the system refuses.
    void grow(int wanted) {
        try {
            for (; num_workers < wanted; num_workers++)
                std::thread(&Team::work, this, num_workers + 1, started.get()).detach();
        } catch (const std::system_error&) {  // continue with fewer threads
        }
    }

    static inline std::atomic<Team*> instance{nullptr};

  public:
    static Team& get() {
        // A forked child has none of its parent's threads and starts a team of its own.
        static const int watching = pthread_atfork(nullptr, nullptr, [] { instance.store(nullptr); });
        (void)watching;
        if (!instance.load()) {
            Team *made = new Team, *none = nullptr;  // never freed: its threads never end
            if (!instance.compare_exchange_strong(none, made)) delete made;
        }
        return *instance.load();
    }

    // Wait until all threads of the running function have called it.
    void barrier() {
        // Read before the arrival: the next call may change it as soon as the last thread has arrived.
        const int threads = num_threads;
        if (threads == 1) return;
        const uint32_t seen = passed.get();
        if (num_arrived.fetch_add(1) + 1 == threads) {
            num_arrived.store(0);
            passed.set(seen + 1);
        } else {
            passed.wait_for_change(seen);
        }
    }

    // Call a function in several threads, including the calling one. Concurrent calls are
    // serialised.
    template <class Callable>
    void run(int64_t wanted, Callable callable) {
        const std::lock_guard<std::mutex> lock(one_at_a_time);
        grow(std::min<int64_t>(wanted, MAX_THREADS) - 1);
        const int max_threads = num_workers + 1;
        num_threads = limit.of(std::min<int64_t>(wanted, max_threads), max_threads, busy_until.load(std::memory_order_relaxed), nanoseconds_now());
        function = [](void* argument, int thread, int count) { (*(Callable*)argument)(thread, count); };
        argument = &callable;
        const uint32_t num_calls = (started.get() >> 10) + 1;
        if (num_threads > 1) started.set(num_calls << 10 | (uint32_t)num_threads);
        callable(0, num_threads);
        barrier();
    }
};
