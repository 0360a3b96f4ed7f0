// The kernels for AVX-512 without instructions for bfloat16.
#include "level.h"

namespace weft {
extern const Table kAvx512fTable;
const Table kAvx512fTable = kTable;
}  // namespace weft
