// A panel of a weight in quantized blocks (quant_layout.h) times rows of x, which become 8 bits on the way.
//
// Rows of x are quantized in blocks of 32 inputs, or of 256 for weights whose blocks have 256: each number is the nearest
// multiple (ties to even) of its block's scale, the largest magnitude over 127. For blocks of 32 that scale is then
// rounded to 11 bits, as llama.cpp keeps it (in float16, but with the range of float32). A block without a magnitude of
// 2**-100 or more is zeros; one with an infinity or a NaN gives NaN. `quantized_blocks.quantize_rows` does the same.
//
// A group of M rows is, for each 32 inputs, 64 * M bytes: [8][M][4] numbers, [M] scales, [M] scales times the sum of the
// numbers, and two [M] of minus the offset times the sum of a part's numbers (or of all of them).
#pragma once

#include "packed.h"
#include "quant_dots.h"

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace weft {
namespace {

WEFT_INLINE vf load_float16(const uint16_t* p) {
#if WEFT_AVX512
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif WEFT_AVX2
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vf r;
    for (int i = 0; i < W; i++) r[i] = float16_value(p[i]);
    return r;
#endif
}

WEFT_INLINE vf load_bytes(const uint8_t* p) {
#if WEFT_AVX512
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif WEFT_AVX2
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    typedef uint8_t vbytes __attribute__((vector_size(W)));
    return __builtin_convertvector(__builtin_convertvector(load_raw<vbytes>(p), vi), vf);
#endif
}

// A packed weight as it lies: numbers and scales of 32 inputs, `sub` of a step; vector `n` of a group's.
template <class L>
struct Packed {
    typedef L Layout;
    static constexpr int kStepBytes = L::kBytes;

    static WEFT_INLINE vbyte numbers(const uint8_t* step, int sub, int group, int n) {
        constexpr int kVector = 4 * W;
        const uint8_t* from = step + sub * L::kSubBytes;
        if constexpr (L::kBits == 8) return load_raw<vbyte>(from + group * 128 + n * kVector);
        const vbyte both = load_raw<vbyte>(from + group % 4 * 128 + n * kVector);
        const vbyte low = group < 4 ? both & 15 : (vbyte)((vpair)both >> 4) & 15;
        if constexpr (L::kBits == 4) return low;
        if constexpr (L::kBits == 5) {
            const vpair bits = load_raw<vpair>(from + 512 + n * kVector);
            return low | ((vbyte)(group < 4 ? bits << (4 - group) % 16 : bits >> (group - 4) % 16) & 16);
        }
        const vpair bits = load_raw<vpair>(from + 512 + group % 2 * 128 + n * kVector);
        const int shift = 4 - group / 2 * 2;
        return low | ((vbyte)(shift >= 0 ? bits << shift % 16 : bits >> -shift % 16) & 48);
    }

    static WEFT_INLINE vf scale(const uint8_t* step, int sub, int part, int n) {
        const uint8_t* at = step + kScalesAt<L>;
        if constexpr (L::kZeros) return load((const float*)at + n * W);
        const vf scales = load_float16((const uint16_t*)at + n * W);
        if constexpr (!L::kFactors) return scales;
        if constexpr (L::kMinima) return scales * load_bytes(at + 128 + sub * 32 + n * W);
        return scales * load((const int8_t*)at + 64 + (sub * 2 + part) * 32 + n * W);
    }

    static WEFT_INLINE vf minimum(const uint8_t* step, int sub, int n) {
        const uint8_t* at = step + kScalesAt<L>;
        if constexpr (L::kZeros) return load((const float*)at + n * W) * load_bytes(at + 128 + n * W);
        return load_float16((const uint16_t*)(at + 64) + n * W) * load_bytes(at + 384 + sub * 32 + n * W);
    }
};

// The same with its numbers as bytes and its scales as floats, in the cache: for many rows.
template <class L>
struct Unpacked {
    typedef L Layout;
    static constexpr int kRows = L::kParts + L::kMinima;
    static constexpr int kSubBytes = (int)kSubSize + kRows * 128;
    static constexpr int kStepBytes = L::kInputs / 32 * kSubBytes;

    static WEFT_INLINE vbyte numbers(const uint8_t* step, int sub, int group, int n) {
        return load_raw<vbyte>(step + sub * kSubBytes + group * 128 + n * 4 * W);
    }
    static WEFT_INLINE vf scale(const uint8_t* step, int sub, int part, int n) {
        return load((const float*)(step + sub * kSubBytes + kSubSize) + part * 32 + n * W);
    }
    static WEFT_INLINE vf minimum(const uint8_t* step, int sub, int n) { return scale(step, sub, L::kParts, n); }

    static __attribute__((noinline)) void expand(const uint8_t* from, uint8_t* to, int64_t steps) {
        typedef Packed<L> From;
        for (int64_t s = 0; s < steps; s++, from += L::kBytes)
            for (int sub = 0; sub < L::kInputs / 32; sub++, to += kSubBytes) {
                float* scales = (float*)(to + kSubSize);
                for (int n = 0; n < kVectors; n++) {
                    for (int group = 0; group < 8; group++) {
                        const vbyte numbers = From::numbers(from, sub, group, n);
                        __builtin_memcpy(to + group * 128 + n * 4 * W, &numbers, sizeof(numbers));
                    }
                    for (int part = 0; part < L::kParts; part++)
                        store(scales + part * 32 + n * W, From::scale(from, sub, part, n));
                    if constexpr (L::kMinima) store(scales + L::kParts * 32 + n * W, From::minimum(from, sub, n));
                }
            }
    }
};

// 32 inputs of M rows of x.
template <int M>
struct QuantRows {
    int8_t numbers[8][M][4];
    float scales[M];
    float scaled_sums[M];
    int32_t offsets[2][M];
    char rest[16 * M];
};

// As for `Floats`: one group reads every line once, and lines are fetched so little ahead of their turn.
constexpr int64_t kNearBlocks = 1 << 10;
constexpr int64_t kFarBlocks = kNearBlocks + (4 << 10);

// A group's part of the lines of 32 inputs, which begin at `near` and `far`.
template <class From>
WEFT_INLINE void fetch_ahead(const char* near, const char* far, int group) {
    constexpr int kLines = (From::kStepBytes / (From::Layout::kInputs / 32) + 63) / 64;
    for (int line = kLines * group / 8; line < kLines * (group + 1) / 8; line++) {
        __builtin_prefetch(near + line * 64, 0, 3);
        __builtin_prefetch(far + line * 64, 0, 2);
    }
}

// sums[m][32] (+)= M rows of x times steps of a panel. `Near` lines are fetched a few at a time between the products: a
// core waits when it has too many reads under way at once.
template <class From, int M, bool Near>
__attribute__((noinline)) void quant_panel(const void* x, const PanelPart& part) {
    typedef typename From::Layout L;
    typedef Dots<L> D;
    constexpr int kSubs = L::kInputs / 32, kGroups = 8 / L::kParts;
    constexpr int N = M == 1 && kVectors <= 4 ? kVectors : D::kWide || M <= 3 ? 2 : 1;
    static_assert(sizeof(QuantRows<M>) == 64 * M, "as `BlockProduct` counts");
    for (int first = 0; first < kVectors; first += N) {
        vf acc[M][N];
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                acc[m][n] = part.add ? load(part.sums + m * kPanel + (first + n) * W) : vf{};
        const uint8_t* step = (const uint8_t*)part.weight;
        const QuantRows<M>* rows = (const QuantRows<M>*)x;
        for (int64_t s = 0; s < part.steps; s++, step += From::kStepBytes)
            for (int sub = 0; sub < kSubs; sub++, rows++) {
                if (!Near && part.fetch && first == 0) {
                    const int64_t from = part.lines * sub / kSubs, to = part.lines * (sub + 1) / kSubs;
                    const char* line = part.fetch + s * part.lines * 64;
                    for (int64_t i = from; i < to; i++) __builtin_prefetch(line + i * 64, 0, 2);
                }
                const char* lines = (const char*)step + sub * (From::kStepBytes / kSubs);
                const char *near = part.following(lines + kNearBlocks), *far = part.following(lines + kFarBlocks);
#pragma GCC unroll 2
                for (int p = 0; p < L::kParts; p++) {
                    vi sums[M][N];
                    for (int m = 0; m < M; m++)
                        for (int n = 0; n < N; n++) sums[m][n] = D::first(rows->offsets[p][m]);
#pragma GCC unroll 8
                    for (int g = 0; g < kGroups; g++) {
                        const int group = p * kGroups + g;
                        if (Near && first == 0) fetch_ahead<From>(near, far, group);
                        typename D::Weight weight[N];
                        for (int n = 0; n < N; n++) weight[n] = D::prepared(From::numbers(step, sub, group, first + n));
                        for (int m = 0; m < M; m++) {
                            int32_t four;
                            __builtin_memcpy(&four, rows->numbers[group][m], 4);
                            for (int n = 0; n < N; n++) sums[m][n] = D::add(sums[m][n], weight[n], four);
                        }
                    }
                    for (int n = 0; n < N; n++) {
                        const vf scale = From::scale(step, sub, p, first + n);
                        for (int m = 0; m < M; m++) {
                            const vf sum = __builtin_convertvector(D::last(sums[m][n], rows->offsets[p][m]), vf);
                            acc[m][n] = sum * (scale * rows->scales[m]) + acc[m][n];
                        }
                    }
                }
                if constexpr (L::kMinima)
                    for (int n = 0; n < N; n++) {
                        const vf minimum = From::minimum(step, sub, first + n);
                        for (int m = 0; m < M; m++) acc[m][n] = acc[m][n] - minimum * rows->scaled_sums[m];
                    }
            }
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) store(part.sums + m * kPanel + (first + n) * W, acc[m][n]);
    }
}

// Of the lanes of v: the largest, which is not negative, and the sum.
WEFT_INLINE int32_t largest_lane(vi v) {
#if WEFT_AVX512
    return _mm512_reduce_max_epi32((__m512i)v);
#elif WEFT_AVX2
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
#else
    int32_t found = 0;
    for (int i = 0; i < W; i++) found = v[i] > found ? v[i] : found;
    return found;
#endif
}
WEFT_INLINE int32_t sum_lanes(vi v) {
#if WEFT_AVX512
    return _mm512_reduce_add_epi32((__m512i)v);
#elif WEFT_AVX2
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
#else
    int32_t found = 0;
    for (int i = 0; i < W; i++) found += v[i];
    return found;
#endif
}

// Lanes of -127 to 127 as bytes, in their order.
WEFT_INLINE void store_bytes(int8_t* to, const vi* v) {
#if WEFT_AVX512
    for (int i = 0; i < 2; i++) _mm_storeu_si128((__m128i*)(to + 16 * i), _mm512_cvtepi32_epi8((__m512i)v[i]));
#elif WEFT_AVX2
    // Packing joins halves of 128 bits: four bytes each of v[0] to v[3] lie in the lower one, their others in the upper.
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]),
                                             _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(bytes, order));
#else
    for (int i = 0; i < 32; i++) to[i] = (int8_t)v[i / W][i % W];
#endif
}

// Of 32 numbers of x, what decides their scale: the bits of the largest magnitude.
template <class T>
WEFT_INLINE int32_t largest_bits(const T* x) {
    vi most = vi{};
    for (int i = 0; i < 32; i += W) {
        const vi bits = (vi)load(x + i) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return largest_lane(most);
}

WEFT_INLINE vi rounded(vf v) {
#if WEFT_AVX512
    return (vi)_mm512_cvtps_epi32((__m512)v);
#elif WEFT_AVX2
    return (vi)_mm256_cvtps_epi32((__m256)v);
#else
    vi r;
    for (int i = 0; i < W; i++) r[i] = (int32_t)__builtin_rintf(v[i]);
    return r;
#endif
}

// The scale of a block of x whose largest magnitude has these bits, and what its numbers are multiplied with.
struct RowScale {
    float scale;
    float inverse;

    RowScale(int32_t largest, bool short_scale) {
        constexpr int32_t kInfinity = 0x7f800000, kLeast = (127 - 100) << 23;
        scale = 0;
        inverse = 0;
        if (largest >= kInfinity) scale = __builtin_nanf("");
        if (largest >= kInfinity || largest < kLeast) return;
        float magnitude;
        __builtin_memcpy(&magnitude, &largest, 4);
        inverse = 127.0f / magnitude;
        scale = 1.0f / inverse;
        if (!short_scale) return;
        scale = magnitude / 127.0f;
        uint32_t bits;
        __builtin_memcpy(&bits, &scale, 4);
        bits = (bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu;
        __builtin_memcpy(&scale, &bits, 4);
    }
};

// M rows of x in 8 bits.
template <class L, class T, int M>
void quantize_rows(const T* x, int64_t inputs, QuantRows<M>* to) {
    for (int m = 0; m < M; m++)
        for (int64_t begin = 0; begin < inputs; begin += L::kShared) {
            const T* from = x + m * inputs + begin;
            int32_t largest = 0;
            for (int64_t i = 0; i < L::kShared; i += 32) largest = most(largest, largest_bits(from + i));
            const RowScale by(largest, L::kShared == 32);
            QuantRows<M>* block = to + begin / 32;
            for (int64_t i = 0; i < L::kShared; i += 32, block++) {
                vi numbers[32 / W];
                for (int j = 0; j < 32 / W; j++)
                    numbers[j] = by.inverse != 0 ? rounded(load(from + i + j * W) * by.inverse) : vi{};
                int8_t bytes[32];
                store_bytes(bytes, numbers);
                for (int g = 0; g < 8; g++) __builtin_memcpy(block->numbers[g][m], bytes + 4 * g, 4);
                vi sums[2] = {};
                for (int j = 0; j < 32 / W; j++) sums[j * W / 16] += numbers[j];
                const int32_t halves[2] = {sum_lanes(sums[0]), sum_lanes(sums[1])};
                const int32_t sum = halves[0] + halves[1];
                block->scales[m] = by.scale;
                block->scaled_sums[m] = by.scale * (float)sum;
                block->offsets[0][m] = -L::kOffset * (L::kParts == 2 ? halves[0] : sum);
                block->offsets[1][m] = -L::kOffset * halves[1];
            }
        }
}

// As packed.h has products. A row of x takes two bytes for each input.
template <class T, class L>
struct BlockProduct {
    typedef T Stored;
    typedef uint16_t Value;
    struct InUse {};
    static constexpr int64_t kInputs = L::kInputs;
    static constexpr int64_t kRowsAtOnce = 6;
    static constexpr bool kEqualGroups = true;
    static constexpr int64_t kBlockSteps = 512 / L::kInputs;
    static constexpr int64_t kBlockBytes = 1 << 20;
    static constexpr int64_t kExpandGroups = L::kBits == 8 ? 1 << 30 : 3;
    static constexpr int64_t kNearBytes = kNearBlocks;
    static constexpr bool kTakesWhenFree = true;
    static constexpr bool kWritesBeside = false;

    static constexpr int64_t kStepBytes = L::kBytes;
    static constexpr int64_t kExpandedBytes = kBlockSteps * Unpacked<L>::kStepBytes;
    static bool expands(int64_t groups) { return groups >= kExpandGroups; }
    static bool takes_whole(int64_t groups) { return groups == 1; }
    static void expand_steps(const char* from, char* to, int64_t steps) {
        Unpacked<L>::expand((const uint8_t*)from, (uint8_t*)to, steps);
    }

    static const Value* rearrange(const LinearArgs& a, const RowPart<BlockProduct>& r, Value* to) {
        const T* x = (const T*)a.x + r.first * a.inputs;
        const int64_t each = r.at_once();
        for (int64_t i = 0; i < r.rows; i += each)
            with_count<kRowsAtOnce>(least(each, r.rows - i), [&](auto counted) {
                constexpr int M = decltype(counted)::value;
                quantize_rows<L, T, M>(x + i * a.inputs, a.inputs, (QuantRows<M>*)(to + i * a.inputs));
            });
        return to;
    }

    static void multiply(const Value* x, int64_t step, int64_t count, int64_t, bool expanded, const PanelPart& part) {
        const Value* rows = x + step * kInputs * count;
        with_count<kRowsAtOnce>(count, [&](auto counted) {
            constexpr int M = decltype(counted)::value;
            if (expanded)
                quant_panel<Unpacked<L>, M, false>(rows, part);
            else
                part.near ? quant_panel<Packed<L>, M, true>(rows, part) : quant_panel<Packed<L>, M, false>(rows, part);
        });
    }
};

}  // namespace
}  // namespace weft
