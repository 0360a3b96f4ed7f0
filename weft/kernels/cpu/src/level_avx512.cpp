// The kernels for AVX-512 with bfloat16 dot products.
#include "level.h"

namespace weft {
extern const Table kAvx512Table;
const Table kAvx512Table = kTable;
}  // namespace weft
