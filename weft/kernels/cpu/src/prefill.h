// Attention of rows with many queries: tiles of queries against tiles of entries, after FlashAttention (Dao et al.,
// 2022).
//
// A tile's K and V are copied from their pages once, into the order in which the product reads them, and serve all
// queries and heads of the tile. The tiles of a row lie on a fixed grid, so that its result does not depend on other
// rows or on threads.
#pragma once

#include <cstdlib>

#include "amx.h"
#include "decode.h"

namespace weft {
namespace {

constexpr int kTileEntries = 64;
constexpr int kTileRows = 128;  // stacked query heads, about

// What a product consumes per lane and step: one float, or a pair of bfloat16 where there are instructions for pairs.
template <class T>
struct Unit {
    typedef float type;
    static constexpr int values = 1;
    typedef float element;
    static WEFT_INLINE vf multiply_add(float a, vf b, vf sum) { return b * a + sum; }
};
#if WEFT_BF16
template <>
struct Unit<bf16> {
    typedef int32_t type;
    static constexpr int values = 2;
    typedef bf16 element;
    static WEFT_INLINE vf multiply_add(int32_t a, vf b, vf sum) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)b, (__m512bh)_mm512_set1_epi32(a));
    }
};
#endif

// c[m][n] (+)= sum over k of a[m][k] * b[k][n], in units, for M rows and N vectors of columns.
template <class T, int M, int N, bool Add>
WEFT_INLINE void product_block(const typename Unit<T>::type* a, int64_t a_stride, const typename Unit<T>::type* b,
                               int64_t b_stride, float* c, int64_t c_stride, int64_t depth) {
    vf acc[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) acc[m][n] = Add ? load(c + m * c_stride + n * W) : vf{};
    for (int64_t k = 0; k < depth; k++) {
        vf x[N];
        for (int n = 0; n < N; n++) x[n] = load_raw<vf>(b + k * b_stride + n * W);
        for (int m = 0; m < M; m++) {
            auto y = a[m * a_stride + k];
            for (int n = 0; n < N; n++) acc[m][n] = Unit<T>::multiply_add(y, x[n], acc[m][n]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(c + m * c_stride + n * W, acc[m][n]);
}

template <class T, int M, bool Add>
WEFT_INLINE void product_rows(const typename Unit<T>::type* a, int64_t a_stride, const typename Unit<T>::type* b,
                              int64_t b_stride, float* c, int64_t c_stride, int64_t depth, int64_t columns) {
    constexpr int N = W == 16 ? 4 : 2;
    int64_t n = 0;
    for (; n + N * W <= columns; n += N * W)
        product_block<T, M, N, Add>(a, a_stride, b + n, b_stride, c + n, c_stride, depth);
    for (; n < columns; n += W) product_block<T, M, 1, Add>(a, a_stride, b + n, b_stride, c + n, c_stride, depth);
}

// `columns` is a multiple of W; strides count units, or floats for c. Rows of a and c up to the next multiple of 32 exist.
template <class T, bool Add>
void product(const typename Unit<T>::type* a, int64_t a_stride, const typename Unit<T>::type* b, int64_t b_stride,
             float* c, int64_t c_stride, int64_t rows, int64_t depth, int64_t columns) {
#if WEFT_AMX
    if constexpr (Unit<T>::values == 2)
        if (depth % 16 == 0 && columns % 32 == 0)
            return tile_product<Add>(a, a_stride, b, b_stride, c, c_stride, rows, depth, columns);
#endif
    constexpr int M = W == 4 ? 2 : W == 8 ? 6 : 4;  // with N vectors as many sums as there are registers for, or half
    int64_t m = 0;
    for (; m + M <= rows; m += M)
        product_rows<T, M, Add>(a + m * a_stride, a_stride, b, b_stride, c + m * c_stride, c_stride, depth, columns);
    if constexpr (W == 8)
        for (; m + 2 <= rows; m += 2)
            product_rows<T, 2, Add>(a + m * a_stride, a_stride, b, b_stride, c + m * c_stride, c_stride, depth, columns);
    for (; m < rows; m++)
        product_rows<T, 1, Add>(a + m * a_stride, a_stride, b, b_stride, c + m * c_stride, c_stride, depth, columns);
}

// A tile's memory. One per thread, kept between calls.
template <class T>
struct Tile {
    typedef typename Unit<T>::type unit;
    typedef typename Unit<T>::element element;
    alignas(64) element q[kTileRows * kMaxAttentionDim];
    alignas(64) unit k[kTileEntries * kMaxAttentionDim / Unit<T>::values];
    alignas(64) unit v[kTileEntries * kMaxAttentionDim / Unit<T>::values];
    alignas(64) float scores[kTileRows * kTileEntries];
    alignas(64) element weights[kTileRows * kTileEntries];
    alignas(64) float values[kTileRows * kMaxAttentionDim];
    alignas(64) float maximum[kTileRows + W];
    alignas(64) float total[kTileRows + W];
    const T* rows[kTileEntries];
};

// Where the entries of a tile lie. Entries past `count`, and those that nobody sees (bit clear), are null.
template <class T>
void find_rows(const AttentionArgs& a, const Row& row, int64_t head, int half, int64_t entry, uint64_t seen,
               const T** rows) {
    for (int i = 0; i < kTileEntries; i++)
        rows[i] = seen >> i & 1 ? entry_at<T>(a, row, head, half, entry + i) : nullptr;
}

template <class T>
WEFT_INLINE const T* zero_row() {
    static const T zeros[kMaxAttentionDim] = {};
    return zeros;
}

// k[d][i]: unit d of entry i. Entries without a row are zeros.
template <class T>
void pack_keys(Tile<T>& tile, int64_t dim) {
    for (int i = 0; i < kTileEntries; i++)
        if (!tile.rows[i]) tile.rows[i] = zero_row<T>();
    constexpr bool widened = sizeof(T) == 2 && Unit<T>::values == 1;
    int64_t d = 0;
#if WEFT_AVX2 || WEFT_AVX512
    for (int64_t words = dim * (int64_t)sizeof(T) / 4; d + W <= words; d += W)
        for (int i = 0; i < kTileEntries; i += W) {
            const int32_t* from[W];
            for (int j = 0; j < W; j++) from[j] = (const int32_t*)tile.rows[i + j] + d;
            if constexpr (widened) {
                alignas(64) int32_t turned[W * W];
                transpose_words(from, turned, W);
                for (int j = 0; j < W; j++) {
                    const vu pair = load_raw<vu>(turned + j * W);
                    float* to = (float*)tile.k + 2 * (d + j) * kTileEntries + i;
                    store(to, (vf)(pair << 16));
                    store(to + kTileEntries, (vf)(pair & 0xffff0000u));
                }
            } else {
                transpose_words(from, (int32_t*)tile.k + d * kTileEntries + i, kTileEntries);
            }
        }
    d *= 4 / (int64_t)sizeof(T);
#endif
    typedef typename Unit<T>::type unit;
    for (d /= Unit<T>::values; d < dim / Unit<T>::values; d++)
        for (int i = 0; i < kTileEntries; i++) {
            unit& to = tile.k[d * kTileEntries + i];
            if constexpr (widened)
                to = widen(tile.rows[i][d]);
            else
                to = ((const unit*)tile.rows[i])[d];
        }
}

// v[i][d] for units of entries i; entries without a row are zeros, because 0 * NaN would leak into the sum.
template <class T>
void pack_values(Tile<T>& tile, int64_t dim) {
    constexpr int values = Unit<T>::values;
    for (int i = 0; i < kTileEntries; i += values) {
        const T* rows[values];
        for (int j = 0; j < values; j++) rows[j] = tile.rows[i + j] ? tile.rows[i + j] : zero_row<T>();
        auto* to = tile.v + i / values * dim;
        if constexpr (values == 1) {
            for (int64_t d = 0; d < dim; d += W) store((float*)to + d, load(rows[0] + d));
        } else {
            for (int64_t d = 0; d < dim; d += W) {
                vu pair = load_halves(rows[0] + d) | load_halves(rows[1] + d) << 16;
                __builtin_memcpy(to + d, &pair, sizeof(pair));
            }
        }
    }
}

// Turns the scores of stacked rows into weights, and scales what was summed before. `seen` goes by stacked row; rows
// are taken W at a time, so that what there is one of per row is computed for W of them at once.
template <class T>
void soften(Tile<T>& tile, int rows, const uint64_t* seen, float scale, int64_t dim) {
    for (int first = 0; first < rows; first += W) {
        const int count = least(W, rows - first);
        vf parts[W];
        for (int i = 0; i < W; i++) parts[i] = all(kNothing);
        for (int i = 0; i < count; i++) {
            float* scores = tile.scores + (first + i) * kTileEntries;
            uint64_t mine = seen[first + i];
            for (int e = 0; e < kTileEntries; e += W) {
                vf x = load(scores + e) * scale;
                if (~mine) x = lanes_of((uint32_t)(mine >> e)) ? x : all(kNothing);
                store(scores + e, x);
                parts[i] = larger(parts[i], x);
            }
        }
        vf before = load(tile.maximum + first), top = larger(before, maxima(parts));
        vf shift = top == kNothing ? vf{} : top;
        vf keep = exponential(before - shift);
        store(tile.maximum + first, top);
        for (int i = 0; i < W; i++) parts[i] = vf{};
        for (int i = 0; i < count; i++) {
            vf by = all(shift[i]);
            for (int e = 0; e < kTileEntries; e += W) {
                vf weight = exponential(load(tile.scores + (first + i) * kTileEntries + e) - by);
                parts[i] += weight;
                store(tile.weights + (first + i) * kTileEntries + e, weight);
            }
        }
        store(tile.total + first, load(tile.total + first) * keep + sums(parts));
        for (int i = 0; i < count; i++) {
            if (keep[i] == 1.0f) continue;
            float* values = tile.values + (first + i) * dim;
            for (int64_t d = 0; d < dim; d += W) store(values + d, load(values + d) * keep[i]);
        }
    }
}

// Queries [first, first + count) of a row, for the heads of one KV head.
template <class T>
void attend_tile(const AttentionArgs& a, int64_t r, int64_t head, int64_t first, int64_t count, Tile<T>& tile) {
    typedef typename Unit<T>::type unit;
#if WEFT_AMX
    TileUnit in_use;
#endif
    const Row row = row_of(*a.batch, r);
    const int64_t dim = a.heads.head_dim, group = a.heads.num_heads / a.heads.num_kv_heads;
    const int rows = (int)(count * group);
    const int64_t units = dim / Unit<T>::values;
    Range ranges[kTileRows], all_seen{row.num_entries, 0};
    for (int64_t i = 0; i < count; i++) {
        Range range = ranges[i] = range_of(*a.batch, row, first + i, a.window);
        if (range.begin >= range.end) continue;
        all_seen.begin = least(all_seen.begin, range.begin);
        all_seen.end = most(all_seen.end, range.end);
    }
    for (int m = 0; m < rows; m++) {
        const T* q = (const T*)a.q + (row.first_token + first + m / group) * a.q_stride +
                     (head * group + m % group) * dim;
        if constexpr (sizeof(*tile.q) == sizeof(T))
            __builtin_memcpy(tile.q + m * dim, q, (size_t)dim * sizeof(T));
        else
            for (int64_t d = 0; d < dim; d += W) store(tile.q + m * dim + d, load(q + d));
        for (int64_t d = 0; d < dim; d += W) store(tile.values + m * dim + d, vf{});
        tile.maximum[m] = kNothing;
        tile.total[m] = 0;
    }
    for (int64_t e = all_seen.begin / kTileEntries * kTileEntries; e < all_seen.end; e += kTileEntries) {
        uint64_t seen[kTileRows], any = 0;
        for (int64_t i = 0; i < count; i++) {
            uint64_t bits = seen_bits(*a.batch, row, ranges[i], first + i, e, kTileEntries);
            any |= bits;
            for (int64_t m = i * group; m < (i + 1) * group; m++) seen[m] = bits;
        }
        if (!any) continue;
        find_rows<T>(a, row, head, 0, e, any, tile.rows);
        pack_keys(tile, dim);
        product<T, false>((const unit*)tile.q, units, tile.k, kTileEntries, tile.scores, kTileEntries, rows, units,
                          kTileEntries);
        soften(tile, rows, seen, a.scale, dim);
        find_rows<T>(a, row, head, 1, e, any, tile.rows);
        pack_values(tile, dim);
        product<T, true>((const unit*)tile.weights, kTileEntries / Unit<T>::values, tile.v, dim, tile.values, dim, rows,
                         kTileEntries / Unit<T>::values, dim);
    }
    for (int m = 0; m < rows; m++) {
        T* to = (T*)a.out + ((row.first_token + first + m / group) * a.heads.num_heads + head * group + m % group) * dim;
        float scale = tile.total[m] == 0 ? 0.0f : 1.0f / tile.total[m];
        for (int64_t d = 0; d < dim; d += W) store(to + d, load(tile.values + m * dim + d) * scale);
    }
}

}  // namespace
}  // namespace weft
