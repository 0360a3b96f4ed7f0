// Products with weights in quantized blocks for AVX-512 with dot products of bytes (VNNI).
#include "quant_level.h"

namespace weft {
extern const LinearBlocks kAvx512VnniBlocks;
const LinearBlocks kAvx512VnniBlocks = linear_blocks;
}  // namespace weft
