#include "recurrent/loops.h"

namespace moegraft {

const RecurrentKernels& avx2_recurrent() { return kLoops; }

}  // namespace moegraft
