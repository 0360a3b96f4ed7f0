// Blocks of 16 entries in decode attention, in bfloat16 with AVX-512: scores by dot products of pairs, or by tiles, and
// sums of pairs of weighted values.
#pragma once

#include "amx.h"
#include "fetch.h"

#if WEFT_BF16

namespace weft {
namespace {

// scores[m][0..16) = dot(q[m], entry i of k), before scaling. `packed_q` is q as tiles read it.
#if WEFT_AMX
inline void score_entries(const bf16* const*, const int32_t* packed_q, int count, const bf16* k, int64_t dim,
                          float* scores, int64_t stride, Fetch& fetch) {
    alignas(64) float sums[16][16];
    TileUnit::barrier();
    _tile_zero(0);
    for (int64_t d = 0; d < dim; d += 32) {
        _tile_loadd(4, k + d, dim * 2);
        _tile_loadd(5, packed_q + d / 2 * 16, 64);
        _tile_dpbf16ps(0, 4, 5);
        fetch.lines(16);
    }
    _tile_stored(0, sums, 64);
    TileUnit::barrier();
    const __m512i column = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                              _mm512_set1_epi32(16));
    for (int m = 0; m < count; m++)
        _mm512_storeu_ps(scores + m * stride, _mm512_i32gather_ps(column, &sums[0][m], 4));
}
#else
inline void score_entries(const bf16* const* q, const int32_t*, int count, const bf16* k, int64_t dim, float* scores,
                          int64_t stride, Fetch& fetch) {
    const int lines = (15 + count) / count;  // 16 entries are as many lines for each 32 dimensions
    for (int m = 0; m < count; m++) {
        vf acc[W] = {};
        for (int64_t d = 0; d < dim; d += 2 * W) {
            __m512bh x = (__m512bh)_mm512_loadu_si512(q[m] + d);
            for (int i = 0; i < W; i++)
                acc[i] = (vf)_mm512_dpbf16_ps((__m512)acc[i], x, (__m512bh)_mm512_loadu_si512(k + i * dim + d));
            fetch.lines(lines);
        }
        store(scores + m * stride, sums(acc));
    }
}
#endif

// values[m] += sum over 16 entries of weights[m][i] * v[i], for M rows and 32 * D dimensions. Values are kept in the
// order in which pairs of entries interleave: see `write_values`. With `All` false, entries whose bit is clear are not read.
template <int M, int D, bool All>
WEFT_INLINE void add_entries(const bf16* v, int64_t dim, const bf16* weights, int64_t weights_stride, uint32_t seen,
                             float* values, int64_t stride, Fetch& fetch) {
    __m512 acc[M][2 * D];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < 2 * D; j++) acc[m][j] = _mm512_loadu_ps(values + m * stride + j * W);
    for (int i = 0; i < 16; i += 2) {
        __m512bh w[M];
        for (int m = 0; m < M; m++) {
            int32_t pair;
            __builtin_memcpy(&pair, weights + m * weights_stride + i, 4);
            w[m] = (__m512bh)_mm512_set1_epi32(pair);
        }
        for (int d = 0; d < D; d++) {
            __m512i a, b;
            if constexpr (All) {
                a = _mm512_loadu_si512(v + i * dim + d * 32);
                b = _mm512_loadu_si512(v + (i + 1) * dim + d * 32);
            } else {
                a = _mm512_maskz_loadu_epi32((__mmask16)-(int)(seen >> i & 1), v + i * dim + d * 32);
                b = _mm512_maskz_loadu_epi32((__mmask16)-(int)(seen >> (i + 1) & 1), v + (i + 1) * dim + d * 32);
            }
            __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
            for (int m = 0; m < M; m++) {
                acc[m][2 * d] = _mm512_dpbf16_ps(acc[m][2 * d], low, w[m]);
                acc[m][2 * d + 1] = _mm512_dpbf16_ps(acc[m][2 * d + 1], high, w[m]);
            }
        }
        fetch.lines(8);
    }
    for (int m = 0; m < M; m++)
        for (int j = 0; j < 2 * D; j++) _mm512_storeu_ps(values + m * stride + j * W, acc[m][j]);
}

template <int M, int D>
WEFT_INLINE void add_block(const bf16* v, int64_t dim, const bf16* weights, int64_t weights_stride, uint32_t seen,
                           float* values, int64_t stride, Fetch& fetch) {
    int64_t d = 0;
    for (; d + 32 * D <= dim; d += 32 * D)
        if (seen == 0xffff)
            add_entries<M, D, true>(v + d, dim, weights, weights_stride, seen, values + d, stride, fetch);
        else
            add_entries<M, D, false>(v + d, dim, weights, weights_stride, seen, values + d, stride, fetch);
    for (; d < dim; d += 32)
        add_entries<M, 1, false>(v + d, dim, weights, weights_stride, seen, values + d, stride, fetch);
}

// values[m] += sum over 16 entries of weights[m][i] * v[i], for `count` rows.
inline void add_rows(const bf16* v, int64_t dim, const bf16* weights, int64_t weights_stride, int count, uint32_t seen,
                     float* values, int64_t stride, Fetch& fetch) {
    int m = 0;
    for (; m + 4 <= count; m += 4, weights += 4 * weights_stride, values += 4 * stride)
        add_block<4, 2>(v, dim, weights, weights_stride, seen, values, stride, fetch);
    for (; m + 2 <= count; m += 2, weights += 2 * weights_stride, values += 2 * stride)
        add_block<2, 4>(v, dim, weights, weights_stride, seen, values, stride, fetch);
    for (; m < count; m++, weights += weights_stride, values += stride)
        add_block<1, 4>(v, dim, weights, weights_stride, seen, values, stride, fetch);
}

// Writes scaled values in the order of their dimensions.
WEFT_INLINE void write_values(const float* values, float scale, int64_t dim, bf16* to) {
    // The first 16 values are dimensions 0-3, 8-11, 16-19, 24-27; the others lie between them.
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512 factor = _mm512_set1_ps(scale);
    for (int64_t d = 0; d < dim; d += 32) {
        __m512 low = _mm512_mul_ps(_mm512_loadu_ps(values + d), factor);
        __m512 high = _mm512_mul_ps(_mm512_loadu_ps(values + d + 16), factor);
        _mm512_storeu_si512(to + d, _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
    }
}

}  // namespace
}  // namespace weft

#endif
