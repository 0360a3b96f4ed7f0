// Matrix tiles (AMX): products of 16 x 32 by 32 x 16 bfloat16 values into 16 x 16 floats.
//
// A tile of the left operand is 16 rows as they lie in memory; one of the right operand is 16 rows of pairs, the two
// values of a pair being neighbours along the summed dimension.
#pragma once

#include "simd.h"

#if WEFT_AMX

namespace weft {
namespace {

// Holds the tile registers, all of them 16 rows of 64 bytes, while it lives. Afterwards they are configured as they were:
// other libraries may have configured them once for this thread.
struct TileUnit {
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };

    TileUnit() {
        const Config config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
        _tile_storeconfig(&before);
        barrier();
        _tile_loadconfig(&config);
    }
    ~TileUnit() {
        barrier();
        before.palette ? _tile_loadconfig(&before) : _tile_release();
    }
    TileUnit(const TileUnit&) = delete;
    TileUnit& operator=(const TileUnit&) = delete;

    Config before;
    // The compiler does not know that tile instructions read memory.
    static WEFT_INLINE void barrier() { __asm__ volatile("" ::: "memory"); }
};

// See `product` in prefill.h; `depth` counts pairs and is a multiple of 16, `columns` one of 32. Rows up to the next
// multiple of 32 are computed, from whatever is there.
template <bool Add>
void tile_product(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                  int64_t rows, int64_t depth, int64_t columns) {
    TileUnit::barrier();
    for (int64_t m = 0; m < rows; m += 32)
        for (int64_t n = 0; n < columns; n += 32) {
            float *top = c + m * c_stride + n, *bottom = top + 16 * c_stride;
            if constexpr (Add) {
                _tile_loadd(0, top, c_stride * 4);
                _tile_loadd(1, top + 16, c_stride * 4);
                _tile_loadd(2, bottom, c_stride * 4);
                _tile_loadd(3, bottom + 16, c_stride * 4);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t k = 0; k < depth; k += 16) {
                _tile_loadd(4, a + m * a_stride + k, a_stride * 4);
                _tile_loadd(5, a + (m + 16) * a_stride + k, a_stride * 4);
                _tile_loadd(6, b + k * b_stride + n, b_stride * 4);
                _tile_loadd(7, b + k * b_stride + n + 16, b_stride * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, top, c_stride * 4);
            _tile_stored(1, top + 16, c_stride * 4);
            _tile_stored(2, bottom, c_stride * 4);
            _tile_stored(3, bottom + 16, c_stride * 4);
        }
    TileUnit::barrier();
}

// to[k][m]: pair k of row m of x, zeros from `rows` to `padded`, which is a multiple of 16.
inline void pack_rows(const bf16* x, int64_t rows, int64_t size, int32_t* to, int64_t padded) {
    alignas(64) static const int32_t zeros[16] = {};
    for (int64_t m = 0; m < padded; m += 16)
        for (int64_t k = 0; k < size / 2; k += 16) {
            const int32_t* from[16];
            for (int64_t i = 0; i < 16; i++)
                from[i] = m + i < rows ? (const int32_t*)(x + (m + i) * size) + k : zeros;
            transpose_words(from, to + k * padded + m, padded);
        }
}

// sums[m][n] = dot(x row m, weight row n) for 32 rows of the weight and 16 * M of x, x being packed. `next`, if not
// null, is what will be read as the weight next: it is fetched into the cache in the order in which it lies in memory,
// which the strided tile loads themselves would not do.
template <int M>
void tile_columns(const bf16* weight, const bf16* next, const int32_t* x, int64_t x_stride, int64_t size,
                  float (*sums)[32]) {
    alignas(64) float turned[32][32];
    TileUnit::barrier();
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (M == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < size; k += 32) {
        if (next) {
            const char* lines = (const char*)(next + k * 32);
            for (int i = 0; i < 32; i++) _mm_prefetch(lines + 64 * i, _MM_HINT_T1);
        }
        _tile_loadd(4, weight + k, size * 2);
        _tile_loadd(5, weight + 16 * size + k, size * 2);
        _tile_loadd(6, x + k / 2 * x_stride, x_stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (M == 2) {
            _tile_loadd(7, x + k / 2 * x_stride + 16, x_stride * 4);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, &turned[0][0], 128);
    _tile_stored(1, &turned[16][0], 128);
    if constexpr (M == 2) {
        _tile_stored(2, &turned[0][16], 128);
        _tile_stored(3, &turned[16][16], 128);
    }
    TileUnit::barrier();
    for (int n = 0; n < 32; n += 16)
        for (int m = 0; m < 16 * M; m += 16) {
            const int32_t* from[16];
            for (int i = 0; i < 16; i++) from[i] = (const int32_t*)&turned[n + i][m];
            transpose_words(from, (int32_t*)&sums[m][n], 32);
        }
}

}  // namespace
}  // namespace weft

#endif
