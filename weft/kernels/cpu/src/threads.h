// Division of work among threads.
//
// The thread count comes with every call, so that it follows torch's; a team of that size already waits in the OpenMP
// runtime that torch uses too. Work below a few microseconds stays on the calling thread.
#pragma once

#include <omp.h>

#include <cstdint>

namespace weft {
namespace {

constexpr int64_t kSmallWork = 1 << 14;

inline int threads_for(int64_t work, int threads) { return work < kSmallWork ? 1 : threads; }

}  // namespace
}  // namespace weft
