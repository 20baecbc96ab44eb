#pragma once

// How the rows and heads of one launch are cut into units: one block works on one unit of some (row, head) columns.

#include "kernels/attention/seg_latent_attention.h"

namespace redknot::attention {

inline constexpr int kMaxUnitRows = 32;

// Rows [first_row, first_row + rows) all have `heads` heads; a unit takes rows_per_unit of them and heads_per_unit
// heads.
struct Region {
  int32_t first_row;
  int32_t rows;
  int32_t heads;
  int32_t heads_per_unit;
  int32_t head_groups;
  int32_t rows_per_unit;
  int32_t units;
};

struct Launch {
  SegLatentAttentionParams op;
  Region full;  // Global and Local heads
  Region tail;  // Global heads only
};

struct Unit {
  int row;  // first row
  int rows;
  int head;  // first head; heads past the Global ones are Local
  int heads;
};

inline Region make_region(int first_row, int rows, int heads, int columns, bool shares_keys) {
  Region region{first_row, rows, heads, 0, 0, 0, 0};
  if (rows <= 0 || heads <= 0) return region;
  region.head_groups = (heads + columns - 1) / columns;
  region.heads_per_unit = (heads + region.head_groups - 1) / region.head_groups;
  int const fit = columns / region.heads_per_unit;
  region.rows_per_unit = shares_keys ? (fit < kMaxUnitRows ? fit : kMaxUnitRows) : 1;
  region.units = (rows + region.rows_per_unit - 1) / region.rows_per_unit * region.head_groups;
  return region;
}

__device__ __forceinline__ Unit unit_of(Launch const& launch, int index) {
  bool const in_full = index < launch.full.units;
  Region const& region = in_full ? launch.full : launch.tail;
  int const local = in_full ? index : index - launch.full.units;
  int const group = local % region.head_groups;
  int const row = local / region.head_groups * region.rows_per_unit;
  int const head = group * region.heads_per_unit;
  return {region.first_row + row, min(region.rows_per_unit, region.rows - row), head,
          min(region.heads_per_unit, region.heads - head)};
}

}  // namespace redknot::attention
