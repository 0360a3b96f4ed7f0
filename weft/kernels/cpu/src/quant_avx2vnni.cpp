// Products with weights in quantized blocks for AVX2 with dot products of bytes (AVX-VNNI).
#include "quant_level.h"

namespace weft {
extern const LinearBlocks kAvx2VnniBlocks;
const LinearBlocks kAvx2VnniBlocks = linear_blocks;
}  // namespace weft
