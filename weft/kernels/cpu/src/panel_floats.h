// A panel of a packed weight times rows of x, in floats: for dtypes without dot products of their own at this level.
//
// What a step of the weight is, for its two blocks of 16 outputs:
//   float32   [2][32][16]: for each input, 16 outputs;
//   bfloat16  [2][16][32]: 16 pairs of inputs for each of 16 outputs in turn, so that a shift and a mask widen a pair.
// Weights become floats in registers on the way to a multiply-add; those that many rows meet become floats first, a few
// steps at a time in the cache.
#pragma once

#include "packed.h"

#if WEFT_AVX2 || WEFT_AVX512

namespace weft {
namespace {

constexpr int64_t kHalfSize = 16 * kStep;  // elements of a block of 16 outputs in a step

// Input `i`, 0 or 1, of a pair of inputs, for W outputs: vector `n` of a step. `pair` is where the pair lies in the
// step's first vector; from one pair to the next it is `kPairSize` elements.
constexpr int64_t kPairSize = 32;
WEFT_INLINE vf outputs_of(const float* pair, int i, int n) {
    return load(pair + n * W / 16 * kHalfSize + n * W % 16 + i * 16);
}
WEFT_INLINE vf outputs_of(const bf16* pair, int i, int n) {
    const vu both = load_raw<vu>(pair + n * W / 16 * kHalfSize + n * W % 16 * 2);
    return (vf)(i ? both & 0xffff0000u : both << 16);
}

// T is the type of x, of a weight and of the result.
template <class T>
struct Floats {
    typedef T Stored;
    typedef float Value;
    struct InUse {};
    static constexpr int64_t kInputs = kStep;
    static constexpr int64_t kRowsAtOnce = W == 16 ? 12 : 6;  // accumulators of 2 vectors each fill the registers
    static constexpr bool kEqualGroups = true;
    static constexpr int64_t kBlockSteps = 4;                 // in floats half of a first-level cache of 32 KiB
    static constexpr int64_t kBlockBytes = 512 << 10;
    static constexpr int64_t kExpandGroups = 3;  // with fewer groups of rows, to widen in registers costs less
    // One group reads every line once: memory is fetched so little ahead of its turn, rather than a panel. Few reads can
    // be under way to the first-level cache, so lines are on their way to the second before.
    static constexpr int64_t kNearBytes = 1 << 10;
    static constexpr int64_t kFarBytes = kNearBytes + (8 << 10);
    static constexpr bool kTakesWhenFree = true;
    static constexpr bool kWritesBeside = false;

    static constexpr bool kIsNarrow = sizeof(T) < sizeof(float);
    static constexpr int64_t kStepBytes = kStepSize * (int64_t)sizeof(T);
    static constexpr int64_t kExpandedBytes = kIsNarrow ? kBlockSteps * kStepSize * (int64_t)sizeof(float) : 0;
    static bool expands(int64_t groups) { return kIsNarrow && groups >= kExpandGroups; }
    static bool takes_whole(int64_t groups) { return groups == 1; }
    static void expand_steps(const char* from, char* expanded, int64_t steps) {
        const T* step = (const T*)from;
        float* to = (float*)expanded;
        for (int64_t s = 0; s < steps; s++, step += kStepSize, to += kStepSize)
            for (int64_t pair = 0; pair < kHalfSize; pair += kPairSize)
                for (int n = 0; n < kVectors; n++)
                    for (int i = 0; i < 2; i++)
                        store(to + pair + n * W / 16 * kHalfSize + n * W % 16 + i * 16, outputs_of(step + pair, i, n));
    }

    // Rearranges a weight [outputs, inputs]; both are multiples of 32.
    static void pack(const T* weight, T* packed, int64_t outputs, int64_t inputs, int threads) {
        constexpr int64_t run = kIsNarrow ? 2 : 1;  // inputs of an output that lie side by side
        for_each(threads, outputs / kPanel, [&](int64_t panel) {
            T* to = packed + panel * kPanel * inputs;
            for (int64_t s = 0; s < inputs; s += kStep)
                for (int64_t half = 0; half < kPanel; half += 16) {
                    const T* from = weight + (panel * kPanel + half) * inputs + s;
                    for (int64_t k = 0; k < kStep; k += run)
                        for (int64_t output = 0; output < 16; output++, to += run)
                            __builtin_memcpy(to, from + output * inputs + k, run * sizeof(T));
                }
        });
    }

    static const float* rearrange(const LinearArgs& a, const RowPart<Floats>& r, float* to) {
        const T* x = (const T*)a.x + r.first * a.inputs;
        const int64_t each = r.at_once();
        for (int64_t i = 0; i < r.rows; i += each)
            with_count<kRowsAtOnce>(least(each, r.rows - i), [&](auto counted) {
                rows_as_floats<decltype(counted)::value>(x + i * a.inputs, a.inputs, to + i * a.inputs);
            });
        return to;
    }

    // M rows of x as [input][row].
    template <int M>
    static void rows_as_floats(const T* x, int64_t inputs, float* to) {
        for (int64_t k = 0; k < inputs; k += W) {
            alignas(64) float rows[M][W];
            for (int m = 0; m < M; m++) store(rows[m], load(x + m * inputs + k));
            for (int i = 0; i < W; i++)
                for (int m = 0; m < M; m++) to[(k + i) * M + m] = rows[m][i];
        }
    }

    // Not inlined: it holds a loop for each number of rows.
    static __attribute__((noinline)) void multiply(const float* x, int64_t step, int64_t count, int64_t, bool expanded,
                                     const PanelPart& part) {
        const float* rows = x + step * kStep * count;
        with_count<kRowsAtOnce>(count, [&](auto counted) {
            constexpr int M = decltype(counted)::value;
            if (expanded)
                panel<M, false>(rows, (const float*)part.weight, part);
            else if (part.near)
                panel<M, true>(rows, (const T*)part.weight, part);
            else
                panel<M, false>(rows, (const T*)part.weight, part);
        });
    }

    // Input `i` of a pair, of M rows and N vectors. What there is less of stays in registers.
    template <int M, int N, class Weight>
    static WEFT_INLINE void multiply_add(const float* x, const Weight* pair, int i, vf (*acc)[N]) {
        vf kept[M < N ? M : N];
        if constexpr (M < N) {
            for (int m = 0; m < M; m++) kept[m] = all(x[m]);
            for (int n = 0; n < N; n++) {
                vf y = outputs_of(pair, i, n);
                for (int m = 0; m < M; m++) acc[m][n] = y * kept[m] + acc[m][n];
            }
        } else {
            for (int n = 0; n < N; n++) kept[n] = outputs_of(pair, i, n);
            for (int m = 0; m < M; m++) {
                vf y = all(x[m]);
                for (int n = 0; n < N; n++) acc[m][n] = kept[n] * y + acc[m][n];
            }
        }
    }

    // For M rows of x: as many of the panel's vectors at once as there are registers for their sums. `Near` lines are
    // fetched a few at a time between the multiply-adds: a core waits when it has too many reads under way at once.
    template <int M, bool Near, class Weight>
    static void panel(const float* x, const Weight* weight, const PanelPart& part) {
        constexpr int N = kVectors > 2 && M <= kRowsAtOnce / 2 ? kVectors : 2;
        for (int first = 0; first < kVectors; first += N) {
            vf acc[M][N];
            for (int m = 0; m < M; m++)
                for (int n = 0; n < N; n++)
                    acc[m][n] = part.add ? load(part.sums + m * kPanel + (first + n) * W) : vf{};
            for (int64_t s = 0; s < part.steps; s++) {
                if (!Near && first == 0) fetch_beside(part, s);
                const char* ahead = part.weight + kNearBytes + s * kStepSize * (int64_t)sizeof(Weight);
                const Weight* pair = weight + s * kStepSize + first * W / 16 * kHalfSize;
                const float* from = x + s * kStep * M;
                for (int64_t k = 0; k < kStep; k += 2, pair += kPairSize, from += 2 * M) {
                    if (Near && first == 0)
                        for (size_t line = 0; line < sizeof(Weight); line++, ahead += 64) {
                            __builtin_prefetch(ahead, 0, 3);
                            __builtin_prefetch(ahead + kFarBytes - kNearBytes, 0, 2);
                        }
                    multiply_add<M, N>(from, pair, 0, acc);
                    multiply_add<M, N>(from + M, pair, 1, acc);
                }
            }
            for (int m = 0; m < M; m++)
                for (int n = 0; n < N; n++) store(part.sums + m * kPanel + (first + n) * W, acc[m][n]);
        }
    }
};

}  // namespace
}  // namespace weft

#endif
