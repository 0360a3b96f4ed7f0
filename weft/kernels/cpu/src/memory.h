// Scratch memory that is kept between calls.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace weft {
namespace {

// Owns a block of memory. (Standard containers would bring in functions that the linker may share between levels.)
struct Memory {
    void* data = nullptr;
    size_t size = 0;
    ~Memory() { std::free(data); }
    void* at_least(size_t bytes) {
        if (bytes > size) {
            std::free(data);
            size = (bytes + 63) / 64 * 64;
            data = std::aligned_alloc(64, size);
            if (!data) __builtin_abort();
        }
        return data;
    }
};

}  // namespace
}  // namespace weft
