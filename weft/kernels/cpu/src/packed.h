// The matrix product with a weight that was rearranged once, when it was loaded: bfloat16, any number of rows.
//
// A packed weight is [outputs / 32][inputs / 32][2][16][32]: panels of 32 outputs; in a panel, steps of 32 inputs; in a
// step, two blocks of 16 outputs, each with 16 pairs of inputs for each of its outputs in turn. That is how tiles and
// pairwise dot products read it, in the order in which it lies in memory.
//
// Each result is a sum over the inputs in one fixed order, so a row of x gives the same result alone as among others.
#pragma once

#include "amx.h"
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
// Rows are taken in blocks, which stay in a core's second-level cache while all panels pass by; a panel's steps are
// taken so many at a time that they stay in the first-level cache while the rows of the block pass by.
constexpr int64_t kBlockRows = 512;
constexpr int64_t kBlockBytes = 1280 << 10;
constexpr int64_t kBlockSteps = 8;
constexpr int64_t kFewGroups = 4;  // with so few rows, a whole panel passes by at once: their sums stay in registers

// Rearranges a weight [outputs, inputs]; both are multiples of 32.
inline void pack_weight(const bf16* weight, bf16* packed, int64_t outputs, int64_t inputs, int threads) {
    const int64_t steps = inputs / kStep;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < outputs / kPanel; panel++)
        for (int64_t s = 0; s < steps; s++)
            for (int64_t half = 0; half < 2; half++) {
                const bf16* from = weight + (panel * kPanel + half * 16) * inputs + s * kStep;
                const int32_t* rows[16];
                for (int64_t i = 0; i < 16; i++) rows[i] = (const int32_t*)(from + i * inputs);
                transpose_words(rows, (int32_t*)(packed + ((panel * steps + s) * 2 + half) * kTileSize), 16);
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
};

WEFT_INLINE void fetch_lines(const PanelPart& part, int64_t step) {
    if (!part.fetch) return;
    for (int64_t i = 0; i < part.lines; i++) _mm_prefetch(part.fetch + (step * part.lines + i) * 64, _MM_HINT_T1);
}

#if WEFT_AMX
constexpr int64_t kRowsAtOnce = 32;

// `rows` rows of x as tiles: [tile][step][16][32], zeros after the last row.
inline void tiles_of_rows(const bf16* x, int64_t rows, int64_t inputs, int64_t tile, bf16* to) {
    int64_t steps = inputs / kStep;
    for (int64_t i = 0; i < 16; i++) {
        int64_t row = tile * 16 + i;
        const bf16* from = x + row * inputs;
        bf16* at = to + tile * steps * kTileSize + i * kStep;
        for (int64_t s = 0; s < steps; s++)
            _mm512_store_si512(at + s * kTileSize, row < rows ? _mm512_loadu_si512(from + s * kStep) : __m512i{});
    }
}

// For 16 * M rows of x, given as tiles that are `x_tile` elements apart.
template <int M>
WEFT_INLINE void panel_tiles(const bf16* x, int64_t x_tile, const PanelPart& part) {
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
        fetch_lines(part, s);
        const bf16* w = part.weight + s * kStepSize;
        _tile_loadd(6, w, 64);
        _tile_loadd(4, x + s * kTileSize, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + kTileSize, 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (M == 2) {
            _tile_loadd(5, x + x_tile + s * kTileSize, 64);
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
constexpr int64_t kRowsAtOnce = 12;

// For M rows of x, `inputs` elements apart.
template <int M>
WEFT_INLINE void panel_rows(const bf16* x, int64_t inputs, const PanelPart& part) {
    __m512 acc[M][2];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++)
            acc[m][n] = part.add ? _mm512_loadu_ps(part.sums + m * kPanel + n * 16) : _mm512_setzero_ps();
    for (int64_t s = 0; s < part.steps; s++) {
        fetch_lines(part, s);
        const bf16 *w = part.weight + s * kStepSize, *from = x + s * kStep;
        for (int64_t pair = 0; pair < 16; pair++) {
            __m512bh left = (__m512bh)_mm512_loadu_si512(w + pair * 32);
            __m512bh right = (__m512bh)_mm512_loadu_si512(w + kTileSize + pair * 32);
            for (int m = 0; m < M; m++) {
                int32_t values;
                __builtin_memcpy(&values, from + m * inputs + 2 * pair, 4);
                __m512bh y = (__m512bh)_mm512_set1_epi32(values);
                acc[m][0] = _mm512_dpbf16_ps(acc[m][0], left, y);
                acc[m][1] = _mm512_dpbf16_ps(acc[m][1], right, y);
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++) _mm512_storeu_ps(part.sums + m * kPanel + n * 16, acc[m][n]);
}
#endif

// The value of an output before it is rounded: its sum and its bias.
WEFT_INLINE vf with_bias(const LinearArgs& a, const float* sums, int64_t column) {
    vf y = load(sums);
    return a.bias ? y + load((const bf16*)a.bias + column) : y;
}

// Writes rows [first, first + rows) of 32 outputs, from their sums; with `gates`, from the sums of both halves.
WEFT_INLINE void write_panel(const LinearArgs& a, const float* sums, const float* gates, int64_t first, int64_t rows,
                             int64_t panel) {
    const int64_t half = a.outputs / 2, width = gates ? half : a.outputs;
    const int64_t from = panel * kPanel, to = gates ? from - half : from;
    for (int64_t i = 0; i < rows; i++) {
        int64_t at = (first + i) * width + to;
        vf y[2];
        for (int j = 0; j < 2; j++) {
            int64_t lane = i * kPanel + j * W;
            y[j] = with_bias(a, sums + lane, from + j * W);
            if (gates) {
                const bf16* type = nullptr;
                y[j] = gated(as_stored(type, with_bias(a, gates + lane, to + j * W)), as_stored(type, y[j]));
            }
            if (a.residual) y[j] += load((const bf16*)a.residual + at + j * W);
        }
        _mm512_storeu_si512((bf16*)a.out + at, (__m512i)_mm512_cvtne2ps_pbh((__m512)y[1], (__m512)y[0]));
    }
}

// Rows of x that one call works on: `x` is what the product reads, tiles of a block of rows or the rows of x.
struct RowPart {
    const bf16* x;
    int64_t block;  // the first row of the block
    int64_t first;
    int64_t rows;
};

// The sums of these rows for one panel; `next` is the panel that is read after it, or null. With `write`, what is
// written from them, while they are in the cache.
inline void linear_panel(const LinearArgs& a, const RowPart& r, int64_t panel, const bf16* next, float* sums,
                         bool write, const float* gates) {
    const int64_t steps = a.inputs / kStep, size = steps * kStepSize;
    const int64_t groups = (r.rows + kRowsAtOnce - 1) / kRowsAtOnce;
    const bf16* weight = (const bf16*)a.weight + panel * size;
    PanelPart part{nullptr, groups <= kFewGroups ? steps : kBlockSteps, false, nullptr, nullptr, 0};
    part.lines = (kStepSize * 2 / 64 + groups - 1) / groups;
    const char *fetch = (const char*)next, *end = fetch + (next ? size * 2 : 0);
    for (int64_t s = 0; s < steps; s += part.steps) {
        part.weight = weight + s * kStepSize;
        part.steps = least(part.steps, steps - s);
        part.add = s > 0;
        for (int64_t m = 0; m < r.rows; m += kRowsAtOnce) {
            int64_t count = least(kRowsAtOnce, r.rows - m);
            int64_t bytes = part.lines * part.steps * 64;
            part.sums = sums + m * kPanel;
            part.fetch = next && fetch + bytes <= end ? fetch : nullptr;
            fetch += bytes;
#if WEFT_AMX
            const bf16* tiles = r.x + (r.first + m - r.block) / 16 * steps * kTileSize + s * kTileSize;
            count > 16 ? panel_tiles<2>(tiles, steps * kTileSize, part) : panel_tiles<1>(tiles, 0, part);
#else
            const bf16* from = r.x + (r.first + m) * a.inputs + s * kStep;
            int64_t i = 0;
            if (count == kRowsAtOnce) {
                panel_rows<kRowsAtOnce>(from, a.inputs, part);
                i = count;
            }
            for (; i + 4 <= count; i += 4, part.sums += 4 * kPanel) panel_rows<4>(from + i * a.inputs, a.inputs, part);
            for (; i < count; i++, part.sums += kPanel) panel_rows<1>(from + i * a.inputs, a.inputs, part);
#endif
            if (write && s + part.steps == steps)
                write_panel(a, sums + m * kPanel, gates ? gates + m * kPanel : nullptr, r.first + m, count, panel);
        }
    }
}

inline void linear_packed(const LinearArgs& a) {
    static thread_local Memory shared;
    // A gated product takes two panels at a time, a gate's and what it gates.
    const int64_t all_panels = a.outputs / kPanel, panels = a.gated ? all_panels / 2 : all_panels;
    const int64_t size = a.inputs * kPanel;
    // Equal blocks, each a whole number of what is computed at once.
    int64_t most_rows = least(kBlockRows, most<int64_t>(64, kBlockBytes / (a.inputs * 2)));
    int64_t blocks = (a.rows + most_rows - 1) / most_rows;
    int64_t block_rows = ((a.rows + blocks - 1) / blocks + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce;
    // Where there are fewer panels than threads, rows are divided too.
    int64_t split = most<int64_t>(1, least(block_rows / kRowsAtOnce, (a.threads + panels - 1) / panels));
    int64_t part_rows = (block_rows / kRowsAtOnce + split - 1) / split * kRowsAtOnce;
    bf16* tiles = nullptr;
#if WEFT_AMX
    tiles = (bf16*)shared.at_least((size_t)(block_rows * a.inputs) * 2);
#endif
#pragma omp parallel num_threads(threads_for(a.inputs * a.outputs, a.threads))
    {
        static thread_local Memory memory;
        float* sums = (float*)memory.at_least((size_t)(2 * part_rows * kPanel) * 4);
        float* gates = sums + part_rows * kPanel;
#if WEFT_AMX
        TileUnit in_use;
#endif
        for (int64_t block = 0; block < a.rows; block += block_rows) {
            int64_t rows = least(block_rows, a.rows - block);
            const bf16* x = (const bf16*)a.x;
#if WEFT_AMX
#pragma omp for schedule(static)
            for (int64_t t = 0; t < (rows + 15) / 16; t++)
                tiles_of_rows((const bf16*)a.x + block * a.inputs, rows, a.inputs, t, tiles);
            x = tiles;
#endif
            int64_t parts = (rows + part_rows - 1) / part_rows;
#pragma omp for schedule(static)
            for (int64_t task = 0; task < panels * parts; task++) {
                int64_t panel = task / parts, first = task % parts * part_rows;
                RowPart part{x, block, block + first, least(part_rows, rows - first)};
                const bf16* weight = (const bf16*)a.weight + panel * size;
                const bf16* next = panel + 1 < panels ? weight + size : nullptr;
                if (a.gated) {
                    linear_panel(a, part, panel, weight + panels * size, gates, false, nullptr);
                    linear_panel(a, part, panels + panel, next, sums, true, gates);
                } else {
                    linear_panel(a, part, panel, next, sums, true, nullptr);
                }
            }
        }
    }
}

}  // namespace
}  // namespace weft

#endif
