// Products with weights in quantized blocks for any machine.
#include "quant_level.h"

namespace weft {
extern const LinearBlocks kPortableBlocks;
const LinearBlocks kPortableBlocks = linear_blocks;
}  // namespace weft
