// Products with weights in quantized blocks for AVX-512 without dot products of bytes.
#include "quant_level.h"

namespace weft {
extern const LinearBlocks kAvx512fBlocks;
const LinearBlocks kAvx512fBlocks = linear_blocks;
}  // namespace weft
