// The table of one level: included once by each level's source, which is compiled for that level's instructions.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "panel_floats.h"
#include "panel_tiles.h"
#include "probe.h"
#include "sampling.h"

namespace weft {
namespace {

void rms_norm(int dtype, const void* x, const void* weight, void* out, int64_t rows, int64_t size, float eps,
              int threads) {
    if (dtype == kBfloat16)
        rms_norm_rows((const bf16*)x, (const bf16*)weight, (bf16*)out, rows, size, eps, threads);
    else
        rms_norm_rows((const float*)x, (const float*)weight, (float*)out, rows, size, eps, threads);
}

void silu_mul(int dtype, const void* gate_up, void* out, int64_t rows, int64_t size, int threads) {
    if (dtype == kBfloat16)
        silu_mul_rows((const bf16*)gate_up, (bf16*)out, rows, size, threads);
    else
        silu_mul_rows((const float*)gate_up, (float*)out, rows, size, threads);
}

void rotate_and_store(int dtype, const RotateArgs& args) {
    if (dtype == kBfloat16)
        rotate_and_store_tokens<bf16>(args);
    else
        rotate_and_store_tokens<float>(args);
}

void linear(int dtype, const LinearArgs& args) {
    dtype == kBfloat16 ? linear_rows<bf16>(args) : linear_rows<float>(args);
}

#if WEFT_AMX
typedef Tiles Bfloat16Product;
#elif WEFT_BF16
typedef Pairs Bfloat16Product;
#elif WEFT_AVX2 || WEFT_AVX512
typedef Floats<bf16> Bfloat16Product;
#endif

#if WEFT_AVX2 || WEFT_AVX512
void pack(int dtype, const void* weight, void* packed, int64_t outputs, int64_t inputs, int threads) {
#if WEFT_BF16
    if (dtype == kBfloat16) return Pairs::pack((const bf16*)weight, (bf16*)packed, outputs, inputs, threads);
#else
    if (dtype == kBfloat16) return Floats<bf16>::pack((const bf16*)weight, (bf16*)packed, outputs, inputs, threads);
#endif
    Floats<float>::pack((const float*)weight, (float*)packed, outputs, inputs, threads);
}

void linear_packed(int dtype, const LinearArgs& args) {
    dtype == kBfloat16 ? multiply_packed<Bfloat16Product>(args) : multiply_packed<Floats<float>>(args);
}
constexpr auto kPack = pack;
constexpr auto kLinearPacked = linear_packed;
#else
constexpr void (*kPack)(int, const void*, void*, int64_t, int64_t, int) = nullptr;
constexpr void (*kLinearPacked)(int, const LinearArgs&) = nullptr;
#endif

void attention(int dtype, const AttentionArgs& args) {
    bool wide = args.heads.head_dim % (2 * W) == 0;
    if (dtype == kBfloat16)
        wide ? attend<bf16, true>(args) : attend<bf16, false>(args);
    else
        wide ? attend<float, true>(args) : attend<float, false>(args);
}

double product_probe(int dtype, void* data, int64_t rounds, int threads) {
#if WEFT_BF16
    if (dtype == kBfloat16) return probe_product<bf16>(data, rounds, threads);
#endif
    return probe_product<float>(data, rounds, threads);  // what bfloat16 comes to without instructions of its own
}

constexpr Table kTable = {rms_norm,  silu_mul, rotate_and_store, linear,       kPack, kLinearPacked,
                          attention, sample,   probe_read,       product_probe};

}  // namespace
}  // namespace weft
