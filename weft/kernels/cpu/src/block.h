// A whole layer of a decoder in one call.
//
// Each operation is a call of some microseconds from Python, and a decode step would be hundreds of them. What happens
// here is what `models/layers/decoder.py` does with the operations one by one, with the same kernels and the same
// roundings, into buffers that all layers of a pass share.
#pragma once

#include "abi.h"

namespace weft {
namespace {

inline void multiply(int level, const Table& table, int dtype, const Product& by, const void* x, int64_t inputs,
                     const void* residual, void* out, int64_t rows, int threads, bool gated) {
    const LinearArgs args{x, by.weight, by.bias, residual, out, rows, inputs, by.outputs, threads, gated, 0};
    if (by.parts) return linear_parts(level, by.vnni, dtype, by.parts, by.num_parts, args);
    by.packed ? table.linear_packed(dtype, args) : table.linear(dtype, args);
}

// x [T, hidden] is the residual stream, changed in place.
inline void run_block(int level, const Table& table, int dtype, const BlockArgs& block, const PassArgs& pass, void* x, void* kv) {
    const Heads& heads = block.heads;
    const int64_t rows = pass.batch->num_tokens, mixed_size = heads.num_heads * heads.head_dim;
    const int threads = pass.threads;

    table.rms_norm(dtype, x, block.attention_norm, pass.normed, rows, block.hidden, block.eps, threads);
    multiply(level, table, dtype, block.qkv, pass.normed, block.hidden, nullptr, pass.qkv, rows, threads, false);
    table.rotate_and_store(dtype, RotateArgs{pass.batch, heads, pass.qkv, pass.cos, pass.sin, block.q_norm,
                                             block.k_norm, block.eps, kv, threads});
    table.attention(dtype, AttentionArgs{pass.shared, heads, pass.qkv, block.qkv.outputs, kv, pass.mixed, block.scale,
                                         block.window, threads});
    multiply(level, table, dtype, block.output, pass.mixed, mixed_size, x, x, rows, threads, false);

    table.rms_norm(dtype, x, block.mlp_norm, pass.normed, rows, block.hidden, block.eps, threads);
    const int64_t gated_size = block.gate_up.outputs / 2;
    if (block.gate_up.packed) {
        multiply(level, table, dtype, block.gate_up, pass.normed, block.hidden, nullptr, pass.gated, rows, threads, true);
    } else {
        multiply(level, table, dtype, block.gate_up, pass.normed, block.hidden, nullptr, pass.gate_up, rows, threads, false);
        table.silu_mul(dtype, pass.gate_up, pass.gated, rows, gated_size, threads);
    }
    multiply(level, table, dtype, block.down, pass.gated, gated_size, x, x, rows, threads, false);
}

}  // namespace
}  // namespace weft
