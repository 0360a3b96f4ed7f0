// Teams of threads. Every thread that calls kernels has a team of its own, which ends with it.
//
// Between two calls a team's threads look for the next one for as long as a model's next operation usually takes to come,
// and then sleep: a machine's cores are shared with the server. A process that forks leaves its teams behind: the child makes new ones.
#include "threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include <unistd.h>

namespace weft {
namespace {

constexpr std::chrono::microseconds kPatience{100};
constexpr int64_t kMostThreads = 1024;

inline void look_again_soon() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

template <class Condition>
bool soon(Condition&& condition) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    do {
        for (int i = 0; i < 32; i++) {
            if (condition()) return true;
            look_again_soon();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

class Team {
   public:
    explicit Team(int64_t members) {
        threads_ = new std::thread[(size_t)(members - 1)];
        try {
            for (; members_ < members; members_++)
                threads_[members_ - 1] = std::thread([this, member = members_] { serve(member); });
        } catch (const std::system_error&) {
            // No more threads: those that there are do the work.
        }
    }

    ~Team() {
        work_ = nullptr;
        call();
        for (int64_t i = 0; i < members_ - 1; i++) threads_[i].join();
        delete[] threads_;
    }

    int64_t members() const { return members_; }

    // `members` of them take part.
    void run(int64_t members, TeamWork work, void* what) {
        work_ = work;
        what_ = what;
        taking_part_ = members;
        left_.store(members_ - 1, std::memory_order_relaxed);
        call();
        work(what, 0, members);
        if (soon([&] { return left_.load(std::memory_order_acquire) == 0; })) return;
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_.store(true);
        finished_.wait(lock, [&] { return left_.load() == 0; });
        waiting_.store(false);
    }

   private:
    // Either a sleeper is seen here and woken, or it sees the new turn before it sleeps.
    void call() {
        turn_.fetch_add(1);
        if (asleep_.load() == 0) return;
        std::lock_guard<std::mutex> lock(mutex_);
        called_.notify_all();
    }

    void serve(int64_t member) {
        for (uint32_t seen = 0;; seen++) {
            auto called = [&] { return turn_.load(std::memory_order_acquire) != seen; };
            if (!soon(called)) {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_.fetch_add(1);
                called_.wait(lock, [&] { return turn_.load() != seen; });
                asleep_.fetch_sub(1);
            }
            if (!work_) return;
            if (member < taking_part_) work_(what_, member, taking_part_);
            if (left_.fetch_sub(1) == 1 && waiting_.load()) {
                std::lock_guard<std::mutex> lock(mutex_);
                finished_.notify_one();
            }
        }
    }

    std::thread* threads_ = nullptr;
    int64_t members_ = 1;
    TeamWork work_ = nullptr;
    void* what_ = nullptr;
    int64_t taking_part_ = 0;
    alignas(64) std::atomic<uint32_t> turn_{0};  // how often the team was called
    alignas(64) std::atomic<int64_t> left_{0};   // members that still work
    std::atomic<int64_t> asleep_{0};             // members that must be woken
    std::atomic<bool> waiting_{false};           // the caller must be woken
    std::mutex mutex_;
    std::condition_variable called_, finished_;
};

struct Owner {
    Team* team = nullptr;
    pid_t process = 0;
    int64_t asked = 0;  // the system may start fewer threads than that
    bool working = false;
    ~Owner() {
        if (process == getpid()) delete team;
    }
};

}  // namespace

void run_team(int64_t threads, TeamWork work, void* what) {
    static thread_local Owner owner;
    if (threads > kMostThreads) threads = kMostThreads;
    // A member that divides its own work further does it alone.
    if (threads <= 1 || owner.working) return work(what, 0, 1);
    if (owner.process != getpid() || owner.asked < threads) {
        if (owner.process == getpid()) delete owner.team;
        owner.process = getpid();
        owner.asked = threads;
        owner.team = new Team(threads);
    }
    if (owner.team->members() < threads) threads = owner.team->members();
    owner.working = true;
    owner.team->run(threads, work, what);
    owner.working = false;
}

}  // namespace weft
