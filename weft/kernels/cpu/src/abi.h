// What the library and its callers share: dtypes, levels, the rows of a pass, and one table of functions per level.
//
// Everything here is plain C data, so that ctypes can describe it and one binary serves every Python and torch.
#pragma once

#include <cstdint>

namespace weft {

constexpr int kAbiVersion = 14;

enum Dtype : int { kFloat32 = 0, kBfloat16 = 1 };
// Types of quantized blocks; quant_layout.h has their layouts.
enum BlockType : int { kQ8_0 = 1, kQ4_0 = 2, kQ4_K = 3, kQ5_K = 4, kQ6_K = 5, kInt4G32 = 6, kInt4G128 = 7 };
enum Level : int { kPortable = 0, kAvx2 = 1, kAvx512f = 2, kAvx512 = 3, kAmx = 4 };

// bfloat16 as stored; arithmetic happens in float.
struct bf16 {
    uint16_t bits;
};

// The rows of a pass; the meaning of every field is that of `AttentionBatch`. Null: the option is not used.
struct Batch {
    int64_t num_rows;
    int64_t num_tokens;
    int64_t page_size;
    const int32_t* q_indptr;
    const int32_t* kv_indptr;
    const int32_t* page_ids;
    const int32_t* kv_lens;
    const int64_t* positions;
    const int64_t* write_slots;
    const uint8_t* causal;
    const uint32_t* visibility;
    const uint8_t* mask_bits;
    const int32_t* mask_indptr;
    // Chunks that several rows share: `SharedChunks`. Only for layers without a sliding window.
    int64_t num_groups;
    const int32_t* group_chunks;
    const int32_t* group_indptr;
    const int32_t* members;
    const int32_t* shared_indptr;
    const int32_t* shared_slots;
};

struct Heads {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
};

struct AttentionArgs {
    const Batch* batch;
    Heads heads;
    const void* q;  // [T, heads, D]: tokens q_stride elements apart, heads contiguous
    int64_t q_stride;
    const void* kv;  // [N, 2, kv heads, P, D], contiguous
    void* out;       // [T, heads * D], contiguous
    float scale;
    int64_t window;  // entries that a query sees, itself included; negative: all
    int threads;
};

struct RotateArgs {
    const Batch* batch;
    Heads heads;
    void* qkv;  // [T, (heads + 2 kv heads) * D], contiguous; the queries are turned in place
    const float* cos;
    const float* sin;
    const void* q_weight;  // null: heads are not normalised
    const void* k_weight;
    float eps;
    void* kv;
    int threads;
};

struct LinearArgs {
    const void* x;       // [rows, inputs], contiguous
    const void* weight;  // [outputs, inputs], contiguous; or packed: see packed.h
    const void* bias;    // [outputs] or null
    const void* residual;  // [rows, outputs] or null; may be `out`
    void* out;             // [rows, outputs]
    int64_t rows, inputs, outputs;
    int threads;
    bool gated;  // `out` is [rows, outputs / 2]: the first half of the outputs gates the second; for packed weights
    int64_t stride;  // elements from one row of `out` and `residual` to the next, if not as many as a row has; else 0
};

// Consecutive outputs of a weight in quantized blocks, packed, all of one type.
struct QuantPart {
    const void* weight;
    int64_t outputs;
    int type;  // a BlockType
};

// A weight with what is added to its product.
struct Product {
    const void* weight;  // [outputs, inputs], contiguous, or packed
    const void* bias;    // [outputs] or null
    int64_t outputs;
    int packed;
    // A weight in quantized blocks, instead of `weight`; null: it is not.
    const QuantPart* parts;
    int64_t num_parts;
    int vnni;  // whether its product has instructions for dot products of bytes
};

// A layer of a decoder: everything that stays the same from pass to pass.
struct BlockArgs {
    Heads heads;
    int64_t hidden;
    int64_t window;  // as in AttentionArgs
    float eps;
    float scale;
    const void* attention_norm;
    const void* q_norm;  // null, with k_norm: heads are not normalised
    const void* k_norm;
    const void* mlp_norm;
    Product qkv;      // queries, keys, values
    Product output;
    Product gate_up;  // gates first; packed or not, and so are the others
    Product down;
};

// What the layers of a pass share. The buffers are as wide as the widest layer's results.
struct PassArgs {
    const Batch* batch;
    const Batch* shared;  // the same with the chunks that rows share, for attention; may be `batch`
    const float* cos;
    const float* sin;
    void* normed;   // [T, hidden]
    void* qkv;      // [T, qkv outputs]
    void* mixed;    // [T, heads * D]
    void* gate_up;  // [T, gate_up outputs]; null where that weight is packed
    void* gated;    // [T, gate_up outputs / 2]
    int threads;
};

// Who wants a token of a row of logits. Every field has 8 bytes, so that numpy can describe it.
struct Sampler {
    const float* logits;  // [vocab]
    double temperature;   // 0: the most probable token
    int64_t top_k;        // 0: no limit
    double top_p, min_p, uniform;
    // What comes before the temperature. Null or 0: nothing of the kind.
    const int64_t* bias_ids;
    const double* bias;
    int64_t num_bias;
    const int32_t* counts;  // [vocab], as in slots.py: penalties
    double repetition, frequency, presence;
    const int64_t* bans;
    int64_t num_bans;
    const uint8_t* allowed;  // [vocab]
    const uint32_t* late;    // bit v % 32 of word v / 32
    int64_t token;           // result; -1: the largest logit is not finite, or one is NaN
};

// What logits become, by edits.py, and the log of the smallest weight, by drawing.py.
struct SamplingLevels {
    float floor, banned, not_allowed, late_masked, smallest;
};

// One implementation of every operation. The first argument is a Dtype.
struct Table {
    void (*rms_norm)(int dtype, const void* x, const void* weight, void* out, int64_t rows, int64_t size, float eps,
                     int threads);
    void (*silu_mul)(int dtype, const void* gate_up, void* out, int64_t rows, int64_t size, int threads);
    void (*rotate_and_store)(int dtype, const RotateArgs& args);
    void (*linear)(int dtype, const LinearArgs& args);
    // Null where no weight is packed.
    void (*pack_weight)(int dtype, const void* weight, void* packed, int64_t outputs, int64_t inputs, int threads);
    void (*linear_packed)(int dtype, const LinearArgs& args);
    void (*attention)(int dtype, const AttentionArgs& args);
    void (*sample)(Sampler* samplers, int64_t count, int64_t vocab, const SamplingLevels& levels, int threads);
    double (*probe_read)(const void* data, int64_t bytes, int threads);
    double (*probe_product)(int dtype, void* data, int64_t rounds, int threads);
};

// The product with a packed weight in quantized blocks of one type: `LinearBlocks` of a dtype of x and a type of blocks.
typedef void (*LinearBlocks)(int dtype, int type, const LinearArgs& args);

// The products of a whole weight in quantized blocks; `args.weight` is not read.
void linear_parts(int level, bool vnni, int dtype, const QuantPart* parts, int64_t num_parts, const LinearArgs& args);

extern const Table kPortableTable;
#if defined(__x86_64__)
extern const Table kAvx2Table;
extern const Table kAvx512fTable;
extern const Table kAvx512Table;
extern const Table kAmxTable;
#endif

}  // namespace weft
