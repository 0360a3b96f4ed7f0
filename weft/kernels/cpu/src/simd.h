// Vectors of floats at the width of the level that is being compiled, and conversions from and to bfloat16.
//
// The compiler's vector types give arithmetic at every level from one source; intrinsics appear only where an
// instruction has no operator (bfloat16 dot products, transposes). Everything has internal linkage: the same source is
// compiled several times with different instruction sets, and the linker must never merge two of them. For the same
// reason no templates of the standard library are used.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "abi.h"

namespace weft {
namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define WEFT_AVX512 1
#if defined(__AVX512BF16__)
#define WEFT_BF16 1  // dot products of pairs
#endif
#if defined(__AMX_BF16__)
#define WEFT_AMX 1
#endif
constexpr int W = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#define WEFT_AVX2 1
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));

#define WEFT_INLINE inline __attribute__((always_inline))

template <class T>
WEFT_INLINE T least(T a, T b) {
    return a < b ? a : b;
}
template <class T>
WEFT_INLINE T most(T a, T b) {
    return a > b ? a : b;
}

template <bool First, class A, class B>
struct Choose {
    typedef A type;
};
template <class A, class B>
struct Choose<false, A, B> {
    typedef B type;
};

WEFT_INLINE vf all(float x) { return x - vf{}; }
WEFT_INLINE vi all_int(int32_t x) { return x - vi{}; }

template <class V, class T>
WEFT_INLINE V load_raw(const T* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}

WEFT_INLINE vf load(const float* p) { return load_raw<vf>(p); }
// W values of 16 bits, each in the low half of a lane.
WEFT_INLINE vu load_halves(const bf16* p) {
#if WEFT_AVX512
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));  // the compiler's own takes five
#else
    return __builtin_convertvector(load_raw<vh>(p), vu);
#endif
}
WEFT_INLINE vf load(const bf16* p) { return (vf)(load_halves(p) << 16); }
WEFT_INLINE vf load(const int8_t* p) {
#if WEFT_AVX512
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif WEFT_AVX2
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(load_raw<vb>(p), vi), vf);
#endif
}
WEFT_INLINE void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof(v)); }

// Round to nearest, ties to even; the payload of a NaN is not kept.
WEFT_INLINE vu rounded_bits(vf v) {
    vu bits = (vu)v;
    vu up = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (v == v ? up : vu{} + 0x7fc00000u) >> 16;
}
WEFT_INLINE void store(bf16* p, vf v) {
#if WEFT_BF16
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    __builtin_memcpy(p, &h, sizeof(h));
#elif WEFT_AVX512
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)rounded_bits(v)));
#else
    vh h = __builtin_convertvector(rounded_bits(v), vh);
    __builtin_memcpy(p, &h, sizeof(h));
#endif
}

WEFT_INLINE float widen(float x) { return x; }
WEFT_INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}
WEFT_INLINE void narrow(float* p, float x) { *p = x; }
WEFT_INLINE void narrow(bf16* p, float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    p->bits = x == x ? (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : 0x7fc0;
}

// The value that storing as T and loading again gives.
WEFT_INLINE vf as_stored(const float*, vf v) { return v; }
WEFT_INLINE vf as_stored(const bf16*, vf v) {
#if WEFT_BF16
    __m256i h = (__m256i)_mm512_cvtneps_pbh((__m512)v);
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#else
    return (vf)(rounded_bits(v) << 16);
#endif
}
template <class T>
WEFT_INLINE float as_stored(float x) {
    T stored;
    narrow(&stored, x);
    return widen(stored);
}

WEFT_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }

WEFT_INLINE float sum(vf v) {
#if WEFT_AVX512
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < W; i++) s += v[i];
    return s;
#endif
}
WEFT_INLINE float maximum(vf v) {
#if WEFT_AVX512
    return _mm512_reduce_max_ps((__m512)v);
#elif WEFT_AVX2
    __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
    float m = v[0];
    for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

#if WEFT_AVX512
// Lane i holds all lanes of v[i] joined by `op`: a tree of W - 1 shuffled operations instead of W separate reductions.
template <class Op>
WEFT_INLINE vf joined(const vf* v, Op op) {
    __m512 a[8], b[4];
    for (int i = 0; i < 8; i++) {
        __m512 x = (__m512)v[2 * i], y = (__m512)v[2 * i + 1];
        a[i] = op(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    }
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    // b[i] holds, in each 128-bit part, the results for v[4 i .. 4 i + 3] over that part.
    __m512 c = op(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    __m512 d = op(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    return (vf)op(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
}
#endif

// Lane i holds the sum of v[i].
WEFT_INLINE vf sums(const vf* v) {
#if WEFT_AVX512
    return joined(v, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); });
#elif WEFT_AVX2
    __m256 a[4];
    for (int i = 0; i < 4; i++) a[i] = _mm256_hadd_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
    __m256 b = _mm256_hadd_ps(a[0], a[1]), c = _mm256_hadd_ps(a[2], a[3]);
    return (vf)_mm256_add_ps(_mm256_permute2f128_ps(b, c, 0x20), _mm256_permute2f128_ps(b, c, 0x31));
#else
    vf r;
    for (int i = 0; i < W; i++) r[i] = sum(v[i]);
    return r;
#endif
}

// Lane i holds the largest value of v[i].
WEFT_INLINE vf maxima(const vf* v) {
#if WEFT_AVX512
    return joined(v, [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); });
#elif WEFT_AVX2
    __m256 a[4], b[2];
    for (int i = 0; i < 4; i++) {
        __m256 x = (__m256)v[2 * i], y = (__m256)v[2 * i + 1];
        a[i] = _mm256_max_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
    }
    for (int i = 0; i < 2; i++) {
        __m256d x = _mm256_castps_pd(a[2 * i]), y = _mm256_castps_pd(a[2 * i + 1]);
        b[i] = _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    return (vf)_mm256_max_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
#else
    vf r;
    for (int i = 0; i < W; i++) r[i] = maximum(v[i]);
    return r;
#endif
}

// All ones in the lanes whose bit is set.
WEFT_INLINE vi lanes_of(uint32_t bits) {
    vi iota;
    for (int i = 0; i < W; i++) iota[i] = i;
    return ((all_int((int32_t)bits) >> iota) & 1) != 0;
}

// e**x to within a few units in the last place; exactly 0 where that is far below the smallest normal number, and
// infinity where it is (about) too large.
WEFT_INLINE vf exponential(vf x) {
#if WEFT_AVX512
    vf clamped = (vf)_mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)x);  // in this order a NaN stays one
    vf n = (vf)_mm512_roundscale_ps((__m512)(clamped * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT);
#else
    const vf magic = all(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
    vf clamped = x < -87.0f ? all(-87.0f) : x;
    clamped = clamped > 88.3f ? all(88.3f) : clamped;
    vf n = (clamped * 1.44269504088896341f + magic) - magic;
#endif
    vf r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    vf e = p * (r * r) + r + 1.0f;
#if WEFT_AVX512
    // Masked, not just small: a result below the normal numbers costs a hundred cycles.
    __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(kept, (__m512)e, (__m512)n);
#else
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    vf result = x < -87.0f ? vf{} : e * (vf)power;
    return x > 88.3f ? all(__builtin_inff()) : result;
#endif
}
WEFT_INLINE float exponential(float x) { return exponential(all(x))[0]; }

// gate / (1 + e**-gate) * up.
WEFT_INLINE vf gated(vf gate, vf up) {
#if WEFT_AVX512
    __m512 divisor = (__m512)(exponential(-gate) + 1.0f), estimate = _mm512_rcp14_ps(divisor);
    // One step of Newton's method; a division would take as long as all the rest. It cannot be done with infinity,
    // where nothing is left of the gate. A NaN stays one.
    __mmask16 some = _mm512_cmp_ps_mask((__m512)gate, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    __m512 exact = _mm512_maskz_mul_ps(some, estimate, _mm512_fnmadd_ps(divisor, estimate, _mm512_set1_ps(2.0f)));
    return gate * (vf)exact * up;
#else
    return gate / (1.0f + exponential(-gate)) * up;
#endif
}

#if WEFT_AVX2
// to[i][j] = from[j][i] for W x W words; strides in words.
inline void transpose_words(const int32_t* const* from, int32_t* to, int64_t to_stride) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_si256((const __m256i*)from[i]);
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        a[4 * i] = _mm256_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm256_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm256_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm256_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    // a[4 i + j] holds, in its 128-bit part p, column 4 p + j of rows 4 i .. 4 i + 3.
    for (int j = 0; j < 4; j++) {
        _mm256_storeu_si256((__m256i*)(to + j * to_stride), _mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
        _mm256_storeu_si256((__m256i*)(to + (4 + j) * to_stride), _mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
    }
}
#elif WEFT_AVX512
// to[i][j] = from[j][i] for W x W words; strides in words.
inline void transpose_words(const int32_t* const* from, int32_t* to, int64_t to_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from[i]);
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    // a[4 i + j] holds, in its 128-bit part p, column 4 p + j of rows 4 i .. 4 i + 3.
    for (int j = 0; j < 4; j++) {
        __m512i x = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), y = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        __m512i z = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd), w = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_si512(to + (0 + j) * to_stride, _mm512_shuffle_i32x4(x, y, 0x88));
        _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(x, y, 0xdd));
        _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(z, w, 0x88));
        _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(z, w, 0xdd));
    }
}
#endif

// How a dot product reads its operands: `step` elements at a time into a `vec`, multiplied and added into W partial
// sums. Wide is for sizes that are a multiple of 2 W.
template <class T, bool Wide>
struct Lanes {
    typedef vf vec;
    static constexpr int step = W;
    static WEFT_INLINE vec get(const T* p) { return load(p); }
    static WEFT_INLINE vf multiply_add(vec a, vec b, vf sum) { return a * b + sum; }
};
#if WEFT_BF16
template <>
struct Lanes<bf16, true> {
    typedef __m512bh vec;
    static constexpr int step = 2 * W;
    static WEFT_INLINE vec get(const bf16* p) { return (vec)_mm512_loadu_si512(p); }
    static WEFT_INLINE vf multiply_add(vec a, vec b, vf sum) { return (vf)_mm512_dpbf16_ps((__m512)sum, a, b); }
};
#endif

}  // namespace
}  // namespace weft
