// Weights in quantized blocks: how they lie when they are packed. `weft.kernels.quantized_blocks` says how they are stored.
//
// A packed weight is [outputs / 32][inputs / step][step_bytes], where a step is as many inputs as a block of the file has:
// panels as in packed.h. A step's numbers are unsigned bytes, or bits of them, in groups of four neighbouring inputs:
// number (group g, output o, k of 4) of 32 inputs has the index g * 128 + o * 4 + k, so that integer dot products of four
// bytes read them in the order in which they lie. The scales of 32 outputs follow the numbers of a step.
//
//   Q8_0  [1024] bytes, each number plus 128                                                   | [32] float16 scales
//   Q4_0  [512]: byte i has number i below and number i + 512 above                            | [32] float16 scales
//   Q4_K  [8][512] as Q4_0          | [32] float16 scales, [32] of minima, [8][32] bytes of scales, [8][32] of minima
//   Q5_K  [8][640]: as Q4_0, and 128 bytes, whose byte i has in its bit g the fifth bit of number g * 128 + i  | as Q4_K
//   Q6_K  [8][768]: as Q4_0, and 256 bytes, whose byte i has in its bits 2 k and 2 k + 1 the upper bits of number
//         k * 256 + i                                                      | [32] float16 scales, [16][32] int8 scales
//   Int4G32   [512] as Q4_0         | [32] float32 scales, [32] bytes of zero points
//   Int4G128  [4][512] as Q4_0      | as Int4G32
//
// What a number q of the packed weight stands for is (q - offset) * scale - minimum. A zero point times the scale is a
// minimum.
#pragma once

#include "abi.h"

namespace weft {
namespace {

constexpr int64_t kSubSize = 1024;  // numbers of 32 inputs of 32 outputs

// What a layout has: `kInputs` of a step; `kShared` inputs of x that share a scale; `kBits` of a number; `kOffset`;
// `kParts` of 32 inputs with a scale of their own; `kMinima`; `kSubBytes` of the numbers of 32 inputs. `kFactors`: the
// scale of each part is a small integer times one of the block's. `kZeros`: a block has one scale and one zero point.
struct Q8_0 {
    static constexpr int kInputs = 32, kShared = 32, kBits = 8, kOffset = 128, kParts = 1, kSubBytes = 1024;
    static constexpr bool kMinima = false, kFactors = false, kZeros = false;
    static constexpr int kBytes = 1024 + 64, kFileBytes = 34;
};
struct Q4_0 {
    static constexpr int kInputs = 32, kShared = 32, kBits = 4, kOffset = 8, kParts = 1, kSubBytes = 512;
    static constexpr bool kMinima = false, kFactors = false, kZeros = false;
    static constexpr int kBytes = 512 + 64, kFileBytes = 18;
};
struct Q4_K {
    static constexpr int kInputs = 256, kShared = 256, kBits = 4, kOffset = 0, kParts = 1, kSubBytes = 512;
    static constexpr bool kMinima = true, kFactors = true, kZeros = false;
    static constexpr int kBytes = 8 * 512 + 128 + 512, kFileBytes = 144;
};
struct Q5_K {
    static constexpr int kInputs = 256, kShared = 256, kBits = 5, kOffset = 0, kParts = 1, kSubBytes = 640;
    static constexpr bool kMinima = true, kFactors = true, kZeros = false;
    static constexpr int kBytes = 8 * 640 + 128 + 512, kFileBytes = 176;
};
struct Q6_K {
    static constexpr int kInputs = 256, kShared = 256, kBits = 6, kOffset = 32, kParts = 2, kSubBytes = 768;
    static constexpr bool kMinima = false, kFactors = true, kZeros = false;
    static constexpr int kBytes = 8 * 768 + 64 + 512, kFileBytes = 210;
};

struct Int4G32 {
    static constexpr int kInputs = 32, kShared = 32, kBits = 4, kOffset = 0, kParts = 1, kSubBytes = 512;
    static constexpr bool kMinima = true, kFactors = false, kZeros = true;
    static constexpr int kBytes = 512 + 128 + 32, kFileBytes = 8 + 16;
};
struct Int4G128 {
    static constexpr int kInputs = 128, kShared = 32, kBits = 4, kOffset = 0, kParts = 1, kSubBytes = 512;
    static constexpr bool kMinima = true, kFactors = false, kZeros = true;
    static constexpr int kBytes = 4 * 512 + 128 + 32, kFileBytes = 8 + 64;
};

// Where the scales of a step begin.
template <class L>
constexpr int kScalesAt = L::kInputs / 32 * L::kSubBytes;

// The value of a float16.
inline float float16_value(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    float value;
    if (exponent == 0) {
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | fraction << 13;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// run(layout) for the type of blocks.
template <class F>
inline void with_layout(int type, const F& run) {
    if (type == kQ8_0) return run(Q8_0());
    if (type == kQ4_0) return run(Q4_0());
    if (type == kQ4_K) return run(Q4_K());
    if (type == kQ5_K) return run(Q5_K());
    if (type == kQ6_K) return run(Q6_K());
    if (type == kInt4G32) return run(Int4G32());
    run(Int4G128());
}

}  // namespace
}  // namespace weft
