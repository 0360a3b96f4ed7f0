// Weights in quantized blocks: packing them, reading rows of packed ones, and the choice of their products.
#include "quant_layout.h"
#include "threads.h"

#include <cstring>

#define WEFT_EXPORT extern "C" __attribute__((visibility("default")))

namespace weft {

extern const LinearBlocks kPortableBlocks;
#if defined(__x86_64__)
extern const LinearBlocks kAvx2Blocks;
extern const LinearBlocks kAvx2VnniBlocks;
extern const LinearBlocks kAvx512fBlocks;
extern const LinearBlocks kAvx512VnniBlocks;
extern const LinearBlocks kAmxBlocks;
#endif

namespace {

LinearBlocks product_of(int level, bool vnni) {
#if defined(__x86_64__)
    if (level == kAmx && vnni) return kAmxBlocks;
    if (level >= kAvx512f) return vnni ? kAvx512VnniBlocks : kAvx512fBlocks;
    if (level == kAvx2) return vnni ? kAvx2VnniBlocks : kAvx2Blocks;
#endif
    return kPortableBlocks;
}

// A block of a file, taken apart: what its numbers and scales are in a packed weight.
struct Block {
    uint8_t numbers[256];
    uint16_t scale, minimum_scale;
    uint8_t scales[16], minima[8];
    float whole_scale;  // where there is a zero point
    uint8_t zero;
};

void take_apart(Q8_0, const uint8_t* from, Block& to) {
    std::memcpy(&to.scale, from, 2);
    for (int i = 0; i < 32; i++) to.numbers[i] = from[2 + i] ^ 0x80;
}

void take_apart(Q4_0, const uint8_t* from, Block& to) {
    std::memcpy(&to.scale, from, 2);
    for (int i = 0; i < 16; i++) {
        to.numbers[i] = from[2 + i] & 15;
        to.numbers[16 + i] = from[2 + i] >> 4;
    }
}

// Scales and minima of Q4_K and Q5_K: 6 bits each. The upper two bits of the first bytes belong to the groups 4 to 7.
void take_scales(const uint8_t* from, Block& to) {
    std::memcpy(&to.scale, from, 2);
    std::memcpy(&to.minimum_scale, from + 2, 2);
    const uint8_t *low = from + 4, *middle = from + 8, *high = from + 12;
    for (int i = 0; i < 4; i++) {
        to.scales[i] = low[i] & 63;
        to.minima[i] = middle[i] & 63;
        to.scales[4 + i] = (uint8_t)((high[i] & 15) | low[i] >> 6 << 4);
        to.minima[4 + i] = (uint8_t)(high[i] >> 4 | middle[i] >> 6 << 4);
    }
}

void take_apart(Q4_K, const uint8_t* from, Block& to) {
    take_scales(from, to);
    for (int group = 0; group < 8; group++)
        for (int i = 0; i < 32; i++)
            to.numbers[group * 32 + i] = from[16 + group / 2 * 32 + i] >> (group % 2 * 4) & 15;
}

void take_apart(Q5_K, const uint8_t* from, Block& to) {
    take_scales(from, to);
    for (int group = 0; group < 8; group++)
        for (int i = 0; i < 32; i++) {
            const int low = from[48 + group / 2 * 32 + i] >> (group % 2 * 4) & 15;
            to.numbers[group * 32 + i] = (uint8_t)(low | (from[16 + i] >> group & 1) << 4);
        }
}

void take_apart(Q6_K, const uint8_t* from, Block& to) {
    for (int half = 0; half < 2; half++)
        for (int quarter = 0; quarter < 4; quarter++)
            for (int i = 0; i < 32; i++) {
                const int low = from[half * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4) & 15;
                const int upper = from[128 + half * 32 + i] >> (2 * quarter) & 3;
                to.numbers[half * 128 + quarter * 32 + i] = (uint8_t)(low | upper << 4);
            }
    std::memcpy(to.scales, from + 192, 16);
    std::memcpy(&to.scale, from + 208, 2);
}

template <class L>
void take_groups(const uint8_t* from, Block& to) {
    std::memcpy(&to.whole_scale, from, 4);
    to.zero = from[4];
    for (int half = 0; half < L::kInputs / 16; half++)
        for (int i = 0; i < 16; i++)
            to.numbers[half * 16 + i] = from[8 + half / 2 * 16 + i] >> (half % 2 * 4) & 15;
}

void take_apart(Int4G32, const uint8_t* from, Block& to) { take_groups<Int4G32>(from, to); }

void take_apart(Int4G128, const uint8_t* from, Block& to) { take_groups<Int4G128>(from, to); }

// Puts the numbers of 32 inputs of an output where they belong, from `to` on: every byte once.
template <class L>
void put_numbers(const uint8_t* numbers, uint8_t* to) {
    constexpr uint32_t kHalves = 0x0f0f0f0fu;
    uint32_t fours[8];  // four numbers at a time, each in its byte
    std::memcpy(fours, numbers, 32);
    for (int group = 0; group < (L::kBits == 8 ? 8 : 4); group++) {
        uint32_t bytes = fours[group];
        if (L::kBits != 8) bytes = (bytes & kHalves) | (fours[group + 4] & kHalves) << 4;
        std::memcpy(to + group * 128, &bytes, 4);
    }
    constexpr int kUpper = L::kBits == 8 ? 0 : L::kBits - 4;  // bits
    for (int first = 0; first < kUpper; first++) {
        uint32_t bytes = 0;
        for (int group = first; group < 8; group += kUpper)
            bytes |= (fours[group] >> 4 & kHalves) << (group / kUpper * kUpper);
        std::memcpy(to + 512 + first * 128, &bytes, 4);
    }
}

// Puts the block of output `o` of a panel into a step.
template <class L>
void put(const Block& block, int o, uint8_t* step) {
    for (int sub = 0; sub < L::kInputs / 32; sub++)
        put_numbers<L>(block.numbers + sub * 32, step + sub * L::kSubBytes + o * 4);
    uint8_t* at = step + kScalesAt<L>;
    if (L::kZeros) {
        std::memcpy(at + 4 * o, &block.whole_scale, 4);
        at[128 + o] = block.zero;
        return;
    }
    std::memcpy(at + 2 * o, &block.scale, 2);
    if (!L::kFactors) return;
    if (L::kMinima) std::memcpy(at + 64 + 2 * o, &block.minimum_scale, 2);
    uint8_t* scales = at + (L::kMinima ? 128 : 64);
    for (int i = 0; i < (L::kMinima ? 8 : 16); i++) scales[i * 32 + o] = block.scales[i];
    if (L::kMinima)
        for (int i = 0; i < 8; i++) scales[256 + i * 32 + o] = block.minima[i];
}

// The value of input `i` of output `o`.
template <class L>
float value_at(const uint8_t* step, int o, int i) {
    const uint8_t *from = step + i / 32 * L::kSubBytes, *at = step + kScalesAt<L>;
    const int group = i % 32 / 4, index = group * 128 + o * 4 + i % 4;
    int number = L::kBits == 8 ? from[index] : from[index % 512] >> (index / 512 * 4) & 15;
    if (L::kBits == 5) number |= (from[512 + index % 128] >> group & 1) << 4;
    if (L::kBits == 6) number |= (from[512 + index % 256] >> (index / 256 * 2) & 3) << 4;
    if (L::kZeros) {
        float whole;
        std::memcpy(&whole, at + 4 * o, 4);
        return (float)(number - (int)at[128 + o]) * whole;
    }
    uint16_t half;
    std::memcpy(&half, at + 2 * o, 2);
    float scale = float16_value(half);
    if (!L::kFactors) return (float)(number - L::kOffset) * scale;
    if (!L::kMinima) return (float)(number - L::kOffset) * (scale * (float)(int8_t)at[64 + i / 16 * 32 + o]);
    std::memcpy(&half, at + 64 + 2 * o, 2);
    const int part = i / 32 * 32 + o;
    return (float)number * (scale * (float)at[128 + part]) - float16_value(half) * (float)at[384 + part];
}

}  // namespace

void linear_parts(int level, bool vnni, int dtype, const QuantPart* parts, int64_t num_parts, const LinearArgs& args) {
    const int64_t size = dtype == kBfloat16 ? 2 : 4;
    LinearArgs part = args;
    part.stride = args.gated ? args.outputs / 2 : args.outputs;
    for (int64_t i = 0, first = 0; i < num_parts; first += parts[i++].outputs) {
        const auto from_first = [&](const void* what) { return what ? (const char*)what + first * size : nullptr; };
        part.weight = parts[i].weight;
        part.outputs = parts[i].outputs;
        part.bias = from_first(args.bias);
        part.residual = from_first(args.residual);
        part.out = (void*)from_first(args.out);
        product_of(level, vnni)(dtype, parts[i].type, part);
    }
}

}  // namespace weft

using namespace weft;

// Packs a weight [outputs, inputs] in blocks of a file; outputs are a multiple of 32.
WEFT_EXPORT void weft_pack_blocks(int type, const void* blocks, void* packed, int64_t outputs, int64_t inputs,
                                  int threads) {
    with_layout(type, [&](auto layout) {
        typedef decltype(layout) L;
        const int64_t steps = inputs / L::kInputs;
        for_each(threads, outputs / 32, [&](int64_t panel) {
            for (int64_t s = 0; s < steps; s++) {
                uint8_t* step = (uint8_t*)packed + (panel * steps + s) * L::kBytes;
                for (int o = 0; o < 32; o++) {
                    Block block;
                    take_apart(L(), (const uint8_t*)blocks + ((panel * 32 + o) * steps + s) * L::kFileBytes, block);
                    put<L>(block, o, step);
                }
            }
        });
    });
}

// Rows of a packed weight as floats, [rows, inputs]. Returns how many there were before the first index that the weight
// has no row for.
WEFT_EXPORT int64_t weft_take_block_rows(int type, const void* packed, const int64_t* indices, float* out, int64_t rows,
                                         int64_t inputs, int64_t outputs) {
    int64_t taken = 0;
    with_layout(type, [&](auto layout) {
        typedef decltype(layout) L;
        const int64_t steps = inputs / L::kInputs;
        for (; taken < rows; taken++) {
            const int64_t index = indices[taken];
            if (index < 0 || index >= outputs) return;
            const uint8_t* step = (const uint8_t*)packed + index / 32 * steps * L::kBytes;
            for (int64_t s = 0; s < steps; s++, step += L::kBytes)
                for (int i = 0; i < L::kInputs; i++) *out++ = value_at<L>(step, (int)(index % 32), i);
        }
    });
    return taken;
}

// Products of x with all parts of a weight; `gated` for one part only.
WEFT_EXPORT void weft_linear_blocks(int level, int vnni, int dtype, const void* x, const QuantPart* parts,
                                    int64_t num_parts, const void* bias, const void* residual, void* out, int64_t rows,
                                    int64_t inputs, int64_t outputs, int gated, int threads) {
    linear_parts(level, vnni != 0, dtype, parts, num_parts,
                 LinearArgs{x, nullptr, bias, residual, out, rows, inputs, outputs, threads, gated != 0, 0});
}
