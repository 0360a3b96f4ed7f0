// Packed int8 weights: how they lie in memory, and how they become the bfloat16 that products multiply.
//
// A packed weight is [outputs / 32][inputs / 32][16][64] bytes: panels and steps as in packed.h, and in a step, for each
// pair of inputs, that pair of 32 outputs. A byte is a sign and a magnitude of 7 bits, and integers so small are exact
// in bfloat16: its two halves are looked up by the magnitude. In each 16 bytes come 8 of the step's first block of 16
// outputs, then 8 of its second, so that interleaving the halves gives two vectors as panel_pairs.h has them.
#pragma once

#include "simd.h"
#include "threads.h"

#if WEFT_BF16

// Byte permutations over two registers (VBMI). Processors with bfloat16 dot products have them, but for one (Cooper
// Lake), where `weft_packs` says no for int8; so these functions alone are compiled for them.
#define WEFT_VBMI __attribute__((target("avx512vbmi")))

namespace weft {
namespace {

constexpr int64_t kPairBytes = 64;

struct Int8Halves {
    alignas(64) uint8_t high[128];
    alignas(64) uint8_t low[128];
};

constexpr Int8Halves int8_halves() {
    Int8Halves halves{};
    for (int i = 1; i < 128; i++) {
        int exponent = 0;
        while (i >> (exponent + 1)) exponent++;
        const int bits = (127 + exponent) << 7 | ((i << 7 >> exponent) & 0x7f);
        halves.high[i] = (uint8_t)(bits >> 8);
        halves.low[i] = (uint8_t)(bits & 0xff);
    }
    return halves;
}

constexpr Int8Halves kInt8Halves = int8_halves();

// Rearranges an int8 weight [outputs, inputs]; both are multiples of 32.
inline void pack_int8(const int8_t* weight, uint8_t* packed, int64_t outputs, int64_t inputs, int threads) {
    const int64_t steps = inputs / 32;
    for_each(threads, outputs / 32, [&](int64_t panel) {
        for (int64_t pair = 0; pair < steps * 16; pair++) {
            uint8_t* to = packed + (panel * steps * 16 + pair) * kPairBytes;
            for (int64_t output = 0; output < 32; output++)
                for (int64_t i = 0; i < 2; i++) {
                    const int value = weight[(panel * 32 + output) * inputs + 2 * pair + i];
                    const int64_t word = output % 16 * 2 + i;  // in the vector of its block
                    to[word / 8 * 16 + output / 16 * 8 + word % 8] =
                        (uint8_t)(value < 0 ? 0x80 | -value : value);
                }
        }
    });
}

// A pair of inputs of 32 outputs.
struct PairWords {
    __m512i left, right;
};

struct Int8Table {
    __m512i high[2], low[2];

    WEFT_INLINE Int8Table() {
        for (int i = 0; i < 2; i++) {
            high[i] = _mm512_load_si512(kInt8Halves.high + 64 * i);
            low[i] = _mm512_load_si512(kInt8Halves.low + 64 * i);
        }
    }

    WEFT_VBMI WEFT_INLINE PairWords widen(const uint8_t* bytes) const {
        __m512i packed = _mm512_loadu_si512(bytes);
        __m512i upper = _mm512_permutex2var_epi8(high[0], packed, high[1]);
        __m512i lower = _mm512_permutex2var_epi8(low[0], packed, low[1]);
        // upper | (packed & sign)
        upper = _mm512_ternarylogic_epi64(upper, packed, _mm512_set1_epi8(-128), 0xf8);
        return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
    }
};

// Steps of a packed int8 weight as those of a packed bfloat16 weight.
WEFT_VBMI inline void expand_int8(const uint8_t* from, bf16* to, int64_t steps) {
    const Int8Table table;
    for (int64_t s = 0; s < steps; s++, to += 1024)
        for (int64_t pair = 0; pair < 16; pair++, from += kPairBytes) {
            const PairWords words = table.widen(from);
            _mm512_store_si512(to + pair * 32, words.left);
            _mm512_store_si512(to + 512 + pair * 32, words.right);
        }
}

}  // namespace
}  // namespace weft

#endif
