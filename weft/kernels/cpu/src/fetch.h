// Fetching memory into the caches before its turn.
#pragma once

#include "simd.h"

namespace weft {
namespace {

// Fetches one block while another is worked on, a piece at a time.
struct Fetch {
    const char* at;
    const char* end;
    Fetch(const void* block, int64_t bytes) : at((const char*)block), end(block ? at + bytes : at) {}
    WEFT_INLINE void lines(int count) {
        for (int i = 0; i < count && at < end; i++, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

}  // namespace
}  // namespace weft
