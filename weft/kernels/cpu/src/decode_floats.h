// Blocks of 16 entries in decode attention, in floats: where there are no dot products for the dtype.
//
// Two heads of a group share what is widened from K and V. Elements are taken as `load_pair` gives them, q too.
#pragma once

#include "fetch.h"

namespace weft {
namespace {

// Reads 2 W values as two vectors. For bfloat16 these are the even and the odd ones, which costs half the instructions
// of keeping the order; `write_out` undoes it once per row.
WEFT_INLINE void load_pair(const float* v, vf& a, vf& b) {
    a = load(v);
    b = load(v + W);
}
WEFT_INLINE void load_pair(const bf16* v, vf& a, vf& b) {
    vu raw = load_raw<vu>(v);
    a = (vf)(raw << 16);
    b = (vf)(raw & 0xffff0000u);
}

// scores[m][i] = dot(q[m], entry i of k) for M heads and 16 entries, before scaling.
template <class T, int M>
WEFT_INLINE void score_heads(const float* q, int64_t q_stride, const T* k, int64_t dim, float* scores, int64_t stride,
                             Fetch& fetch) {
    constexpr int E = W / M;  // entries at once: as many sums as there are lanes
    for (int e = 0; e < 16; e += E) {
        vf acc[W] = {};
        for (int64_t d = 0; d < dim; d += 2 * W) {
            vf x[M][2];
            for (int m = 0; m < M; m++)
                for (int j = 0; j < 2; j++) x[m][j] = load(q + m * q_stride + d + j * W);
            for (int i = 0; i < E; i++) {
                vf y[2];
                load_pair(k + (e + i) * dim + d, y[0], y[1]);
                for (int j = 0; j < 2; j++)
                    for (int m = 0; m < M; m++) acc[m * E + i] = x[m][j] * y[j] + acc[m * E + i];
            }
        }
        const vf found = sums(acc);
        for (int m = 0; m < M; m++) __builtin_memcpy(scores + m * stride + e, (const float*)&found + m * E, E * 4);
        fetch.lines((int)(E * dim * (int64_t)sizeof(T) / 64));
    }
}

template <class T>
void score_entries(const float* q, int64_t q_stride, int count, const T* k, int64_t dim, float* scores, int64_t stride,
                   Fetch& fetch) {
    int m = 0;
    for (; m + 2 <= count; m += 2)
        score_heads<T, 2>(q + m * q_stride, q_stride, k, dim, scores + m * stride, stride, fetch);
    if (m < count) score_heads<T, 1>(q + m * q_stride, q_stride, k, dim, scores + m * stride, stride, fetch);
}

// values[m] += sum over 16 entries of weights[m][i] * v[i], for M rows and N vectors of dimensions. With `All` false,
// entries whose bit is clear are not read.
template <class T, int M, int N, bool All>
WEFT_INLINE void add_entries(const T* v, int64_t dim, const float* weights, int64_t weights_stride, uint32_t seen,
                             float* values, int64_t stride) {
    vf acc[M][N];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < N; j++) acc[m][j] = load(values + m * stride + j * W);
    for (int i = 0; i < 16; i++) {
        if (!All && !(seen >> i & 1)) continue;
        for (int j = 0; j < N; j += 2) {
            vf x[2];
            load_pair(v + i * dim + j * W, x[0], x[1]);
            for (int m = 0; m < M; m++)
                for (int h = 0; h < 2; h++) acc[m][j + h] = x[h] * weights[m * weights_stride + i] + acc[m][j + h];
        }
    }
    for (int m = 0; m < M; m++)
        for (int j = 0; j < N; j++) store(values + m * stride + j * W, acc[m][j]);
}

template <class T, int M, int N>
WEFT_INLINE void add_block(const T* v, int64_t dim, const float* weights, int64_t weights_stride, uint32_t seen,
                           float* values, int64_t stride, Fetch& fetch) {
    int64_t d = 0;
    for (; d + N * W <= dim; d += N * W) {
        if (seen == 0xffff)
            add_entries<T, M, N, true>(v + d, dim, weights, weights_stride, seen, values + d, stride);
        else
            add_entries<T, M, N, false>(v + d, dim, weights, weights_stride, seen, values + d, stride);
        fetch.lines(N * W * 16 * (int)sizeof(T) / 64);
    }
    for (; d < dim; d += 2 * W)
        add_entries<T, M, 2, false>(v + d, dim, weights, weights_stride, seen, values + d, stride);
}

template <class T>
void add_rows(const T* v, int64_t dim, const float* weights, int64_t weights_stride, int count, uint32_t seen,
              float* values, int64_t stride, Fetch& fetch) {
    int m = 0;
    for (; m + 2 <= count; m += 2, weights += 2 * weights_stride, values += 2 * stride)
        add_block<T, 2, 4>(v, dim, weights, weights_stride, seen, values, stride, fetch);
    if (m < count) add_block<T, 1, 8>(v, dim, weights, weights_stride, seen, values, stride, fetch);
}

}  // namespace
}  // namespace weft
