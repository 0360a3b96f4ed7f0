// A panel of a packed weight times rows of x, with matrix tiles (AMX): bfloat16.
//
// The weight lies as `Pairs` has it: a step's block of 16 outputs is one tile.
#pragma once

#include "amx.h"
#include "panel_pairs.h"

#if WEFT_AMX

namespace weft {
namespace {

struct Tiles {
    typedef bf16 Stored;
    typedef bf16 Value;
    typedef TileUnit InUse;
    static constexpr int64_t kInputs = kStep;
    static constexpr int64_t kRowsAtOnce = 32;
    static constexpr bool kEqualGroups = false;
    static constexpr int64_t kBlockSteps = 16;
    static constexpr int64_t kBlockBytes = 1 << 20;
    static constexpr int64_t kWholeGroups = 4;
    static constexpr int64_t kNearBytes = Pairs::kNearBytes;
    static constexpr bool kTakesWhenFree = false;
    static constexpr bool kWritesBeside = true;  // tiles and vectors work at the same time

    static constexpr int64_t kStepBytes = Pairs::kStepBytes;
    static constexpr int64_t kExpandedBytes = 0;
    static bool expands(int64_t) { return false; }
    static bool takes_whole(int64_t groups) { return groups <= kWholeGroups; }
    static void expand_steps(const char*, char*, int64_t) {}

    static const bf16* rearrange(const LinearArgs& a, const RowPart<Tiles>& r, bf16* to) {
        for (int64_t i = 0; i < r.rows; i += kRowsAtOnce)
            rows_as_tiles((const bf16*)a.x, a.rows, a.inputs, r.first + i, to + i * a.inputs);
        return to;
    }

    static WEFT_INLINE void multiply(const bf16* x, int64_t step, int64_t count, int64_t groups, bool,
                                     const PanelPart& part) {
        const bf16* tiles = x + step * kStepSize;
        if (groups > kWholeGroups)
            panel<2, true>(tiles, part);
        else if (count > 16)
            part.near ? panel<2, false, true>(tiles, part) : panel<2, false>(tiles, part);
        else
            part.near ? panel<1, false, true>(tiles, part) : panel<1, false>(tiles, part);
    }

    // 32 rows of x from row `first` on as tiles, [step][2][16][32], zeros from row `rows` on.
    static void rows_as_tiles(const bf16* x, int64_t rows, int64_t inputs, int64_t first, bf16* to) {
        for (int64_t i = 0; i < kRowsAtOnce; i++) {
            const bf16* from = x + (first + i) * inputs;
            bf16* at = to + i * kStep;
            for (int64_t s = 0; s < inputs / kStep; s++)
                _mm512_store_si512(at + s * kStepSize,
                                   first + i < rows ? _mm512_loadu_si512(from + s * kStep) : __m512i{});
        }
    }

    static WEFT_INLINE void beside(const PanelPart& part, int64_t step) {
        if (!part.near) fetch_beside(part, step);
        if (part.ready.rows) {
            const int64_t each = (kRowsAtOnce + part.steps - 1) / part.steps;
            write_rows<bf16>(*part.args, part.ready, step * each, step * each + each);
        }
    }

    // The lines that follow those of a block.
    static WEFT_INLINE void fetch_block(const bf16* block) {
        for (int64_t i = 0; i < kTileSize; i += 32) Pairs::fetch_ahead(block + i);
    }

    template <int M, bool Streamed, bool Near = false>
    static WEFT_INLINE void panel(const bf16* x, const PanelPart& part) {
        multiply_steps<M, Streamed, Near>(x, part, [&](int64_t s) { return (const bf16*)part.weight + s * kStepSize; });
    }

    // For 16 * M rows of x, given as tiles, and steps of the weight, which `weight(s)` gives in their order. Streamed: x
    // does not displace the weight from the first-level cache.
    template <int M, bool Streamed, bool Near, class Weight>
    static WEFT_INLINE void multiply_steps(const bf16* x, const PanelPart& part, const Weight& weight) {
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
            const bf16 *w = weight(s), *rows = x + s * kStepSize;
            if (Near) fetch_block(w);
            _tile_loadd(6, w, 64);
            if constexpr (Streamed)
                _tile_stream_loadd(4, rows, 64);
            else
                _tile_loadd(4, rows, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (Near) fetch_block(w + kTileSize);
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
};

}  // namespace
}  // namespace weft

#endif
