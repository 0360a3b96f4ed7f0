// The kernels for any machine.
#include "level.h"

namespace weft {
extern const Table kPortableTable;
const Table kPortableTable = kTable;
}  // namespace weft
