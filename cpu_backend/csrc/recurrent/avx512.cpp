#include "recurrent/loops.h"

namespace moegraft {

const RecurrentKernels& avx512_recurrent() { return kLoops; }

}  // namespace moegraft
