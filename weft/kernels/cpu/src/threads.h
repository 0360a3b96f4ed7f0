// Division of work among threads.
//
// The thread count comes with every call, so that it follows torch's. The threads are the library's own (threads.cpp):
// OpenMP's do not wait a moment before they sleep as soon as two threads of a process use them, and a pass of a model
// is hundreds of calls. Work below a few microseconds stays on the calling thread.
#pragma once

#include <cstdint>

namespace weft {

typedef void (*TeamWork)(void* what, int64_t member, int64_t members);

// Calls work(what, member, members) for every member, each on a thread of its own and member 0 on this one, and returns
// when all are done. There are `threads` members, or fewer if the system has no more threads.
void run_team(int64_t threads, TeamWork work, void* what);

namespace {

constexpr int64_t kSmallWork = 1 << 14;

inline int threads_for(int64_t work, int threads) { return work < kSmallWork ? 1 : threads; }

// work(member, members), once on every thread.
template <class F>
inline void on_threads(int64_t threads, const F& work) {
    if (threads <= 1) return work((int64_t)0, (int64_t)1);
    run_team(
        threads, [](void* what, int64_t member, int64_t members) { (*(const F*)what)(member, members); }, (void*)&work);
}

// work(i) for every i below `count`; each thread takes one range.
template <class F>
inline void for_each(int64_t threads, int64_t count, const F& work) {
    on_threads(threads, [&](int64_t member, int64_t members) {
        const int64_t end = count * (member + 1) / members;
        for (int64_t i = count * member / members; i < end; i++) work(i);
    });
}

// work(i) for every i below `count`; each thread takes the next `run` of them whenever it is free.
template <class F>
inline void for_each_when_free(int64_t threads, int64_t count, int64_t run, const F& work) {
    int64_t next = 0;
    on_threads(threads, [&](int64_t, int64_t) {
        for (;;) {
            const int64_t first = __atomic_fetch_add(&next, run, __ATOMIC_RELAXED);
            if (first >= count) return;
            const int64_t end = first + run < count ? first + run : count;
            for (int64_t i = first; i < end; i++) work(i);
        }
    });
}

}  // namespace
}  // namespace weft
