#include "engine_amx.h"
#include "level_table.h"

namespace headrace {

extern const Level kAmxLevel;
const Level kAmxLevel = level_of<Amx>("amx");

}  // namespace headrace
