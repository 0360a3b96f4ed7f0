// The kernels for AVX-512 with bfloat16 dot products, and matrix tiles (AMX).
#include "level.h"

namespace weft {
extern const Table kAmxTable;
const Table kAmxTable = kTable;
}  // namespace weft
