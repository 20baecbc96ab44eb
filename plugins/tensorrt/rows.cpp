#include "rows.h"

#include "common/layout.h"
#include "refusal.h"

namespace redknot::trt {

void require_vectors(char const* field, int64_t channels) {
  if (channels % 8 != 0) {
    throw Refusal(std::string("field '") + field + "': expected a multiple of 8, found " + std::to_string(channels));
  }
}

void require_vectors(int64_t width, int64_t rope_dim) {
  if (width % 8 != 0 || rope_dim % 8 != 0 || rope_dim > width) {
    throw Refusal("fields 'width' and 'rope_dim': expected multiples of 8 with rope_dim <= width, found " +
                  std::to_string(width) + " and " + std::to_string(rope_dim));
  }
}

int64_t stored_row_bytes(RowFormat format, int64_t width, int64_t rope_dim) {
  switch (format) {
    case RowFormat::kBFloat16: return 2 * width;
    case RowFormat::kPackedLatent: return packed_latent_pitch(width, rope_dim);
    case RowFormat::kPackedRow: return packed_row_bytes(width);
  }
  throw Refusal("unknown row format");
}

TensorSpec stored_rows(char const* name, RowFormat format, Dim rows, int64_t width, int64_t rope_dim) {
  if (format == RowFormat::kBFloat16) {
    return tensor(name, kBFloat16, {rows, fixed(width)});
  }
  return tensor(name, kBytes, {rows, fixed(stored_row_bytes(format, width, rope_dim))});
}

}  // namespace redknot::trt
