// Attention of rows with few queries: each K and V element is read once, where it lies, for all heads of its group.
//
// A row's entries are cut into chunks on a fixed grid. Each chunk gives a partial result (maximum, sum, weighted
// values), and partial results are joined in order, so what a row yields depends neither on the batch around it nor on
// how many threads share its chunks.
#pragma once

#include "decode_bf16.h"
#include "decode_floats.h"
#include "visibility.h"

namespace weft {
namespace {

constexpr int kChunk = 256;     // entries
constexpr int kMaxStacked = 16;  // query heads that share K and V: group * queries
constexpr int kMaxAttentionDim = 256;
constexpr int kAhead = 4;  // blocks of 16 entries that are fetched before their turn

// The softmax-weighted values of some entries: sum over entries of exp(score - maximum) * v, and of the weights.
struct Partial {
    alignas(64) float values[kMaxStacked][kMaxAttentionDim];
    float maximum[kMaxStacked];
    float total[kMaxStacked];
};

constexpr float kNothing = -__builtin_inff();

// scores[i] = dot(q, k + i * dim) for i < W, before scaling.
template <class T, bool Wide, int M>
WEFT_INLINE void score_block(const T* const* q, const T* k, int64_t dim, vf* scores) {
    typedef Lanes<T, Wide> L;
    for (int m = 0; m < M; m++) {
        vf acc[W] = {};
        for (int64_t d = 0; d < dim; d += L::step) {
            typename L::vec x = L::get(q[m] + d);
            for (int i = 0; i < W; i++) acc[i] = L::multiply_add(x, L::get(k + i * dim + d), acc[i]);
        }
        scores[m] = sums(acc);
    }
}

template <class T, bool Wide>
WEFT_INLINE float score_one(const T* q, const T* k, int64_t dim) {
    typedef Lanes<T, Wide> L;
    vf acc{};
    for (int64_t d = 0; d < dim; d += L::step) acc = L::multiply_add(L::get(q + d), L::get(k + d), acc);
    return sum(acc);
}

// values[m] += sum over i of weights[m][i] * v[i] over the entries whose bit is set.
template <class T, bool Wide, int M>
WEFT_INLINE void add_values(const T* v, int64_t dim, const float (*weights)[kChunk], int at, uint64_t bits, int count,
                            float (*values)[kMaxAttentionDim]) {
    constexpr int step = Wide ? 4 * W : W;
    int64_t d = 0;
    if constexpr (Wide) {
        for (; d + step <= dim; d += step) {
            vf acc[M][4];
            for (int m = 0; m < M; m++)
                for (int j = 0; j < 4; j++) acc[m][j] = load(&values[m][d + j * W]);
            for (int i = 0; i < count; i++) {
                if (!(bits >> i & 1)) continue;
                vf x[4];
                load_pair(v + i * dim + d, x[0], x[1]);
                load_pair(v + i * dim + d + 2 * W, x[2], x[3]);
                for (int m = 0; m < M; m++)
                    for (int j = 0; j < 4; j++) acc[m][j] += x[j] * weights[m][at + i];
            }
            for (int m = 0; m < M; m++)
                for (int j = 0; j < 4; j++) store(&values[m][d + j * W], acc[m][j]);
        }
    }
    constexpr int small = Wide ? 2 * W : W;
    for (; d < dim; d += small) {
        vf acc[M][2];
        for (int m = 0; m < M; m++)
            for (int j = 0; j < small / W; j++) acc[m][j] = load(&values[m][d + j * W]);
        for (int i = 0; i < count; i++) {
            if (!(bits >> i & 1)) continue;
            vf x[2];
            if constexpr (Wide)
                load_pair(v + i * dim + d, x[0], x[1]);
            else
                x[0] = load(v + i * dim + d);
            for (int m = 0; m < M; m++)
                for (int j = 0; j < small / W; j++) acc[m][j] += x[j] * weights[m][at + i];
        }
        for (int m = 0; m < M; m++)
            for (int j = 0; j < small / W; j++) store(&values[m][d + j * W], acc[m][j]);
    }
}

// Whether this level has dot products of pairs of T.
template <class T>
constexpr bool kInPairs = Lanes<T, true>::step == 2 * W;

// Whether a chunk is read in blocks of 16 entries (`attend_blocks`).
template <class T, bool Wide>
WEFT_INLINE bool in_blocks(const AttentionArgs& a) {
    return W >= 8 && Wide && a.batch->page_size % 16 == 0;
}

// Asks for `bytes` from p on to be in the cache soon.
WEFT_INLINE void prefetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

// What one task works on: the stacked query heads of one KV head in one row.
template <class T>
struct Stack {
    Row row;
    int64_t head;  // KV head
    int count;     // stacked query heads: query-major, then head of the group
    int group;
    const T* q[kMaxStacked];
    Range ranges[kMaxStacked];  // by query
    Range all;                  // what any of the queries may see
    // q as blocks of entries are multiplied with it: for tiles, or in floats as `load_pair` gives them. With dot products
    // of pairs, q is read where it lies.
#if WEFT_AMX
    alignas(64) int32_t tiles[kMaxAttentionDim / 2 * 16];
#endif
    alignas(64) float floats[kInPairs<T> ? 1 : kMaxStacked][kMaxAttentionDim];
};

// Arranges the queries of a stack.
template <class T>
void pack_stack(const AttentionArgs& a, Stack<T>& stack) {
    if constexpr (!kInPairs<T>)
        for (int m = 0; m < stack.count; m++)
            for (int64_t d = 0; d + 2 * W <= a.heads.head_dim; d += 2 * W) {
                vf x[2];
                load_pair(stack.q[m] + d, x[0], x[1]);
                for (int j = 0; j < 2; j++) store(&stack.floats[m][d + j * W], x[j]);
            }
#if WEFT_AMX
    if constexpr (kInPairs<T>) {
        alignas(64) static const int32_t zeros[kMaxAttentionDim / 2] = {};
        for (int64_t d = 0; d + 32 <= a.heads.head_dim; d += 32) {
            const int32_t* from[16];
            for (int m = 0; m < 16; m++) from[m] = m < stack.count ? (const int32_t*)(stack.q[m] + d) : zeros;
            transpose_words(from, stack.tiles + d / 2 * 16, 16);
        }
    }
#endif
}

template <class T>
void stack_of(const AttentionArgs& a, int64_t r, int64_t head, Stack<T>& stack) {
    Row row = stack.row = row_of(*a.batch, r);
    stack.head = head;
    stack.group = (int)(a.heads.num_heads / a.heads.num_kv_heads);
    stack.count = (int)row.num_queries * stack.group;
    stack.all = Range{row.num_entries, 0};
    for (int m = 0; m < stack.count; m++) {
        int64_t token = row.first_token + m / stack.group;
        stack.q[m] = (const T*)a.q + token * a.q_stride + (head * stack.group + m % stack.group) * a.heads.head_dim;
    }
    for (int64_t i = 0; i < row.num_queries; i++) {
        Range range = stack.ranges[i] = range_of(*a.batch, row, i, a.window);
        if (range.begin >= range.end) continue;
        stack.all.begin = least(stack.all.begin, range.begin);
        stack.all.end = most(stack.all.end, range.end);
    }
    pack_stack(a, stack);
}

// scores[m][0..16) = dot(q[m], entry i of k), before scaling, for the heads of a stack.
template <class T>
WEFT_INLINE void score_stack(const Stack<T>& s, const T* k, int64_t dim, float* scores, Fetch& fetch) {
#if WEFT_BF16
    if constexpr (kInPairs<T>) {
#if WEFT_AMX
        const int32_t* tiles = s.tiles;
#else
        const int32_t* tiles = nullptr;
#endif
        return score_entries(s.q, tiles, s.count, k, dim, scores, kChunk, fetch);
    }
#endif
    score_entries(&s.floats[0][0], kMaxAttentionDim, s.count, k, dim, scores, kChunk, fetch);
}

// `attend_chunk` where entries can be read 16 at a time. All that a chunk reads is listed beforehand and fetched some
// blocks ahead, over the seams between K and V and between one task and the next (`next` is what the calling thread will
// read after this chunk), so that arithmetic and memory overlap.
template <class T>
void attend_blocks(const AttentionArgs& a, const Stack<T>& s, int64_t begin, int64_t end, const T* const* next,
                   Partial& out) {
    typedef typename Choose<kInPairs<T>, bf16, float>::type Weight;  // weights meet V in pairs, or alone
    const int64_t dim = a.heads.head_dim, bytes = 16 * dim * (int64_t)sizeof(T);
    const Row& row = s.row;
    constexpr int kBlocks = kChunk / 16;
    alignas(64) float scores[kMaxStacked][kChunk];
    alignas(64) Weight weights[kMaxStacked][kChunk];
    const T* reads[2 * kBlocks + kAhead];
    uint32_t seen[kBlocks];
    const int64_t first = begin / 16 * 16;
    const int blocks = (int)((end - first + 15) / 16);
    for (int b = 0; b < blocks; b++) {
        reads[b] = entry_at<T>(a, row, s.head, 0, first + 16 * b);
        reads[blocks + b] = entry_at<T>(a, row, s.head, 1, first + 16 * b);
    }
    for (int i = 0; i < kAhead; i++) reads[2 * blocks + i] = next[i];
    for (int b = 0; b < blocks; b++) {
        int64_t e = first + 16 * b;
        Fetch fetch(reads[b + kAhead], bytes);
        score_stack(s, reads[b], dim, &scores[0][16 * b], fetch);
        uint32_t any = 0, bits = 0;
        for (int m = 0; m < s.count; m++) {
            if (m % s.group == 0)
                any |= bits = (uint32_t)seen_bits(*a.batch, row, s.ranges[m / s.group], m / s.group, e, 16);
            for (int i = 0; i < 16; i += W) {
                float* at = &scores[m][16 * b + i];
                vf x = load(at) * a.scale;
                store(at, bits == 0xffff ? x : lanes_of(bits >> i) ? x : all(kNothing));
            }
        }
        seen[b] = any;
    }
    for (int m = 0; m < s.count; m++) {
        vf top = all(kNothing), total{};
        for (int i = 0; i < 16 * blocks; i += W) top = larger(top, load(&scores[m][i]));
        out.maximum[m] = maximum(top);
        float shift = out.maximum[m] == kNothing ? 0.0f : out.maximum[m];
        for (int i = 0; i < 16 * blocks; i += W) {
            vf weight = exponential(load(&scores[m][i]) - shift);
            store(&weights[m][i], weight);
            total += weight;
        }
        out.total[m] = sum(total);
        for (int64_t d = 0; d < dim; d += W) store(&out.values[m][d], vf{});
    }
    for (int b = 0; b < blocks; b++) {
        Fetch fetch(reads[blocks + b + kAhead], bytes);
        add_rows(reads[blocks + b], dim, &weights[0][16 * b], kChunk, s.count, seen[b], out.values[0], kMaxAttentionDim,
                 fetch);
    }
}

// The partial result over entries [begin, end) of one chunk.
template <class T, bool Wide>
void attend_chunk(const AttentionArgs& a, const Stack<T>& s, int64_t begin, int64_t end, const T* const* next,
                  Partial& out) {
    if constexpr (W >= 8)
        if (in_blocks<T, Wide>(a)) return attend_blocks(a, s, begin, end, next, out);
    const int64_t dim = a.heads.head_dim, page_size = a.batch->page_size;
    const Row& row = s.row;
    alignas(64) float scores[kMaxStacked][kChunk];
    uint32_t seen_by_any[kChunk];  // by block, in order
    uint16_t starts[kChunk + 1];
    int blocks = 0;
    for (int64_t e = begin; e < end; blocks++) {
        int64_t room = page_size - e % page_size;
        int n = (int)least<int64_t>(least<int64_t>(W, room), end - e);
        const T* k = entry_at<T>(a, row, s.head, 0, e);
        if (e + n < end) prefetch(entry_at<T>(a, row, s.head, 0, e + n), n * dim * (int64_t)sizeof(T));
        uint32_t any = 0, bits[kMaxStacked];
        for (int64_t i = 0; i < row.num_queries; i++)
            any |= bits[i] = (uint32_t)seen_bits(*a.batch, row, s.ranges[i], i, e, n);
        int at = (int)(e - begin);
        starts[blocks] = (uint16_t)at;
        seen_by_any[blocks] = any;
        for (int m = 0; m < s.count; m++) {
            uint32_t mine = bits[m / s.group];
            if (n == W) {
                vf x;
                score_block<T, Wide, 1>(s.q + m, k, dim, &x);
                store(&scores[m][at], lanes_of(mine) ? x * a.scale : all(kNothing));
            } else {
                for (int i = 0; i < n; i++)
                    scores[m][at + i] =
                        mine >> i & 1 ? score_one<T, Wide>(s.q[m], k + i * dim, dim) * a.scale : kNothing;
            }
        }
        e += n;
    }
    int length = (int)(end - begin);
    starts[blocks] = (uint16_t)length;
    for (int m = 0; m < s.count; m++) {
        for (int i = length; i < (length + W - 1) / W * W; i++) scores[m][i] = kNothing;
        vf top = all(kNothing), total{};
        for (int i = 0; i < length; i += W) top = larger(top, load(&scores[m][i]));
        float maximum_score = maximum(top);
        out.maximum[m] = maximum_score;
        float shift = maximum_score == kNothing ? 0.0f : maximum_score;
        for (int i = 0; i < length; i += W) {
            vf weight = exponential(load(&scores[m][i]) - shift);
            store(&scores[m][i], weight);
            total += weight;
        }
        out.total[m] = sum(total);
        for (int64_t d = 0; d < dim; d += W) store(&out.values[m][d], vf{});
    }
    for (int b = 0; b < blocks; b++) {
        int at = starts[b], n = starts[b + 1] - at;
        const T* v = entry_at<T>(a, row, s.head, 1, begin + at);
        if (b + 1 < blocks) prefetch(entry_at<T>(a, row, s.head, 1, begin + at + n), n * dim * (int64_t)sizeof(T));
        int m = 0;
        uint64_t bits = seen_by_any[b];
        for (; m + 4 <= s.count; m += 4) add_values<T, Wide, 4>(v, dim, scores + m, at, bits, n, out.values + m);
        for (; m + 2 <= s.count; m += 2) add_values<T, Wide, 2>(v, dim, scores + m, at, bits, n, out.values + m);
        for (; m < s.count; m++) add_values<T, Wide, 1>(v, dim, scores + m, at, bits, n, out.values + m);
    }
}

// Joins the partial result of later entries to that of earlier ones.
inline void join(Partial& into, const Partial& from, int count, int64_t dim) {
    for (int m = 0; m < count; m++) {
        if (from.maximum[m] == kNothing && from.total[m] == 0) continue;  // scores that are NaN have no maximum either
        float top = most(into.maximum[m], from.maximum[m]);
        float keep = into.maximum[m] == kNothing ? 0.0f : exponential(into.maximum[m] - top);
        float add = exponential(from.maximum[m] - top);
        into.maximum[m] = top;
        into.total[m] = into.total[m] * keep + from.total[m] * add;
        for (int64_t d = 0; d < dim; d += W)
            store(&into.values[m][d], load(&into.values[m][d]) * keep + load(&from.values[m][d]) * add);
    }
}

inline void clear(Partial& partial, int count, int64_t dim) {
    for (int m = 0; m < count; m++) {
        partial.maximum[m] = kNothing;
        partial.total[m] = 0;
        for (int64_t d = 0; d < dim; d += W) store(&partial.values[m][d], vf{});
    }
}

template <class T, bool Wide>
void write_out(const AttentionArgs& a, const Stack<T>& s, const Partial& result) {
    const int64_t dim = a.heads.head_dim;
    for (int m = 0; m < s.count; m++) {
        int64_t token = s.row.first_token + m / s.group, head = s.head * s.group + m % s.group;
        T* to = (T*)a.out + (token * a.heads.num_heads + head) * dim;
        float scale = result.total[m] > 0 ? 1.0f / result.total[m] : 0.0f;
        // NaN weights stay NaN: a sum that is not positive and not zero must not look like a query without entries.
        if (result.total[m] != result.total[m]) scale = result.total[m];
        const float* values = result.values[m];
#if WEFT_BF16
        if constexpr (kInPairs<T>)
            if (in_blocks<T, Wide>(a)) {
                write_values(values, scale, dim, to);
                continue;
            }
#endif
        for (int64_t d = 0; d < dim; d++) {
            int64_t from = d;
            if constexpr (Wide && sizeof(T) == 2) {
                int64_t block = d / (2 * W) * (2 * W), i = d - block;
                from = block + i / 2 + (i % 2) * W;
            }
            narrow(to + d, values[from] * scale);
        }
    }
}

inline int64_t first_chunk(Range range) { return range.begin / kChunk; }
inline int64_t num_chunks(Range range) {
    return range.begin >= range.end ? 0 : (range.end + kChunk - 1) / kChunk - range.begin / kChunk;
}
inline Range chunk_range(Range range, int64_t chunk) {
    int64_t begin = (first_chunk(range) + chunk) * kChunk;
    return Range{most(range.begin, begin), least(range.end, begin + kChunk)};
}

// Partial results of shared chunks: for each member and KV head, `stacked` times values, maximum and sum.
struct SharedParts {
    float* data = nullptr;
    int64_t stacked = 0;  // the most query heads that a member stacks
    float* at(const AttentionArgs& a, int64_t slot, int64_t head) const {
        return data + (slot * a.heads.num_kv_heads + head) * stacked * (a.heads.head_dim + 2);
    }
};

// The member of a shared chunk that a row is, or -1.
inline int64_t shared_slot(const Batch& batch, int64_t r, int64_t chunk) {
    if (!batch.num_groups) return -1;
    int64_t first = batch.shared_indptr[r];
    return chunk < batch.shared_indptr[r + 1] - first ? batch.shared_slots[first + chunk] : -1;
}

// One shared chunk for one KV head: all its members stacked, as many at a time as a stack takes.
template <class T, bool Wide>
void attend_group(const AttentionArgs& a, int64_t g, int64_t head, const SharedParts& parts) {
    const Batch& batch = *a.batch;
    const int64_t dim = a.heads.head_dim, begin = batch.group_chunks[g] * (int64_t)kChunk;
    const T* next[kAhead] = {};
    Stack<T> stack;
    Partial part;
    stack.group = (int)(a.heads.num_heads / a.heads.num_kv_heads);
    stack.head = head;
#if WEFT_AMX
    TileUnit in_use;
#endif
    int64_t from = batch.group_indptr[g];
    const int64_t last = batch.group_indptr[g + 1];
    while (from < last) {
        stack.row = row_of(batch, batch.members[from]);
        stack.row.words = nullptr;  // every member sees the whole chunk
        stack.count = 0;
        int64_t to = from, queries = 0;
        for (; to < last; to++) {
            Row row = row_of(batch, batch.members[to]);
            if (stack.count + row.num_queries * stack.group > kMaxStacked) break;
            for (int64_t i = 0; i < row.num_queries; i++, queries++) {
                stack.ranges[queries] = Range{begin, begin + kChunk};
                const T* q = (const T*)a.q + (row.first_token + i) * a.q_stride + head * stack.group * dim;
                for (int h = 0; h < stack.group; h++) stack.q[stack.count++] = q + h * dim;
            }
        }
        stack.row.num_queries = queries;
        pack_stack(a, stack);
        attend_chunk<T, Wide>(a, stack, begin, begin + kChunk, next, part);
        int m = 0;
        for (; from < to; from++) {
            float* stored = parts.at(a, from, head);
            int64_t r = batch.members[from], n = (batch.q_indptr[r + 1] - batch.q_indptr[r]) * stack.group;
            for (int64_t i = 0; i < n; i++, m++, stored += dim + 2) {
                __builtin_memcpy(stored, part.values[m], (size_t)dim * sizeof(float));
                stored[dim] = part.maximum[m];
                stored[dim + 1] = part.total[m];
            }
        }
    }
}

inline void load_part(const float* stored, int count, int64_t dim, Partial& part) {
    for (int m = 0; m < count; m++, stored += dim + 2) {
        __builtin_memcpy(part.values[m], stored, (size_t)dim * sizeof(float));
        part.maximum[m] = stored[dim];
        part.total[m] = stored[dim + 1];
    }
}

// The first blocks that the part of a row from entry `begin` on will read; null where there are none.
template <class T>
void first_reads(const AttentionArgs& a, const Row& row, int64_t head, int64_t begin, int64_t end, const T** reads) {
    for (int i = 0; i < kAhead; i++) {
        int64_t entry = begin / 16 * 16 + 16 * i;
        reads[i] = entry < end ? entry_at<T>(a, row, head, 0, entry) : nullptr;
    }
}

// A row for one KV head. `next_r`, if not negative, is the row that the thread is likely to take next.
template <class T, bool Wide>
void attend_stack(const AttentionArgs& a, int64_t r, int64_t head, int64_t next_r, int64_t next_head,
                  const SharedParts& parts) {
    Stack<T> stack;
    stack_of(a, r, head, stack);
#if WEFT_AMX
    TileUnit in_use;
#endif
    Partial result, part;
    clear(result, stack.count, a.heads.head_dim);
    int64_t chunks = num_chunks(stack.all);
    for (int64_t c = 0; c < chunks; c++) {
        int64_t slot = shared_slot(*a.batch, r, c);
        if (slot >= 0) {
            load_part(parts.at(a, slot, head), stack.count, a.heads.head_dim, part);
            join(result, part, stack.count, a.heads.head_dim);
            continue;
        }
        Range range = chunk_range(stack.all, c);
        const T* next[kAhead] = {};
        if (c + 1 < chunks) {
            first_reads<T>(a, stack.row, head, range.end, stack.all.end, next);
        } else if (next_r >= 0) {
            Row row = row_of(*a.batch, next_r);
            Range seen = range_of(*a.batch, row, 0, a.window);
            for (int64_t n = 0; shared_slot(*a.batch, next_r, n) >= 0; n++) seen.begin = (n + 1) * kChunk;
            first_reads<T>(a, row, next_head, seen.begin, seen.end, next);
        }
        attend_chunk<T, Wide>(a, stack, range.begin, range.end, next, part);
        join(result, part, stack.count, a.heads.head_dim);
    }
    write_out<T, Wide>(a, stack, result);
}

}  // namespace
}  // namespace weft
