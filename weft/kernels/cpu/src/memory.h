// Scratch memory that is kept between calls.
#pragma once

#include <cstddef>
#include <cstdlib>

#include <sys/mman.h>

namespace weft {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kLarge = 64 << 10;  // from here on, pages of 4 KiB cost a product a third of its speed

// Owns a block of memory. (Standard containers would bring in functions that the linker may share between levels.)
struct Memory {
    void* data = nullptr;
    size_t size = 0;
    ~Memory() { std::free(data); }
    void* at_least(size_t bytes) {
        if (bytes > size) {
            std::free(data);
            const size_t grain = bytes < kLarge ? 64 : kHugePage;
            size = (bytes + grain - 1) / grain * grain;
            data = std::aligned_alloc(grain, size);
            if (!data) __builtin_abort();
#if defined(MADV_HUGEPAGE)
            if (grain == kHugePage) madvise(data, size, MADV_HUGEPAGE);
#endif
        }
        return data;
    }
};

}  // namespace
}  // namespace weft
