// What the machine can do at most, for benchmarks to compare with: reading memory, and multiplying what is in the
// first-level cache.
#pragma once

#include "amx.h"
#include "simd.h"
#include "threads.h"

namespace weft {
namespace {

// Reads every byte once, in as many runs as there are threads; returns a sum, so that nothing is left out.
inline double probe_read(const void* data, int64_t bytes, int threads) {
    const int64_t step = 4 * (int64_t)sizeof(vf), share = bytes / threads / step * step;
    int64_t total = 0;
    on_threads(threads, [&](int64_t member, int64_t members) {
        vi sums[4] = {};
        for (int64_t part = member; part < threads; part += members) {
            const char* from = (const char*)data + share * part;
            for (int64_t i = 0; i < share; i += step) {
                for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(from + i + 4096 + line);
                for (int j = 0; j < 4; j++) sums[j] += load_raw<vi>(from + i + j * (int64_t)sizeof(vf));
            }
        }
        int64_t sum = 0;
        for (int j = 0; j < 4; j++)
            for (int w = 0; w < W; w++) sum += sums[j][w];
        __atomic_fetch_add(&total, sum, __ATOMIC_RELAXED);
    });
    return (double)total;
}

// Multiplies and adds `rounds` times on every thread, on operands of `data` (32 KiB per thread, of T); returns how
// many operations that was, a multiplication and an addition being two. Keeps what it computed in `data`.
template <class T>
double probe_product(void* data, int64_t rounds, int threads) {
    constexpr int64_t kBytes = 32 << 10;
    int64_t all_operations = 0;
    on_threads(threads, [&](int64_t member, int64_t) {
        int64_t operations = 0;
        char* mine = (char*)data + kBytes * member;
#if WEFT_AMX
        if constexpr (sizeof(T) == 2) {
            TileUnit in_use;
            TileUnit::barrier();
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t round = 0; round < rounds; round++)
                for (int64_t k = 0; k < 8; k++) {
                    const char *a = mine + k * 2048, *b = mine + kBytes / 2 + k * 2048;
                    _tile_loadd(6, b, 64);
                    _tile_loadd(4, a, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(7, b + 1024, 64);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_loadd(5, a + 1024, 64);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            _tile_stored(0, mine, 64);
            TileUnit::barrier();
            operations += rounds * 8 * 4 * 2 * 16 * 16 * 32;
        } else
#endif
        {
            typedef Lanes<T, true> L;
            constexpr int M = W == 16 ? 12 : 6;
            vf acc[M][2] = {};
            for (int64_t round = 0; round < rounds; round++)
                for (int64_t k = 0; k < 64; k++) {
                    const T *at = (const T*)mine + k * 2 * L::step, *beside = (const T*)(mine + kBytes / 2) + k * L::step;
                    // The compiler must not keep what the next k reads too: there are too few registers.
                    __asm__("" : "+r"(beside));
                    typename L::vec left = L::get(at), right = L::get(at + L::step);
                    for (int m = 0; m < M; m++) {
                        typename L::vec x = L::get(beside + m * L::step);
#if defined(__x86_64__)
                        __asm__("" : "+v"(x));  // nor read it twice
#endif
                        acc[m][0] = L::multiply_add(left, x, acc[m][0]);
                        acc[m][1] = L::multiply_add(right, x, acc[m][1]);
                    }
                }
            for (int m = 0; m < M; m++)
                for (int n = 0; n < 2; n++) store((float*)mine + (m * 2 + n) * W, acc[m][n]);
            operations += rounds * 64 * M * 2 * 2 * L::step;
        }
        __atomic_fetch_add(&all_operations, operations, __ATOMIC_RELAXED);
    });
    return (double)all_operations;
}

}  // namespace
}  // namespace weft
