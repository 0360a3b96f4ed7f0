// Which KV entries a query sees: the rules of `core.step.ForwardBatch` as ranges and bits.
#pragma once

#include "simd.h"

namespace weft {
namespace {

// One row of the batch, resolved.
struct Row {
    const int32_t* pages;
    const uint32_t* words;  // visibility by page, or null
    const uint8_t* mask;    // packed mask, or null
    int64_t mask_stride;    // bytes of a query
    int64_t first_token;
    int64_t num_queries;
    int64_t num_entries;
    bool causal;
};

inline Row row_of(const Batch& batch, int64_t r) {
    Row row;
    row.pages = batch.page_ids + batch.kv_indptr[r];
    row.words = batch.visibility ? batch.visibility + batch.kv_indptr[r] : nullptr;
    bool masked = batch.mask_indptr && batch.mask_indptr[r + 1] > batch.mask_indptr[r];
    row.mask = masked ? batch.mask_bits + batch.mask_indptr[r] : nullptr;
    row.num_entries = batch.kv_lens[r];
    row.mask_stride = (row.num_entries + 7) / 8;
    row.first_token = batch.q_indptr[r];
    row.num_queries = batch.q_indptr[r + 1] - batch.q_indptr[r];
    row.causal = !batch.causal || batch.causal[r];
    return row;
}

// Entries [begin, end) that a query may see before words and masks are applied; empty when begin >= end.
struct Range {
    int64_t begin, end;
};

inline Range range_of(const Batch& batch, const Row& row, int64_t query, int64_t window) {
    Range range{0, row.num_entries};
    if (row.causal) range.end = row.num_entries - row.num_queries + query + 1;
    if (window >= 0) range.begin = most<int64_t>(0, batch.positions[row.first_token + query] - window + 1);
    return range;
}

WEFT_INLINE uint64_t low_bits(int64_t count) {
    return count <= 0 ? 0 : count >= 64 ? ~0ull : (1ull << count) - 1;
}

// Bit i: the query sees entry `entry + i`, for i < count <= 64.
inline uint64_t seen_bits(const Batch& batch, const Row& row, Range range, int64_t query, int64_t entry, int count) {
    uint64_t bits = low_bits(count) & low_bits(range.end - entry) & ~low_bits(range.begin - entry);
    if (row.words && bits) {
        const int known = (int)least<int64_t>(count, row.num_entries - entry);  // beyond these there are no words
        for (int i = 0; i < known;) {
            int64_t at = entry + i, offset = at % batch.page_size;
            int run = (int)least<int64_t>(batch.page_size - offset, known - i);
            uint64_t word = row.words[at / batch.page_size] >> offset;
            bits &= ~((~word & low_bits(run)) << i);
            i += run;
        }
    }
    if (row.mask && bits) {
        const uint8_t* packed = row.mask + query * row.mask_stride;
        uint64_t mask = 0;
        for (int i = 0; i < count && entry + i < row.num_entries; i++)
            mask |= (uint64_t)(packed[(entry + i) / 8] >> ((entry + i) % 8) & 1) << i;
        bits &= mask;
    }
    return bits;
}

// The start of K (half 0) or V (half 1) of an entry in its page, for one KV head.
template <class T>
WEFT_INLINE const T* entry_at(const AttentionArgs& a, const Row& row, int64_t head, int half, int64_t entry) {
    int64_t page_size = a.batch->page_size, page = row.pages[entry / page_size];
    int64_t block = (page * 2 + half) * a.heads.num_kv_heads + head;
    return (const T*)a.kv + (block * page_size + entry % page_size) * a.heads.head_dim;
}

}  // namespace
}  // namespace weft
