// The product of one level with weights in quantized blocks: included once by each of its sources (quant_*.cpp).
#pragma once

#include "quant_tiles.h"

namespace weft {
namespace {

inline void linear_blocks(int dtype, int type, const LinearArgs& args) {
    with_layout(type, [&](auto layout) {
        typedef decltype(layout) L;
        if (dtype != kBfloat16) return multiply_packed<BlockProduct<float, L>>(args);
#if WEFT_AMX
        if (args.rows >= kTileRows) return multiply_packed<BlockTiles<L>>(args);
#endif
        multiply_packed<BlockProduct<bf16, L>>(args);
    });
}

}  // namespace
}  // namespace weft
