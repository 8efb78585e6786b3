// From row-major weights to packed matrices.
#pragma once

#include "formats.h"
#include "team.h"

namespace headrace {

// 0 when the type cannot hold a matrix of this shape.
size_t packed_bytes(int packed_type, int64_t rows, int64_t columns);
// Bytes of a row in a source; 0 when the type cannot hold a row of this length.
size_t source_row_bytes(int source_type, int64_t columns);
bool can_pack(int source_type, int packed_type);
// Arguments are checked by the caller.
void pack_matrix(Team &team, int source_type, const PackedMatrix &target, const uint8_t *source,
                 const int32_t *row_order);

}  // namespace headrace
