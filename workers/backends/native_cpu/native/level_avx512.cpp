// Left out where tiles are emulated: that build is for testing the other level.
#ifndef HEADRACE_TILES_EMULATED
#include "engine_avx512.h"
#include "level_table.h"

namespace headrace {

extern const Level kAvx512Level;
const Level kAvx512Level = level_of<Avx512>("avx512");

}  // namespace headrace

#endif
