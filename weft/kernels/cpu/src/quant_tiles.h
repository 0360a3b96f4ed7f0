// A panel of a weight in quantized blocks times many rows of x, with matrix tiles (AMX): x stays bfloat16, and the weight
// becomes bfloat16 some steps at a time, in the cache.
//
// Tiles of bytes would need what `quant_panel` does: every 32 inputs, 16 x 16 integer sums are stored, scaled and added as
// floats, which takes longer than their product. Measured, that was at best a fifth faster than `quant_panel`; this is twice
// as fast, and rounds less: weights to 8 bits of fraction, and activations not at all.
#pragma once

#include "panel_tiles.h"
#include "quant_panel.h"

#if WEFT_AMX

namespace weft {
namespace {

// With fewer rows, expanding takes longer than is won: for 32 x 32 numbers, as long as multiplying them by 32 rows.
constexpr int64_t kTileRows = 24;

// 32 inputs of a step, `sub`, as a step of a packed bfloat16 weight: [2][16][32], see `Pairs`.
//
// In each 64 bytes of numbers come four inputs of an output, then those of the next. They are put in an order in which
// rounding two vectors of floats gives 16 outputs of a pair of inputs, each beside its pair; scales are in that order too.
// A number q becomes a float without a conversion, as the fraction of 1 + q / 256.
template <class L>
WEFT_INLINE void expand_inputs(const uint8_t* step, int sub, bf16* to) {
    typedef Packed<L> From;
    constexpr int kGroups = 8 / L::kParts;
    // Byte k of word i: inputs 0 and 1 of outputs 0 to 7 for k = 0, of 8 to 15 for k = 1; inputs 2 and 3 for k = 2 and 3.
    struct Order {
        alignas(64) uint8_t bytes[64];
        alignas(64) int32_t scales[2][16];
        constexpr Order() : bytes(), scales() {
            for (int i = 0; i < 16; i++)
                for (int k = 0; k < 4; k++) {
                    bytes[4 * i + k] = (uint8_t)(4 * (i / 2 + k % 2 * 8) + k / 2 * 2 + i % 2);
                    scales[k % 2][i] = i / 2 + k % 2 * 8;
                }
        }
    };
    static constexpr Order kOrder;
    const __m512i order = _mm512_load_si512(kOrder.bytes);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 2
        for (int p = 0; p < L::kParts; p++) {
            const vf scale = From::scale(step, sub, p, half);
            const vf less = (L::kMinima ? From::minimum(step, sub, half) : scale * (float)L::kOffset) + scale * 256.0f;
            vf scales[2], lesses[2];
            for (int i = 0; i < 2; i++) {
                const __m512i which = _mm512_load_si512(kOrder.scales[i]);
                scales[i] = (vf)_mm512_permutexvar_ps(which, (__m512)(scale * 256.0f));
                lesses[i] = (vf)_mm512_permutexvar_ps(which, (__m512)less);
            }
#pragma GCC unroll 8
            for (int group = p * kGroups; group < (p + 1) * kGroups; group++) {
                const __m512i numbers = _mm512_permutexvar_epi8(order, (__m512i)From::numbers(step, sub, group, half));
                const __m512i fraction = _mm512_set1_epi32(255 << 15), one = _mm512_set1_epi32(127 << 23);
                const __m512i shifted[4] = {_mm512_slli_epi32(numbers, 15), _mm512_slli_epi32(numbers, 7),
                                            _mm512_srli_epi32(numbers, 1), _mm512_srli_epi32(numbers, 9)};
                vf values[4];
                for (int k = 0; k < 4; k++)
                    values[k] = (vf)_mm512_ternarylogic_epi32(shifted[k], fraction, one, 0xea) * scales[k % 2] - lesses[k % 2];
                bf16* rows = to + half * kTileSize + group * 64;
                for (int k = 0; k < 4; k += 2)
                    _mm512_store_si512(rows + k * 16, (__m512i)_mm512_cvtne2ps_pbh((__m512)values[k + 1], (__m512)values[k]));
            }
        }
}

// Steps of a packed weight as those of a packed bfloat16 weight.
template <class L>
__attribute__((noinline)) void expand_blocks(const uint8_t* from, bf16* to, int64_t steps) {
    for (int64_t s = 0; s < steps; s++, from += L::kBytes)
        for (int sub = 0; sub < L::kInputs / 32; sub++, to += kStepSize) expand_inputs<L>(from, sub, to);
}

// For up to 16 * M rows of x, given as tiles: inputs are expanded shortly before they are multiplied, since vectors and
// tiles work at the same time.
template <class L, int M>
__attribute__((noinline)) void expand_beside(const bf16* x, const PanelPart& part) {
    constexpr int64_t kSubs = L::kInputs / 32, kAhead = 2;
    alignas(64) bf16 expanded[2 * kAhead][kStepSize];
    const auto expand = [&](int64_t s) {
        if (s < part.steps)
            expand_inputs<L>((const uint8_t*)part.weight + s / kSubs * L::kBytes, (int)(s % kSubs), expanded[s % (2 * kAhead)]);
    };
    for (int64_t s = 0; s < kAhead; s++) expand(s);
    Tiles::multiply_steps<M, true, false>(x, part, [&](int64_t s) {
        expand(s + kAhead);
        TileUnit::barrier();
        return (const bf16*)expanded[s % (2 * kAhead)];
    });
}

// As packed.h has products.
template <class L>
struct BlockTiles {
    typedef bf16 Stored;
    typedef bf16 Value;
    typedef TileUnit InUse;
    static constexpr int64_t kInputs = L::kInputs;
    static constexpr int64_t kRowsAtOnce = Tiles::kRowsAtOnce;
    static constexpr bool kEqualGroups = false;
    static constexpr int64_t kBlockSteps = 256 / L::kInputs;  // expanded, a third of the first-level cache
    static constexpr int64_t kBlockBytes = Tiles::kBlockBytes;
    static constexpr int64_t kNearBytes = 0;
    static constexpr bool kTakesWhenFree = true;
    static constexpr bool kWritesBeside = true;

    static constexpr int64_t kStepBytes = L::kBytes;
    static constexpr int64_t kExpandedBytes = kBlockSteps * L::kInputs * kPanel * 2;
    static bool expands(int64_t groups) { return groups > 1; }
    static bool takes_whole(int64_t groups) { return groups == 1; }
    static void expand_steps(const char* from, char* to, int64_t steps) {
        expand_blocks<L>((const uint8_t*)from, (bf16*)to, steps);
    }

    static const bf16* rearrange(const LinearArgs& a, const RowPart<BlockTiles>& r, bf16* to) {
        for (int64_t i = 0; i < r.rows; i += kRowsAtOnce)
            Tiles::rows_as_tiles((const bf16*)a.x, a.rows, a.inputs, r.first + i, to + i * a.inputs);
        return to;
    }

    static void multiply(const bf16* x, int64_t step, int64_t count, int64_t groups, bool expanded,
                         const PanelPart& part) {
        constexpr int64_t kSteps = L::kInputs / kStep;
        PanelPart finer = part;
        finer.steps *= kSteps;
        finer.lines = (part.lines + kSteps - 1) / kSteps;
        if (expanded)
            Tiles::multiply(x, step * kSteps, count, groups, true, finer);
        else
            count > 16 ? expand_beside<L, 2>(x, finer) : expand_beside<L, 1>(x, finer);
    }
};

}  // namespace
}  // namespace weft

#endif
