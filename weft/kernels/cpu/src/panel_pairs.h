// A panel of a packed weight times rows of x, with dot products of pairs (AVX-512 BF16): bfloat16.
//
// A step of the weight is [2][16][32] bfloat16: two blocks of 16 outputs, each with 16 pairs of inputs for each of its
// outputs in turn. That is how tiles and pairwise dot products read it, in the order in which it lies in memory.
#pragma once

#include "packed.h"

#if WEFT_BF16

namespace weft {
namespace {

constexpr int64_t kTileSize = 16 * kStep;  // elements of a block of 16 outputs in a step

struct Pairs {
    typedef bf16 Stored;
    typedef bf16 Value;
    struct InUse {};
    static constexpr int64_t kInputs = kStep;
    static constexpr int64_t kRowsAtOnce = 12;
    static constexpr bool kEqualGroups = true;
    static constexpr int64_t kBlockSteps = 16;
    static constexpr int64_t kBlockBytes = 1 << 20;
    static constexpr int64_t kWholeGroups = 4;  // with so few rows, a whole panel passes by at once
    // As for `Floats`; both blocks of a step are read at once.
    static constexpr int64_t kNearBytes = 2 << 10;
    static constexpr int64_t kFarBytes = kNearBytes + (8 << 10);
    static constexpr bool kTakesWhenFree = false;
    static constexpr bool kWritesBeside = false;

    static constexpr int64_t kStepBytes = 2 * kStepSize;
    static constexpr int64_t kExpandedBytes = 0;
    static bool expands(int64_t) { return false; }
    static bool takes_whole(int64_t groups) { return groups <= kWholeGroups; }
    static void expand_steps(const char*, char*, int64_t) {}

    // Rearranges a weight [outputs, inputs]; both are multiples of 32.
    static void pack(const bf16* weight, bf16* packed, int64_t outputs, int64_t inputs, int threads) {
        const int64_t steps = inputs / kStep;
        for_each(threads, outputs / kPanel, [&](int64_t panel) {
            for (int64_t s = 0; s < steps; s++)
                for (int64_t half = 0; half < 2; half++) {
                    const bf16* from = weight + (panel * kPanel + half * 16) * inputs + s * kStep;
                    const int32_t* rows[16];
                    for (int64_t i = 0; i < 16; i++) rows[i] = (const int32_t*)(from + i * inputs);
                    transpose_words(rows, (int32_t*)(packed + ((panel * steps + s) * 2 + half) * kTileSize), 16);
                }
        });
    }

    static const bf16* rearrange(const LinearArgs& a, const RowPart<Pairs>& r, bf16* to) {
        const bf16* x = (const bf16*)a.x + r.first * a.inputs;
        if (r.rows == 1) return x;  // one row is the same as pairs
        const int64_t each = r.at_once();
        for (int64_t i = 0; i < r.rows; i += each)
            rows_as_pairs(x + i * a.inputs, least(each, r.rows - i), a.inputs, to + i * a.inputs);
        return to;
    }

    static WEFT_INLINE void multiply(const bf16* x, int64_t step, int64_t count, int64_t, bool, const PanelPart& part) {
        const bf16* rows = x + step * kStep * count;
        with_count<kRowsAtOnce>(count, [&](auto counted) {
            constexpr int M = decltype(counted)::value;
            part.near ? panel<M, true>(rows, part) : panel<M, false>(rows, part);
        });
    }

    // Up to 12 rows of x as [pair of inputs][row]: as they lie, rows may be so far apart that they displace each other
    // from the first-level cache.
    static void rows_as_pairs(const bf16* x, int64_t rows, int64_t inputs, bf16* to) {
        alignas(64) int32_t turned[16][16];
        const int32_t* from[16];
        for (int64_t k = 0; k < inputs / 2; k += 16) {
            for (int64_t m = 0; m < 16; m++) from[m] = (const int32_t*)(x + least(m, rows - 1) * inputs) + k;
            transpose_words(from, turned[0], 16);
            const __mmask16 kept = (__mmask16)((1u << rows) - 1);
            for (int64_t i = 0; i < 16; i++)
                _mm512_mask_storeu_epi32((int32_t*)to + (k + i) * rows, kept, _mm512_load_si512(turned[i]));
        }
    }

    // For M rows of x, as pairs.
    template <int M, bool Near>
    static WEFT_INLINE void panel(const bf16* x, const PanelPart& part) {
        __m512 acc[M][2];
        for (int m = 0; m < M; m++)
            for (int n = 0; n < 2; n++)
                acc[m][n] = part.add ? _mm512_loadu_ps(part.sums + m * kPanel + n * 16) : _mm512_setzero_ps();
        for (int64_t s = 0; s < part.steps; s++) {
            if (!Near) fetch_beside(part, s);
            const bf16 *w = (const bf16*)part.weight + s * kStepSize, *from = x + s * kStep * M;
            for (int64_t pair = 0; pair < 16; pair++, from += 2 * M) {
                if (Near) {
                    fetch_ahead(w + pair * 32);
                    fetch_ahead(w + kTileSize + pair * 32);
                }
                __m512bh left = (__m512bh)_mm512_loadu_si512(w + pair * 32);
                __m512bh right = (__m512bh)_mm512_loadu_si512(w + kTileSize + pair * 32);
                for (int m = 0; m < M; m++) {
                    int32_t values;
                    __builtin_memcpy(&values, from + 2 * m, 4);
                    __m512bh y = (__m512bh)_mm512_set1_epi32(values);
                    acc[m][0] = _mm512_dpbf16_ps(acc[m][0], left, y);
                    acc[m][1] = _mm512_dpbf16_ps(acc[m][1], right, y);
                }
            }
        }
        for (int m = 0; m < M; m++)
            for (int n = 0; n < 2; n++) _mm512_storeu_ps(part.sums + m * kPanel + n * 16, acc[m][n]);
    }

    // The lines that follow one by `kNearBytes` and `kFarBytes`.
    static WEFT_INLINE void fetch_ahead(const void* line) {
        __builtin_prefetch((const char*)line + kNearBytes, 0, 3);
        __builtin_prefetch((const char*)line + kFarBytes, 0, 2);
    }
};

}  // namespace
}  // namespace weft

#endif
