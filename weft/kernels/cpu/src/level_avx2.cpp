// The kernels for AVX2 and FMA.
#include "level.h"

namespace weft {
extern const Table kAvx2Table;
const Table kAvx2Table = kTable;
}  // namespace weft
