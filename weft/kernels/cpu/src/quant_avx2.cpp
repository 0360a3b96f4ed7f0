// Products with weights in quantized blocks for AVX2 and FMA.
#include "quant_level.h"

namespace weft {
extern const LinearBlocks kAvx2Blocks;
const LinearBlocks kAvx2Blocks = linear_blocks;
}  // namespace weft
