// The matrix product with a weight that was rearranged once, when it was loaded: any number of rows.
//
// A packed weight is [outputs / 32][inputs / 32][...]: panels of 32 outputs, and in a panel steps of 32 inputs. What is in
// a step depends on the dtype of the weight and on the level: see `Pairs` (panel_pairs.h), `Tiles` (panel_tiles.h),
// `Floats` (panel_floats.h), `BlockProduct` (quant_panel.h) and `BlockTiles` (quant_tiles.h), which multiply a panel. This
// file divides a product among threads, cuts it into blocks that stay in the caches, and writes results.
//
// Each result is a sum over the inputs in one fixed order, so a row of x gives the same result alone as among others that
// are multiplied in the same way.
#pragma once

#include "memory.h"
#include "simd.h"
#include "threads.h"

namespace weft {
namespace {

constexpr int64_t kPanel = 32;                 // outputs
constexpr int64_t kStep = 32;                  // inputs; a product's own `kInputs` may be others
constexpr int64_t kStepSize = kPanel * kStep;  // elements
constexpr int64_t kVectors = kPanel / W;       // of a row of a panel
// A thread takes its rows in blocks, which stay in its second-level cache while its panels pass by; a panel's steps are
// taken so many at a time that they stay in the first-level cache while the rows of the block pass by.
constexpr int64_t kBlockRows = 512;
constexpr int64_t kRowsPerThread = 256;      // with as many or more, threads divide the rows; with fewer, the panels
constexpr int64_t kRunsPerThread = 16;       // of panels, where threads take them when they are free
constexpr int64_t kStreamedBytes = 1 << 20;  // a result as large as this is written past the caches

// Sums that are ready: of `rows` rows of the result from row `first` on, for one panel of 32 outputs. With `gates`, the
// sums of the panel's gates, what is written is a gated product.
struct ReadySums {
    const float* sums;
    const float* gates;
    int64_t first;
    int64_t rows;
    int64_t panel;
};

// The value of an output before it is rounded: its sum, and its bias.
template <class T>
WEFT_INLINE vf with_bias(const LinearArgs& a, const float* sums, int64_t column) {
    vf y = load(sums);
    return a.bias ? y + load((const T*)a.bias + column) : y;
}

// Stores a row of a panel; a line that is streamed need not be read first.
template <class T>
WEFT_INLINE void store_row(T* to, const vf* y, bool) {
    for (int j = 0; j < kVectors; j++) store(to + j * W, y[j]);
}
#if WEFT_BF16
WEFT_INLINE void store_row(bf16* to, const vf* y, bool streamed) {
    __m512i line = (__m512i)_mm512_cvtne2ps_pbh((__m512)y[1], (__m512)y[0]);
    streamed ? _mm512_stream_si512((__m512i*)to, line) : _mm512_storeu_si512(to, line);
}
#endif

// Writes rows [from, to) of them.
template <class T>
WEFT_INLINE void write_rows(const LinearArgs& a, const ReadySums& ready, int64_t from, int64_t to) {
    const int64_t half = a.outputs / 2, width = a.stride ? a.stride : ready.gates ? half : a.outputs;
    const int64_t column = ready.panel * kPanel, target = ready.gates ? column - half : column;
    const bool streamed = a.rows * width * (int64_t)sizeof(T) >= kStreamedBytes && (uintptr_t)a.out % 64 == 0;
    for (int64_t i = from; i < least(to, ready.rows); i++) {
        int64_t at = (ready.first + i) * width + target;
        vf y[kVectors];
        for (int j = 0; j < kVectors; j++) {
            int64_t lane = i * kPanel + j * W;
            y[j] = with_bias<T>(a, ready.sums + lane, column + j * W);
            if (ready.gates) {
                const T* type = nullptr;
                vf gate = with_bias<T>(a, ready.gates + lane, target + j * W);
                y[j] = gated(as_stored(type, gate), as_stored(type, y[j]));
            }
            if (a.residual) y[j] += load((const T*)a.residual + at + j * W);
        }
        store_row((T*)a.out + at, y, streamed);
    }
}

// What of a panel's product one call computes: sums[m][32] (+)= rows m of x times steps of the panel.
struct PanelPart {
    const char* weight;
    int64_t steps;
    bool add;           // to what is in `sums`
    float* sums;        // rows 32 apart
    const char* fetch;  // what will be read after this panel; null: nothing
    int64_t lines;      // of `fetch`, per step
    bool near;          // instead of `fetch`, lines of this panel are fetched ahead of their turn
    const LinearArgs* args;
    ReadySums ready;  // of the rows before these; without rows: none
    const char* end;  // of this panel
    int64_t jump;     // from there to the panel that this thread reads next

    // Where that lies which is read when `line` would be, if the next panel followed this one.
    WEFT_INLINE const char* following(const char* line) const { return line >= end ? line + jump : line; }
};

// What is done beside each step, so that memory and arithmetic work at the same time.
WEFT_INLINE void fetch_beside(const PanelPart& part, int64_t step) {
    if (part.fetch)
        for (int64_t i = 0; i < part.lines; i++)
            __builtin_prefetch(part.fetch + (step * part.lines + i) * 64, 0, 2);
}

template <int M>
struct Count {
    static constexpr int value = M;
};

// run(Count<rows>), for 1 to M rows.
template <int M, class F>
WEFT_INLINE void with_count(int64_t rows, const F& run) {
    if (rows == M) return run(Count<M>());
    if constexpr (M > 1) with_count<M - 1>(rows, run);
}

// Rows of x that one call works on: `x` is where they begin in what the product reads.
template <class P>
struct RowPart {
    const typename P::Value* x;
    int64_t first;
    int64_t rows;
    char* expanded;  // room for `P::kBlockSteps` steps, where a weight is expanded

    int64_t groups() const { return (rows + P::kRowsAtOnce - 1) / P::kRowsAtOnce; }
    // Rows of a group: as equal as can be, since a group of few takes longer for each.
    int64_t at_once() const { return P::kEqualGroups ? (rows + groups() - 1) / groups() : P::kRowsAtOnce; }
};

// The sums of these rows for one panel; `next` is the panel that is read after it, or null. With `write`, what is
// written from them, while they are in the cache.
template <class P>
void linear_panel(const LinearArgs& a, const RowPart<P>& r, int64_t panel, const char* next, float* sums, bool write,
                  const float* gates) {
    const int64_t steps = a.inputs / P::kInputs, size = steps * P::kStepBytes;
    const int64_t groups = r.groups(), each = r.at_once();
    const bool expand = P::expands(groups), whole = P::takes_whole(groups);
    const char* weight = (const char*)a.weight + panel * size;
    PanelPart part{nullptr, whole ? steps : P::kBlockSteps, false, nullptr, nullptr, 0, false, &a, {}, weight + size, next ? next - (weight + size) : 0};
    part.near = P::kNearBytes && groups == 1 && !expand;
    part.lines = (P::kStepBytes / 64 + groups - 1) / groups;
    const char *fetch = next, *end = fetch + (next ? size : 0);
    for (int64_t s = 0; s < steps; s += part.steps) {
        part.steps = least(part.steps, steps - s);
        part.add = s > 0;
        const char* from = weight + s * P::kStepBytes;
        if (expand) P::expand_steps(from, r.expanded, part.steps);
        part.weight = expand ? r.expanded : from;
        for (int64_t m = 0; m < r.rows; m += each) {
            int64_t count = least(each, r.rows - m);
            int64_t bytes = part.lines * part.steps * 64;
            part.sums = sums + m * kPanel;
            part.fetch = next && fetch < end ? fetch : nullptr;  // beyond the end it does no harm
            fetch += bytes;
            P::multiply(r.x + m * a.inputs, s, count, groups, expand, part);
            if (write && s + part.steps == steps) {
                const int64_t at = m * kPanel;
                part.ready = {sums + at, gates ? gates + at : nullptr, r.first + m, count, panel};
                if (!P::kWritesBeside) {
                    write_rows<typename P::Stored>(a, part.ready, 0, count);
                    part.ready.rows = 0;
                }
            }
        }
    }
    write_rows<typename P::Stored>(a, part.ready, 0, part.ready.rows);
}

// The largest divisor of `threads` that is at most `most`.
inline int64_t divisor(int64_t threads, int64_t most) {
    int64_t found = least(threads, most);
    while (threads % found) found--;
    return found;
}

// Threads form a grid: so many parts of the rows, times so many parts of the panels. Where all have the same rows, and
// P has it so, each takes the next few panels whenever it is free instead: one may compute more slowly than another,
// because its core serves other programs too.
template <class P>
void multiply_packed(const LinearArgs& a) {
    typedef typename P::Value Value;
    // A gated product takes two panels at a time, a gate's and what it gates.
    const int64_t all_panels = a.outputs / kPanel, panels = a.gated ? all_panels / 2 : all_panels;
    const int64_t size = a.inputs / P::kInputs * P::kStepBytes, groups = (a.rows + P::kRowsAtOnce - 1) / P::kRowsAtOnce;
    const int64_t threads = threads_for(a.inputs * a.outputs, a.threads);
    const int64_t wanted = most(a.rows / kRowsPerThread, (threads + panels - 1) / panels);
    const int64_t row_parts = divisor(threads, most<int64_t>(1, least(wanted, groups)));
    const int64_t panel_parts = threads / row_parts;
    const int64_t row_size = a.inputs * (int64_t)sizeof(Value);
    const int64_t most_groups = least(kBlockRows, most<int64_t>(64, P::kBlockBytes / row_size)) / P::kRowsAtOnce;
    // Equal blocks, each a whole number of what is computed at once.
    const auto blocks_of = [&](int64_t count) { return (count + most_groups - 1) / most_groups; };
    const auto block_rows_of = [&](int64_t count) {
        const int64_t blocks = blocks_of(count);
        return blocks ? (count + blocks - 1) / blocks * P::kRowsAtOnce : 0;
    };
    int64_t taken = 0;  // runs of panels, of the first block, then of the second, and so on
    on_threads(threads, [&](int64_t member, int64_t members) {
        static thread_local Memory memory;
        // Parts of the rows differ by a group, and either may have the larger blocks.
        const int64_t each_part = groups / row_parts;
        const int64_t most_rows = most(block_rows_of(each_part), block_rows_of(each_part + (groups % row_parts > 0)));
        const int64_t sum_bytes = most_rows * kPanel * (int64_t)sizeof(float);
        char* expanded = (char*)memory.at_least((size_t)(P::kExpandedBytes + 2 * sum_bytes + most_rows * row_size));
        float* sums = (float*)(expanded + P::kExpandedBytes);
        float* gates = sums + most_rows * kPanel;
        Value* rearranged = (Value*)(gates + most_rows * kPanel);
        const typename P::InUse in_use;
        RowPart<P> part{nullptr, 0, 0, expanded};
        const auto take_rows = [&](int64_t first, int64_t rows) {
            part.first = first;
            part.rows = rows;
            part.x = P::rearrange(a, part, rearranged);
        };
        // Panels [from, to); `after` is the panel that this thread takes after them, or -1.
        const auto take_panels = [&](int64_t from, int64_t to, int64_t after) {
            for (int64_t panel = from; panel < to; panel++) {
                const char* weight = (const char*)a.weight + panel * size;
                const int64_t following = panel + 1 < to ? panel + 1 : after;
                const char* next = following < 0 ? nullptr : (const char*)a.weight + following * size;
                if (a.gated) {
                    linear_panel<P>(a, part, panel, weight + panels * size, gates, false, nullptr);
                    linear_panel<P>(a, part, panels + panel, next, sums, true, gates);
                } else {
                    linear_panel<P>(a, part, panel, next, sums, true, nullptr);
                }
            }
        };
        if (P::kTakesWhenFree && row_parts == 1) {
            const int64_t each = most<int64_t>(1, panels / (threads * kRunsPerThread));
            const int64_t runs = (panels + each - 1) / each;
            const int64_t block_rows = block_rows_of(groups);
            const int64_t end = runs * blocks_of(groups);
            const auto take = [&] { return __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); };
            int64_t block = -1;
            for (int64_t item = take(), after; item < end; item = after) {
                after = take();
                if (item / runs != block) {
                    block = item / runs;
                    take_rows(block * block_rows, least(block_rows, a.rows - block * block_rows));
                }
                const int64_t from = item % runs * each;
                take_panels(from, least(from + each, panels), after < end ? after % runs * each : -1);
            }
        } else {
            for (int64_t task = threads * member / members; task < threads * (member + 1) / members; task++) {
                const int64_t row_part = task % row_parts, panel_part = task / row_parts;
                const int64_t from = groups * row_part / row_parts, to = groups * (row_part + 1) / row_parts;
                const int64_t first_panel = panels * panel_part / panel_parts;
                const int64_t end = panels * (panel_part + 1) / panel_parts;
                const int64_t block_rows = block_rows_of(to - from), rows = least(to * P::kRowsAtOnce, a.rows);
                for (int64_t first = from * P::kRowsAtOnce; first < rows; first += block_rows) {
                    take_rows(first, least(block_rows, rows - first));
                    take_panels(first_panel, end, -1);
                }
            }
        }
#if WEFT_AVX512
        _mm_sfence();
#endif
    });
}

}  // namespace
}  // namespace weft
