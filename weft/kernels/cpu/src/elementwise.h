// Operations that touch each element once: RMS normalisation, the gated activation, and rotation with the KV write.
//
// Each reproduces the reference's roundings: a normalised value is rounded to the dtype before it meets its weight.
#pragma once

#include <cmath>

#include "simd.h"
#include "threads.h"

namespace weft {
namespace {

constexpr int kMaxHeadDim = 512;

template <class T>
WEFT_INLINE float inverse_rms(const T* x, int64_t size, float eps) {
    vf s0{}, s1{}, s2{}, s3{};
    int64_t i = 0;
    for (; i + 4 * W <= size; i += 4 * W) {
        vf a = load(x + i), b = load(x + i + W), c = load(x + i + 2 * W), d = load(x + i + 3 * W);
        s0 += a * a;
        s1 += b * b;
        s2 += c * c;
        s3 += d * d;
    }
    float total = sum((s0 + s1) + (s2 + s3));
    for (; i < size; i++) total += widen(x[i]) * widen(x[i]);
    return 1.0f / __builtin_sqrtf(total / (float)size + eps);
}

// `out` may be `x`, and of another type (float keeps what T would store, for a computation that goes on).
template <class T, class Out>
WEFT_INLINE void normalise(const T* x, const T* weight, Out* out, int64_t size, float eps) {
    float scale = inverse_rms(x, size, eps);
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        vf y = as_stored(x, load(x + i) * scale) * load(weight + i);
        store(out + i, sizeof(Out) == sizeof(T) ? y : as_stored(x, y));  // of type T, `store` rounds
    }
    for (; i < size; i++) narrow(out + i, as_stored<T>(as_stored<T>(widen(x[i]) * scale) * widen(weight[i])));
}

template <class T>
void rms_norm_rows(const T* x, const T* weight, T* out, int64_t rows, int64_t size, float eps, int threads) {
    for_each(threads_for(rows * size, threads), rows,
             [&](int64_t row) { normalise(x + row * size, weight, out + row * size, size, eps); });
}

template <class T>
void silu_mul_rows(const T* gate_up, T* out, int64_t rows, int64_t size, int threads) {
    for_each(threads_for(4 * rows * size, threads), rows, [&](int64_t row) {
        const T *gate = gate_up + 2 * row * size, *up = gate + size;
        T* to = out + row * size;
        int64_t i = 0;
        for (; i + W <= size; i += W) store(to + i, gated(load(gate + i), load(up + i)));
        for (; i < size; i++) narrow(to + i, gated(all(widen(gate[i])), all(widen(up[i])))[0]);
    });
}

// Turns component j with component j + size / 2.
template <class T>
WEFT_INLINE void turn(const float* x, const float* cos, const float* sin, T* out, int64_t size) {
    int64_t half = size / 2, j = 0;
    for (; j + W <= half; j += W) {
        vf left = load(x + j), right = load(x + half + j), c = load(cos + j), s = load(sin + j);
        store(out + j, left * c - right * s);
        store(out + half + j, right * c + left * s);
    }
    for (; j < half; j++) {
        float left = x[j], right = x[half + j];
        narrow(out + j, left * cos[j] - right * sin[j]);
        narrow(out + half + j, right * cos[j] + left * sin[j]);
    }
}

template <class T>
WEFT_INLINE void widen_all(const T* x, float* out, int64_t size) {
    int64_t i = 0;
    for (; i + W <= size; i += W) store(out + i, load(x + i));
    for (; i < size; i++) out[i] = widen(x[i]);
}

template <class T>
void rotate_and_store_tokens(const RotateArgs& args) {
    const Batch& batch = *args.batch;
    const Heads& heads = args.heads;
    const int64_t dim = heads.head_dim, half = dim / 2;
    const int64_t width = (heads.num_heads + 2 * heads.num_kv_heads) * dim;
    const int64_t head_stride = batch.page_size * dim;
    const T *q_weight = (const T*)args.q_weight, *k_weight = (const T*)args.k_weight;
    for_each(threads_for(4 * batch.num_tokens * width, args.threads), batch.num_tokens, [&](int64_t token) {
        alignas(64) float head[kMaxHeadDim];
        T* from = (T*)args.qkv + token * width;
        const float *cos = args.cos + token * half, *sin = args.sin + token * half;
        auto prepare = [&](const T* x, const T* weight) {
            if (weight)
                normalise(x, weight, head, dim, args.eps);
            else
                widen_all(x, head, dim);
        };
        for (int64_t h = 0; h < heads.num_heads; h++) {
            prepare(from + h * dim, q_weight);
            turn(head, cos, sin, from + h * dim, dim);
        }
        int64_t slot = batch.write_slots[token];
        if (slot < 0) return;
        const T *k = from + heads.num_heads * dim, *v = k + heads.num_kv_heads * dim;
        T* k_to = (T*)args.kv + (slot / batch.page_size) * 2 * heads.num_kv_heads * head_stride +
                  (slot % batch.page_size) * dim;
        T* v_to = k_to + heads.num_kv_heads * head_stride;
        for (int64_t h = 0; h < heads.num_kv_heads; h++) {
            prepare(k + h * dim, k_weight);
            turn(head, cos, sin, k_to + h * head_stride, dim);
            __builtin_memcpy(v_to + h * head_stride, v + h * dim, (size_t)dim * sizeof(T));
        }
    });
}

}  // namespace
}  // namespace weft
