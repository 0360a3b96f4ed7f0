// The thin matrix product: a few rows of x against all rows of a weight that is read once, as it lies in memory.
//
// Each result is one dot product in one fixed order, so a row of x gives the same result alone as among others.
#pragma once

#include "amx.h"
#include "memory.h"
#include "simd.h"
#include "threads.h"

namespace weft {
namespace {

constexpr int64_t kPrefetchBytes = 2048;

// out[m][n] = dot(x row m, weight row n). The accumulators of a block fit the registers.
template <class T, int M, int N>
WEFT_INLINE void dot_block(const T* x, const T* weight, int64_t inputs, float (*out)[N]) {
    typedef Lanes<T, true> L;
    vf acc[M][N] = {};
    int64_t k = 0;
    for (; k + L::step <= inputs; k += L::step) {
        typename L::vec w[N];
        for (int n = 0; n < N; n++) {
            const T* at = weight + n * inputs + k;
            // A row ends after a few thousand bytes, where the hardware's prefetcher has to start anew.
            __builtin_prefetch((const char*)at + kPrefetchBytes * N);
            w[n] = L::get(at);
        }
        for (int m = 0; m < M; m++) {
            typename L::vec v = L::get(x + m * inputs + k);
            for (int n = 0; n < N; n++) acc[m][n] = L::multiply_add(v, w[n], acc[m][n]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) out[m][n] = sum(acc[m][n]);
    for (; k < inputs; k++)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) out[m][n] += widen(x[m * inputs + k]) * widen(weight[n * inputs + k]);
}

template <class T, int M, int N>
WEFT_INLINE void linear_block(const LinearArgs& a, int64_t m, int64_t n) {
    float sums[M][N];
    dot_block<T, M, N>((const T*)a.x + m * a.inputs, (const T*)a.weight + n * a.inputs, a.inputs, sums);
    const T *bias = (const T*)a.bias, *residual = (const T*)a.residual;
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            float y = sums[i][j];
            int64_t at = (m + i) * a.outputs + n + j;
            if (bias) y += widen(bias[n + j]);
            if (residual) y += widen(residual[at]);
            narrow((T*)a.out + at, y);
        }
}

template <class T, int N>
WEFT_INLINE void linear_columns(const LinearArgs& a, int64_t n) {
    // The N weight rows stay in the first-level cache while the rows of x pass by.
    constexpr int M = W == 16 ? 4 : 2;
    int64_t m = 0;
    for (; m + M <= a.rows; m += M) linear_block<T, M, N>(a, m, n);
    for (; m < a.rows; m++) linear_block<T, 1, N>(a, m, n);
}

#if WEFT_AMX
// The weight's rows fill tiles as they lie in memory; x is rearranged instead, once per thread. A result is the same
// whatever the other rows of x are.
inline void linear_tiles(const LinearArgs& a) {
    int64_t padded = (a.rows + 15) / 16 * 16, blocks = a.outputs / 32;
    on_threads(threads_for(a.inputs * a.outputs, a.threads), [&](int64_t member, int64_t members) {
        static thread_local Memory memory;
        int32_t* x = (int32_t*)memory.at_least((size_t)(a.inputs / 2 * padded) * 4);
        pack_rows((const bf16*)a.x, a.rows, a.inputs, x, padded);
        TileUnit in_use;
        const int64_t end = blocks * (member + 1) / members;
        for (int64_t block = blocks * member / members; block < end; block++) {
            int64_t n = block * 32;
            const bf16* weight = (const bf16*)a.weight + n * a.inputs;
            for (int64_t m = 0; m < padded; m += 32) {
                alignas(64) float sums[32][32];
                const bf16* next = m == 0 && block + 1 < end ? weight + 32 * a.inputs : nullptr;
                if (m + 16 < padded)
                    tile_columns<2>(weight, next, x + m, padded, a.inputs, sums);
                else
                    tile_columns<1>(weight, next, x + m, padded, a.inputs, sums);
                for (int64_t i = 0; i < least<int64_t>(32, a.rows - m); i++)
                    for (int half = 0; half < 32; half += W) {
                        int64_t at = (m + i) * a.outputs + n + half;
                        vf y = load(&sums[i][half]);
                        if (a.bias) y += load((const bf16*)a.bias + n + half);
                        if (a.residual) y += load((const bf16*)a.residual + at);
                        store((bf16*)a.out + at, y);
                    }
            }
        }
    });
    for (int64_t n = blocks * 32; n < a.outputs; n++) linear_columns<bf16, 1>(a, n);
}
#endif

template <class T>
void linear_rows(const LinearArgs& a) {
#if WEFT_AMX
    if constexpr (sizeof(T) == 2)
        if (a.inputs % 32 == 0 && a.outputs >= 32) return linear_tiles(a);
#endif
    constexpr int N = 4;
    int64_t blocks = (a.outputs + N - 1) / N;
    for_each(threads_for(a.inputs * a.outputs, a.threads), blocks, [&](int64_t block) {
        int64_t n = block * N;
        if (n + N <= a.outputs)
            linear_columns<T, N>(a, n);
        else
            for (; n < a.outputs; n++) linear_columns<T, 1>(a, n);
    });
}

}  // namespace
}  // namespace weft
