#pragma once

// Which keys the rows of a unit read. Rows of one sequence form a group; what some row of the group sees becomes one
// sequence of key slots: first the union of the sliding windows, then the selected entries or every visible one.

#include "common/segments.h"
#include "kernels/attention/units.cuh"

namespace redknot::attention {

inline constexpr int kNoKey = INT32_MAX;  // `x` of a slot without a key

struct Interval {
  int32_t low;
  int32_t high;
};

// How many tiles a group's slots fill: those of the windows first, then those of the entries.
struct Tiles {
  int32_t windows;
  int32_t all;
};

enum class Source : int32_t { kWindow, kSelected, kEntries };

// A key: where its latent lies, the request position of its frame's origin, what its visibility is judged by: its
// request position (window), its number among the sequence's entries (entries), 0 (selected); and its row of the pool,
// which none has not.
struct Key {
  uint8_t const* latent;
  int32_t frame;
  int32_t x;
  int32_t row;
};

// Rows [begin, end) of a unit, which share a sequence. The same in every thread.
struct Group {
  int32_t begin, end;
  int32_t first_segment, segments;
  int32_t least_visible, most_visible;
  int32_t first_entry;
  int32_t window_slots;
  int32_t window_count;
};

using segment::Column;
using enum segment::Column;

template <int kRows, int kSegments>
struct KeyTable {
  Group group;
  Interval windows[kRows];  // disjoint request positions that rows of the group have in their windows, ascending
  int32_t sorted[kRows];
  int32_t segments[kColumnCount][kSegments];  // of the group's sequence, if it has no more
  uint8_t const* own;                         // a latent that may be read in place of none
};

__device__ __forceinline__ int narrow(int64_t value) {
  return static_cast<int>(max(int64_t{INT32_MIN}, min(int64_t{INT32_MAX}, value)));
}

// Where the segments of a row's sequence begin, or with `which` 1 end; inside of the table, whatever the row says.
__device__ __forceinline__ int segment_bound(SegLatentAttentionParams const& op, int64_t row, int which) {
  int64_t const segments = op.segment_count;
  return static_cast<int>(max(int64_t{0}, min(segments, __ldg(op.row_segments + 2 * row + which))));
}

template <typename Table>
class Keys {
 public:
  __device__ Keys(SegLatentAttentionParams const& op, Table& table, int row_bytes)
      : op_(op), table_(table), row_bytes_(row_bytes) {}

  // A column of segment `index` of the group's sequence.
  __device__ __forceinline__ int column(Column which, int index) const {
    constexpr int kHeld = sizeof(table_.segments[0]) / sizeof(int32_t);
    if (table_.group.segments <= kHeld) return table_.segments[which][index];
    return narrow(__ldg(op_.segments + (int64_t{table_.group.first_segment} + index) * kColumnCount + which));
  }
  // The last segment whose `which` is not above `value`.
  __device__ __forceinline__ int last_not_above(Column which, int value) const {
    int low = 0, high = table_.group.segments;
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      if (column(which, middle) <= value) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  __device__ __forceinline__ Key none() const { return {table_.own, 0, kNoKey, -1}; }

  __device__ __forceinline__ Key at_position(int position) const {
    int const segment = last_not_above(kStart, position), start = column(kStart, segment);
    int64_t const row = int64_t{position} - start + column(kLatent, segment);
    if (position < start || position >= column(kStop, segment) || row < 0 || row >= op_.latent_rows) return none();
    return {static_cast<uint8_t const*>(op_.latents) + row * row_bytes_, start, position, static_cast<int32_t>(row)};
  }

  __device__ __forceinline__ Key at_entry(int row, int x) const {
    int const segment = last_not_above(kEntry, row), inside = row - column(kEntry, segment);
    if (inside < 0 || inside >= column(kEntries, segment)) return none();
    return {static_cast<uint8_t const*>(op_.entries) + int64_t{row} * row_bytes_, column(kStart, segment), x, row};
  }

  // Slots after those of the windows. A group without segments or latents has no slots at all.
  __device__ __forceinline__ int entry_slots() const {
    if (op_.entries == nullptr || op_.entry_rows == 0) return 0;
    return op_.selected != nullptr ? op_.top_k : table_.group.most_visible;
  }
  __device__ __forceinline__ bool is_empty() const { return op_.latent_rows == 0 || table_.group.segments == 0; }
  __device__ __forceinline__ Tiles tiles(int keys_per_tile) const {
    int const windows = (table_.group.window_slots + keys_per_tile - 1) / keys_per_tile;
    return {windows, is_empty() ? 0 : windows + (entry_slots() + keys_per_tile - 1) / keys_per_tile};
  }

  // The entry that `row` selects for slot `number` of the entries, -1 for none; `entry` takes it.
  __device__ __forceinline__ int announce(int row, int number) const {
    if (op_.selected == nullptr || number < 0 || number >= op_.top_k) return -1;
    int64_t const entry = __ldg(op_.selected + int64_t{row} * op_.top_k + number);
    return static_cast<int>(max(int64_t{-1}, min(entry, int64_t{INT32_MAX})));
  }

  // The key of slot `number` of the entries. Selected ones that the row does not see yet are dropped.
  __device__ __forceinline__ Key entry(int number, int announced) const {
    Group const& group = table_.group;
    if (op_.selected == nullptr) {
      return number < group.most_visible ? at_entry(group.first_entry + number, number) : none();
    }
    int64_t const limit = int64_t{group.first_entry} + group.most_visible;
    return announced < group.first_entry || announced >= limit ? none() : at_entry(announced, 0);
  }

  // The key of a slot of the windows.
  __device__ __forceinline__ Key in_window(int slot) const {
    for (int i = 0; i < table_.group.window_count; ++i) {
      Interval const window = table_.windows[i];
      int const length = window.high - window.low;
      if (slot < length) return at_position(window.low + slot);
      slot -= length;
    }
    return none();
  }

  // One warp: the rows from `begin` on that share a sequence, the union of their windows, and the sequence's segments.
  __device__ __forceinline__ void enter(int begin, int rows, int position, int visible, int first, int last, int lane) {
    Group group;
    group.begin = begin;
    group.first_segment = __shfl_sync(~0u, first, begin);
    int const last_segment = __shfl_sync(~0u, last, begin);
    group.segments = max(last_segment - group.first_segment, 0);
    bool const other = lane >= rows || (lane > begin && (first != group.first_segment || last != last_segment));
    unsigned const others = __ballot_sync(~0u, other) & ~((2u << begin) - 1);
    group.end = others != 0 ? __ffs(others) - 1 : 32;
    bool const mine = lane >= begin && lane < group.end;
    group.least_visible = __reduce_min_sync(~0u, mine ? visible : INT32_MAX);
    bool const entries = op_.entries != nullptr && group.segments > 0;
    int64_t const* columns = op_.segments + int64_t{group.first_segment} * kColumnCount;
    // Of the first segment; on its way together with the others.
    int const first_column = group.segments > 0 && lane < kColumnCount ? narrow(__ldg(columns + lane)) : 0;
    constexpr int kHeld = sizeof(table_.segments[0]) / sizeof(int32_t);
    if (group.segments <= kHeld) {
      for (int i = lane; i < group.segments * kColumnCount; i += 32) {
        table_.segments[i % kColumnCount][i / kColumnCount] = narrow(__ldg(columns + i));
      }
    }
    int const start = __shfl_sync(~0u, first_column, kStart), entry = __shfl_sync(~0u, first_column, kEntry);
    group.first_entry = entries ? entry : 0;
    int const most = __reduce_max_sync(~0u, mine ? visible : INT32_MIN);
    group.most_visible = entries && group.first_entry >= 0
                             ? static_cast<int>(max(int64_t{0}, min(int64_t{most}, op_.entry_rows - group.first_entry)))
                             : 0;
    int rank = 0;
    for (int row = begin; row < group.end; ++row) {
      int const theirs = __shfl_sync(~0u, position, row);
      rank += theirs < position || (theirs == position && row < lane);
    }
    if (mine) table_.sorted[rank] = position;
    __syncwarp();
    if (lane == 0) {
      int count = 0, slots = 0;
      if (group.segments > 0) {
        int const floor = max(INT32_MIN + op_.window, start);
        for (int i = 0; i < group.end - begin; ++i) {
          int const high = table_.sorted[i] + 1, low = max(high - op_.window, floor);
          if (low >= high) continue;
          if (count > 0 && low <= table_.windows[count - 1].high) {
            slots += high - table_.windows[count - 1].high;
            table_.windows[count - 1].high = high;
          } else {
            table_.windows[count++] = {low, high};
            slots += high - low;
          }
        }
      }
      group.window_count = count;
      group.window_slots = slots;
      table_.group = group;
    }
    __syncwarp();
    if (lane == begin) {
      table_.own = static_cast<uint8_t const*>(op_.latents);
      if (group.segments > 0) table_.own = at_position(position).latent;
    }
    __syncwarp();
  }

 private:
  SegLatentAttentionParams const& op_;
  Table& table_;
  int const row_bytes_;
};

}  // namespace redknot::attention
