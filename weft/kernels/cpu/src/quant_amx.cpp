// Products with weights in quantized blocks for AVX-512 with dot products of bytes (VNNI), and matrix tiles (AMX).
#include "quant_level.h"

namespace weft {
extern const LinearBlocks kAmxBlocks;
const LinearBlocks kAmxBlocks = linear_blocks;
}  // namespace weft
