// The matrix product with a weight that was rearranged once, when it was loaded: bfloat16 rows, any number of them.
//
// A packed weight is [outputs / 32][inputs / 32][2][16][32]: panels of 32 outputs; in a panel, steps of 32 inputs; in a
// step, two blocks of 16 outputs, each with 16 pairs of inputs for each of its outputs in turn. That is how tiles and
// pairwise dot products read it, in the order in which it lies in memory.
//
// An int8 weight (int8.h) becomes bfloat16 on its way: in registers for as many rows as are computed at once, else a few
// steps at a time in the cache, for all rows of a block. Its sums are scaled when they are written.
//
// Each result is a sum over the inputs in one fixed order, so a row of x gives the same result alone as among others.
#pragma once

#include "amx.h"
#include "int8.h"
#include "memory.h"
#include "simd.h"
#include "threads.h"

#if WEFT_AVX512

namespace weft {
namespace {

constexpr int64_t kPanel = 32;                 // outputs
constexpr int64_t kStep = 32;                  // inputs
constexpr int64_t kStepSize = kPanel * kStep;  // elements
constexpr int64_t kTileSize = 16 * kStep;      // elements
// A thread takes its rows in blocks, which stay in its second-level cache while its panels pass by; a panel's steps are
// taken so many at a time that they stay in the first-level cache while the rows of the block pass by.
constexpr int64_t kBlockRows = 512;
constexpr int64_t kBlockBytes = 1 << 20;
#if WEFT_AMX
constexpr bool kTiles = true;
constexpr int64_t kRowsAtOnce = 32;
#else
constexpr bool kTiles = false;
constexpr int64_t kRowsAtOnce = 12;
#endif
constexpr int64_t kBlockSteps = 16;
constexpr int64_t kFewGroups = 4;  // with so few rows, a whole panel passes by at once: their sums stay in registers
constexpr int64_t kRowsPerThread = 256;  // with as many or more, threads divide the rows; with fewer, the panels
constexpr int64_t kStreamedBytes = 1 << 20;  // a result as large as this is written past the caches

// Rearranges a weight [outputs, inputs]; both are multiples of 32.
inline void pack_weight(const bf16* weight, bf16* packed, int64_t outputs, int64_t inputs, int threads) {
    const int64_t steps = inputs / kStep;
    for_each(threads, outputs / kPanel, [&](int64_t panel) {
        for (int64_t s = 0; s < steps; s++)
            for (int64_t half = 0; half < 2; half++) {
                const bf16* from = weight + (panel * kPanel + half * 16) * inputs + s * kStep;
                const int32_t* rows[16];
                for (int64_t i = 0; i < 16; i++) rows[i] = (const int32_t*)(from + i * inputs);
                transpose_words(rows, (int32_t*)(packed + ((panel * steps + s) * 2 + half) * kTileSize), 16);
            }
    });
}

// Sums that are ready: of `rows` rows of the result from row `first` on, for one panel of 32 outputs. With `gates`, the
// sums of the panel's gates, what is written is a gated product.
struct ReadySums {
    const float* sums;
    const float* gates;
    int64_t first;
    int64_t rows;
    int64_t panel;
};

// The value of an output before it is rounded: its sum, scaled, and its bias.
WEFT_INLINE vf with_bias(const LinearArgs& a, const float* sums, int64_t column) {
    vf y = load(sums);
    if (a.scales) y *= load(a.scales + column);
    return a.bias ? y + load((const bf16*)a.bias + column) : y;
}

// Writes rows [from, to) of them.
WEFT_INLINE void write_rows(const LinearArgs& a, const ReadySums& ready, int64_t from, int64_t to) {
    const int64_t half = a.outputs / 2, width = ready.gates ? half : a.outputs;
    const int64_t column = ready.panel * kPanel, target = ready.gates ? column - half : column;
    const bool streamed = a.rows * width * 2 >= kStreamedBytes && (uintptr_t)a.out % 64 == 0;
    for (int64_t i = from; i < least(to, ready.rows); i++) {
        int64_t at = (ready.first + i) * width + target;
        vf y[2];
        for (int j = 0; j < 2; j++) {
            int64_t lane = i * kPanel + j * W;
            y[j] = with_bias(a, ready.sums + lane, column + j * W);
            if (ready.gates) {
                const bf16* type = nullptr;
                vf gate = with_bias(a, ready.gates + lane, target + j * W);
                y[j] = gated(as_stored(type, gate), as_stored(type, y[j]));
            }
            if (a.residual) y[j] += load((const bf16*)a.residual + at + j * W);
        }
        __m512i line = (__m512i)_mm512_cvtne2ps_pbh((__m512)y[1], (__m512)y[0]);
        // A line that is written whole need not be read first.
        streamed ? _mm512_stream_si512((__m512i*)((bf16*)a.out + at), line)
                 : _mm512_storeu_si512((bf16*)a.out + at, line);
    }
}

// What of a panel's product one call computes: sums[m][32] (+)= rows m of x times steps of the panel.
struct PanelPart {
    const bf16* weight;
    int64_t steps;
    bool add;           // to what is in `sums`
    float* sums;        // rows 32 apart
    const char* fetch;  // what will be read after this panel; null: nothing
    int64_t lines;      // of `fetch`, per step
    const LinearArgs* args;
    ReadySums ready;    // of the rows before these; without rows: none
};

// What is done beside each step, so that tiles and vectors work at the same time: fetching, and writing rows.
WEFT_INLINE void beside(const PanelPart& part, int64_t step) {
    if (part.fetch)
        for (int64_t i = 0; i < part.lines; i++) _mm_prefetch(part.fetch + (step * part.lines + i) * 64, _MM_HINT_T1);
    if (part.ready.rows) {
        const int64_t each = (kRowsAtOnce + part.steps - 1) / part.steps;
        write_rows(*part.args, part.ready, step * each, step * each + each);
    }
}

#if WEFT_AMX
// 32 rows of x from row `first` on as tiles, [step][2][16][32], zeros from row `rows` on.
inline void tiles_of_rows(const bf16* x, int64_t rows, int64_t inputs, int64_t first, bf16* to) {
    for (int64_t i = 0; i < kRowsAtOnce; i++) {
        const bf16* from = x + (first + i) * inputs;
        bf16* at = to + i * kStep;
        for (int64_t s = 0; s < inputs / kStep; s++)
            _mm512_store_si512(at + s * kStepSize,
                               first + i < rows ? _mm512_loadu_si512(from + s * kStep) : __m512i{});
    }
}

// For 16 * M rows of x, given as tiles. Streamed: x does not displace the weight from the first-level cache.
template <int M, bool Streamed>
WEFT_INLINE void panel_tiles(const bf16* x, const PanelPart& part) {
    float* sums = part.sums;
    TileUnit::barrier();
    if (part.add) {
        _tile_loadd(0, sums, 128);
        _tile_loadd(1, sums + 16, 128);
        if constexpr (M == 2) {
            _tile_loadd(2, sums + 512, 128);
            _tile_loadd(3, sums + 528, 128);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (M == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t s = 0; s < part.steps; s++) {
        beside(part, s);
        const bf16 *w = part.weight + s * kStepSize, *rows = x + s * kStepSize;
        _tile_loadd(6, w, 64);
        if constexpr (Streamed)
            _tile_stream_loadd(4, rows, 64);
        else
            _tile_loadd(4, rows, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + kTileSize, 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (M == 2) {
            if constexpr (Streamed)
                _tile_stream_loadd(5, rows + kTileSize, 64);
            else
                _tile_loadd(5, rows + kTileSize, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    if constexpr (M == 2) {
        _tile_stored(2, sums + 512, 128);
        _tile_stored(3, sums + 528, 128);
    }
    TileUnit::barrier();
}
#else
// Up to 12 rows of x as [pair of inputs][row]: as they lie, rows may be so far apart that they displace each other from
// the first-level cache.
inline void pairs_of_rows(const bf16* x, int64_t rows, int64_t inputs, bf16* to) {
    alignas(64) int32_t turned[16][16];
    const int32_t* from[16];
    for (int64_t k = 0; k < inputs / 2; k += 16) {
        for (int64_t m = 0; m < 16; m++) from[m] = (const int32_t*)(x + least(m, rows - 1) * inputs) + k;
        transpose_words(from, turned[0], 16);
        const __mmask16 kept = (__mmask16)((1u << rows) - 1);
        for (int64_t i = 0; i < 16; i++)
            _mm512_mask_storeu_epi32((int32_t*)to + (k + i) * rows, kept, _mm512_load_si512(turned[i]));
    }
}

// For M rows of x, as pairs.
template <int M>
WEFT_INLINE void panel_rows(const bf16* x, const PanelPart& part) {
    __m512 acc[M][2];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++)
            acc[m][n] = part.add ? _mm512_loadu_ps(part.sums + m * kPanel + n * 16) : _mm512_setzero_ps();
    for (int64_t s = 0; s < part.steps; s++) {
        beside(part, s);
        const bf16 *w = part.weight + s * kStepSize, *from = x + s * kStep * M;
        for (int64_t pair = 0; pair < 16; pair++, from += 2 * M) {
            __m512bh left = (__m512bh)_mm512_loadu_si512(w + pair * 32);
            __m512bh right = (__m512bh)_mm512_loadu_si512(w + kTileSize + pair * 32);
            for (int m = 0; m < M; m++) {
                int32_t values;
                __builtin_memcpy(&values, from + 2 * m, 4);
                __m512bh y = (__m512bh)_mm512_set1_epi32(values);
                acc[m][0] = _mm512_dpbf16_ps(acc[m][0], left, y);
                acc[m][1] = _mm512_dpbf16_ps(acc[m][1], right, y);
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++) _mm512_storeu_ps(part.sums + m * kPanel + n * 16, acc[m][n]);
}

// The same with a panel of a packed int8 weight, all of it.
template <int M>
WEFT_VBMI void panel_rows_int8(const bf16* x, const uint8_t* weight, const PanelPart& part) {
    const Int8Table table;
    __m512 acc[M][2] = {};
    for (int64_t s = 0; s < part.steps; s++) {
        beside(part, s);
        const bf16* from = x + s * kStep * M;
        for (int64_t pair = 0; pair < 16; pair++, weight += kPairBytes, from += 2 * M) {
            const PairWords words = table.widen(weight);
            for (int m = 0; m < M; m++) {
                int32_t values;
                __builtin_memcpy(&values, from + 2 * m, 4);
                __m512bh y = (__m512bh)_mm512_set1_epi32(values);
                acc[m][0] = _mm512_dpbf16_ps(acc[m][0], (__m512bh)words.left, y);
                acc[m][1] = _mm512_dpbf16_ps(acc[m][1], (__m512bh)words.right, y);
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++) _mm512_storeu_ps(part.sums + m * kPanel + n * 16, acc[m][n]);
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
#endif

// Bytes of a step of the weight.
inline int64_t step_bytes(const LinearArgs& a) { return a.scales ? kStepSize : 2 * kStepSize; }

// Rows of x that one call works on: `x` is where they begin in what the product reads, tiles or pairs.
struct RowPart {
    const bf16* x;
    int64_t first;
    int64_t rows;
    bf16* expanded;  // room for `kBlockSteps` steps, with an int8 weight

    int64_t groups() const { return (rows + kRowsAtOnce - 1) / kRowsAtOnce; }
    // Rows of a group: as equal as can be, since a group of few takes longer for each.
    int64_t at_once() const { return kTiles ? kRowsAtOnce : (rows + groups() - 1) / groups(); }
};

// Rows of x as the product reads them.
inline void rearrange_rows(const LinearArgs& a, const RowPart& r, bf16* to) {
    const int64_t each = r.at_once();
    for (int64_t i = 0; i < r.rows; i += each, to += each * a.inputs)
#if WEFT_AMX
        tiles_of_rows((const bf16*)a.x, a.rows, a.inputs, r.first + i, to);
#else
        pairs_of_rows(r.x + i * a.inputs, least(each, r.rows - i), a.inputs, to);
#endif
}

// The sums of these rows for one panel; `next` is the panel that is read after it, or null. With `write`, what is
// written from them, while they are in the cache.
inline void linear_panel(const LinearArgs& a, const RowPart& r, int64_t panel, const char* next, float* sums,
                         bool write, const float* gates) {
    const int64_t steps = a.inputs / kStep, size = steps * step_bytes(a);
    const int64_t groups = r.groups(), each = r.at_once();
    const bool direct = !kTiles && a.scales && groups == 1;
    const bool whole = a.scales ? direct : groups <= kFewGroups;
    const char* weight = (const char*)a.weight + panel * size;
    PanelPart part{nullptr, whole ? steps : kBlockSteps, false, nullptr, nullptr, 0, &a, {}};
    part.lines = (step_bytes(a) / 64 + groups - 1) / groups;
    const char *fetch = next, *end = fetch + (next ? size : 0);
    for (int64_t s = 0; s < steps; s += part.steps) {
        part.steps = least(part.steps, steps - s);
        part.add = s > 0;
        const char* from = weight + s * step_bytes(a);
        if (a.scales && !direct) expand_steps((const uint8_t*)from, r.expanded, part.steps);
        part.weight = a.scales ? r.expanded : (const bf16*)from;
        for (int64_t m = 0; m < r.rows; m += each) {
            int64_t count = least(each, r.rows - m);
            int64_t bytes = part.lines * part.steps * 64;
            part.sums = sums + m * kPanel;
            part.fetch = next && fetch < end ? fetch : nullptr;  // beyond the end it does no harm
            fetch += bytes;
#if WEFT_AMX
            const bf16* tiles = r.x + m * a.inputs + s * kStepSize;
            if (groups > kFewGroups)
                panel_tiles<2, true>(tiles, part);
            else if (count > 16)
                panel_tiles<2, false>(tiles, part);
            else
                panel_tiles<1, false>(tiles, part);
#else
            const bf16* rows = r.x + m * a.inputs + s * kStep * count;
            with_count<kRowsAtOnce>(count, [&](auto counted) {
                constexpr int M = decltype(counted)::value;
                direct ? panel_rows_int8<M>(rows, (const uint8_t*)from, part) : panel_rows<M>(rows, part);
            });
#endif
            if (write && s + part.steps == steps) {
                const int64_t at = m * kPanel;
                part.ready = {sums + at, gates ? gates + at : nullptr, r.first + m, count, panel};
#if !WEFT_AMX
                write_rows(a, part.ready, 0, count);
                part.ready.rows = 0;
#endif
            }
        }
    }
    write_rows(a, part.ready, 0, part.ready.rows);
}

// The largest divisor of `threads` that is at most `most`.
inline int64_t divisor(int64_t threads, int64_t most) {
    int64_t found = least(threads, most);
    while (threads % found) found--;
    return found;
}

// Threads form a grid: so many parts of the rows, times so many parts of the panels.
inline void linear_packed(const LinearArgs& a) {
    // A gated product takes two panels at a time, a gate's and what it gates.
    const int64_t all_panels = a.outputs / kPanel, panels = a.gated ? all_panels / 2 : all_panels;
    const int64_t size = a.inputs / kStep * step_bytes(a), groups = (a.rows + kRowsAtOnce - 1) / kRowsAtOnce;
    const int64_t threads = threads_for(a.inputs * a.outputs, a.threads);
    const int64_t wanted = most(a.rows / kRowsPerThread, (threads + panels - 1) / panels);
    const int64_t row_parts = divisor(threads, most<int64_t>(1, least(wanted, groups)));
    const int64_t panel_parts = threads / row_parts;
    const int64_t most_groups = least(kBlockRows, most<int64_t>(64, kBlockBytes / (a.inputs * 2))) / kRowsAtOnce;
    for_each(threads, threads, [&](int64_t task) {
        static thread_local Memory memory;
        const int64_t row_part = task % row_parts, panel_part = task / row_parts;
        const int64_t from = groups * row_part / row_parts, to = groups * (row_part + 1) / row_parts;
        const int64_t first_panel = panels * panel_part / panel_parts, end = panels * (panel_part + 1) / panel_parts;
        // Equal blocks, each a whole number of what is computed at once.
        const int64_t blocks = (to - from + most_groups - 1) / most_groups;
        const int64_t block_rows = blocks ? (to - from + blocks - 1) / blocks * kRowsAtOnce : 0;
        const int64_t row_bytes = 2 * kPanel * 4 + a.inputs * 2;
        const int64_t expanded_bytes = a.scales ? kBlockSteps * kStepSize * 2 : 0;
        bf16* expanded = (bf16*)memory.at_least((size_t)(expanded_bytes + block_rows * row_bytes));
        float* sums = (float*)((char*)expanded + expanded_bytes);
        float* gates = sums + block_rows * kPanel;
        bf16* rearranged = (bf16*)(gates + block_rows * kPanel);
#if WEFT_AMX
        TileUnit in_use;
#endif
        for (int64_t first = from * kRowsAtOnce; first < least(to * kRowsAtOnce, a.rows); first += block_rows) {
            RowPart part{(const bf16*)a.x + first * a.inputs, first, least(block_rows, a.rows - first), expanded};
            part.rows = least(part.rows, to * kRowsAtOnce - first);
            if (kTiles || a.rows > 1) {  // one row is the same as pairs
                rearrange_rows(a, part, rearranged);
                part.x = rearranged;
            }
            for (int64_t panel = first_panel; panel < end; panel++) {
                const char* weight = (const char*)a.weight + panel * size;
                const char* next = panel + 1 < end ? weight + size : nullptr;
                if (a.gated) {
                    linear_panel(a, part, panel, weight + panels * size, gates, false, nullptr);
                    linear_panel(a, part, panels + panel, next, sums, true, gates);
                } else {
                    linear_panel(a, part, panel, next, sums, true, nullptr);
                }
            }
        }
        _mm_sfence();
    });
}

}  // namespace
}  // namespace weft

#endif
