// Integer dot products: four unsigned numbers of a weight by four signed ones of x, added to each of W sums of 32 bits.
//
// Numbers of x are -127 to 127. No intermediate result saturates: where pairs are summed in 16 bits (AVX2, AVX-512
// without VNNI), numbers of 8 bits are multiplied as magnitudes of at most 128, with their signs moved to x, and pairs
// are at most 2 * 128 * 127 = 32,512; numbers of 4 bits stay below 32,767 over all 8 groups of 32 inputs (16 * 15 * 127 =
// 30,480), those of 5 and 6 bits within a group.
//
// A layout's offset is in the first value of a sum, or in the last: -offset * (the sum of x), which comes with x.
#pragma once

#include "quant_layout.h"
#include "simd.h"

#if (WEFT_AVX512 && defined(__AVX512VNNI__)) || (WEFT_AVX2 && defined(__AVXVNNI__))
#define WEFT_VNNI 1
#endif

namespace weft {
namespace {

typedef uint8_t vbyte __attribute__((vector_size(4 * W)));
typedef uint16_t vpair __attribute__((vector_size(4 * W)));

#if WEFT_VNNI

template <class L>
struct Dots {
    typedef vbyte Weight;
    static constexpr bool kWide = true;  // sums of two vectors at a time, to hide how long an instruction takes
    static WEFT_INLINE Weight prepared(vbyte numbers) { return numbers; }
    static WEFT_INLINE vi first(int32_t offset) { return all_int(offset); }
    static WEFT_INLINE vi last(vi sum, int32_t) { return sum; }
    static WEFT_INLINE vi add(vi sum, Weight weight, int32_t x) {
#if WEFT_AVX512
        return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, _mm512_set1_epi32(x));
#else
        return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weight, _mm256_set1_epi32(x));
#endif
    }
};

#elif WEFT_AVX512 || WEFT_AVX2

// Pairs of 16 bits.
#if WEFT_AVX512
constexpr bool kWideDots = true;
WEFT_INLINE vi multiply_pairs(vbyte weight, vbyte x) {
    return (vi)_mm512_maddubs_epi16((__m512i)weight, (__m512i)x);
}
WEFT_INLINE vi add_pairs(vi pairs) { return (vi)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1)); }
struct Signed {
    vbyte magnitude;
    __mmask64 negative;
};
WEFT_INLINE Signed signed_numbers(vbyte numbers) {
    const __m512i values = (__m512i)(numbers ^ (uint8_t)128);
    return {(vbyte)_mm512_abs_epi8(values), _mm512_movepi8_mask(values)};
}
WEFT_INLINE vbyte with_signs(vi x, const Signed& of) {
    return (vbyte)_mm512_mask_sub_epi8((__m512i)x, of.negative, _mm512_setzero_si512(), (__m512i)x);
}
#else
constexpr bool kWideDots = false;
WEFT_INLINE vi multiply_pairs(vbyte weight, vbyte x) {
    return (vi)_mm256_maddubs_epi16((__m256i)weight, (__m256i)x);
}
WEFT_INLINE vi add_pairs(vi pairs) { return (vi)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
struct Signed {
    vbyte magnitude;
    vbyte values;
};
WEFT_INLINE Signed signed_numbers(vbyte numbers) {
    const vbyte values = numbers ^ (uint8_t)128;
    return {(vbyte)_mm256_abs_epi8((__m256i)values), values};
}
WEFT_INLINE vbyte with_signs(vi x, const Signed& of) {
    return (vbyte)_mm256_sign_epi8((__m256i)x, (__m256i)of.values);
}
#endif

template <class L, int Bits = L::kBits>
struct Dots {
    typedef vbyte Weight;
    static constexpr bool kWide = kWideDots;
    static WEFT_INLINE Weight prepared(vbyte numbers) { return numbers; }
    static WEFT_INLINE vi first(int32_t offset) { return all_int(offset); }
    static WEFT_INLINE vi last(vi sum, int32_t) { return sum; }
    static WEFT_INLINE vi add(vi sum, Weight weight, int32_t x) {
        return sum + add_pairs(multiply_pairs(weight, (vbyte)all_int(x)));
    }
};

// The sums of a part are in 16 bits until its end.
template <class L>
struct Dots<L, 4> {
    typedef vbyte Weight;
    static constexpr bool kWide = kWideDots;
    static WEFT_INLINE Weight prepared(vbyte numbers) { return numbers; }
    static WEFT_INLINE vi first(int32_t) { return vi{}; }
    static WEFT_INLINE vi last(vi sum, int32_t offset) { return add_pairs(sum) + offset; }
    static WEFT_INLINE vi add(vi sum, Weight weight, int32_t x) {
        return (vi)((vpair)sum + (vpair)multiply_pairs(weight, (vbyte)all_int(x)));
    }
};

template <class L>
struct Dots<L, 8> {
    typedef Signed Weight;
    static constexpr bool kWide = kWideDots;
    static WEFT_INLINE Weight prepared(vbyte numbers) { return signed_numbers(numbers); }
    static WEFT_INLINE vi first(int32_t) { return vi{}; }
    static WEFT_INLINE vi last(vi sum, int32_t) { return sum; }
    static WEFT_INLINE vi add(vi sum, const Weight& weight, int32_t x) {
        return sum + add_pairs(multiply_pairs(weight.magnitude, with_signs(all_int(x), weight)));
    }
};

#else

template <class L>
struct Dots {
    typedef vbyte Weight;
    static constexpr bool kWide = false;
    static WEFT_INLINE Weight prepared(vbyte numbers) { return numbers; }
    static WEFT_INLINE vi first(int32_t offset) { return all_int(offset); }
    static WEFT_INLINE vi last(vi sum, int32_t) { return sum; }
    static WEFT_INLINE vi add(vi sum, Weight weight, int32_t x) {
        for (int k = 0; k < 4; k++) sum += (vi)((vu)weight >> (8 * k) & 255u) * (int32_t)(int8_t)((uint32_t)x >> (8 * k));
        return sum;
    }
};

#endif

}  // namespace
}  // namespace weft
