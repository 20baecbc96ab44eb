#pragma once

// Which keys a unit reads: its segments become runs of consecutive keys, which the kernel walks tile by tile.

#include "kernels/attention/units.cuh"

namespace redknot::attention {

inline constexpr int kSegmentBatch = 32;
inline constexpr int kMaxRuns = 64;
static_assert(kMaxRuns >= 2 * kSegmentBatch && kMaxRuns > kMaxUnitRows);

template <int kWarps>
__device__ __forceinline__ void sync_block() {
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

enum class Source : int32_t { kWindow, kEntries, kSelected };

// Keys x0 .. x0 + count - 1: request positions (window), entries of the sequence (entries), or places in the list
// (selected).
struct Run {
  Source source;
  int32_t segment_start;  // request position of the frame's origin
  int32_t x0;
  int32_t row0;  // pool row of key x0; selected: place in the list of it
  int32_t count;
};

struct Interval {
  int32_t low;
  int32_t high;
};

template <int kWarps, int kRows>
struct RunTable {
  Run runs[kMaxRuns];
  Interval windows[kRows];  // disjoint request positions that rows of the unit have in their windows
  int32_t start[kSegmentBatch], stop[kSegmentBatch], latent[kSegmentBatch], entry[kSegmentBatch],
      entries[kSegmentBatch];
  int32_t counts[kWarps][kSegmentBatch];  // selected entries of each segment that each warp found
  int32_t filled[kSegmentBatch];          // list places used up to and including this segment
  int32_t sorted[kRows];
  int32_t window_count;
  int32_t run_count;
  int32_t next_segment;
};

// What the rows [begin, end) of a unit, which share a sequence, look like together. The same in every thread.
struct Group {
  int begin, end;
  int first_segment, last_segment;
  int lowest_position, highest_position;
  int least_visible, most_visible;
};

__device__ __forceinline__ int narrow(int64_t value) {
  return static_cast<int>(max(int64_t{INT32_MIN}, min(int64_t{INT32_MAX}, value)));
}

// One warp: the union of the rows' windows as disjoint intervals, ascending. `position` is that of row `lane`.
template <typename Table>
__device__ inline void build_windows(Table& table, Group const& group, int position, int window, int lane) {
  bool const mine = lane >= group.begin && lane < group.end;
  int rank = 0;
  for (int other = group.begin; other < group.end; ++other) {
    int const theirs = __shfl_sync(~0u, position, other);
    rank += theirs < position || (theirs == position && other < lane);
  }
  if (mine) table.sorted[rank] = position;
  __syncwarp();
  if (lane == 0) {
    int count = 0;
    for (int i = 0; i < group.end - group.begin; ++i) {
      int const high = table.sorted[i] + 1, low = high - window;
      if (count > 0 && low <= table.windows[count - 1].high) {
        table.windows[count - 1].high = high;
      } else {
        table.windows[count++] = {low, high};
      }
    }
    table.window_count = count;
  }
  __syncwarp();
}

template <typename Table>
__device__ __forceinline__ int segment_of(Table const& table, int segments, int row) {
  int low = 0, high = segments;  // the last segment whose first entry is not after `row`
  while (high - low > 1) {
    int const middle = (low + high) / 2;
    if (table.entry[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return row >= table.entry[low] && row - table.entry[low] < table.entries[low] ? low : -1;
}

// All warps: the selected entries of a row that lie in the batch's segments, grouped by segment, order kept. Ends with
// a barrier; `filled` then holds the list places used up to and including each segment.
template <int kWarps, int kRows>
__device__ inline void build_list(RunTable<kWarps, kRows>& table, int32_t* list, int64_t const* selected, int top_k,
                                  int segments, int64_t limit, int warp, int lane) {
  constexpr int kOwn = kMaxSelected / (32 * kWarps);
  int row[kOwn], segment[kOwn], place[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const at = (i * kWarps + warp) * 32 + lane;
    int64_t const value = at < top_k ? __ldg(selected + at) : -1;
    row[i] = value >= 0 && value < limit ? static_cast<int>(value) : -1;
  }
  int32_t* const counts = table.counts[warp];
  counts[lane] = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if ((i * kWarps + warp) * 32 >= top_k) break;
    segment[i] = row[i] < 0 || segments == 0 ? -1 : segment_of(table, segments, row[i]);
    unsigned const same = __match_any_sync(~0u, segment[i]);
    int const rank = __popc(same & ((1u << lane) - 1));
    int const before = segment[i] < 0 ? 0 : counts[segment[i]];
    place[i] = before + rank;
    __syncwarp();
    if (segment[i] >= 0 && rank == 0) counts[segment[i]] = before + __popc(same);
    __syncwarp();
  }
  sync_block<kWarps>();
  int total = 0, earlier = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) earlier = total;
    total += table.counts[w][lane];
  }
  int through = total;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int const other = __shfl_up_sync(~0u, through, step);
    if (lane >= step) through += other;
  }
  int const base = through - total + earlier;
  if (warp == 0) table.filled[lane] = through;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if ((i * kWarps + warp) * 32 >= top_k) break;
    int const from = __shfl_sync(~0u, base, max(segment[i], 0));
    if (segment[i] >= 0) list[from + place[i]] = row[i];
  }
  sync_block<kWarps>();
}

// Not inlined: the first call then has all registers, and later ones are rare.
// All warps: runs of as many segments from `next` on as the table holds; sets run_count and next_segment. Ends with a
// barrier.
template <int kWarps, int kRows>
__device__ __noinline__ void build_runs(RunTable<kWarps, kRows>& table, int32_t* list,
                                        SegLatentAttentionParams const& op, Group const& group, int row, int next,
                                        int warp, int lane) {
  int const segments = max(0, min(kSegmentBatch, group.last_segment - next));
  if (warp == 0 && lane < segments) {
    int64_t const* columns = op.segments + (int64_t{next} + lane) * 5;
    table.start[lane] = narrow(__ldg(columns));
    table.stop[lane] = narrow(__ldg(columns + 1));
    table.latent[lane] = narrow(__ldg(columns + 2));
    table.entry[lane] = narrow(__ldg(columns + 3));
    table.entries[lane] = narrow(__ldg(columns + 4));
  }
  bool const has_entries = op.entries != nullptr;
  int const first_entry = has_entries ? narrow(__ldg(op.segments + int64_t{group.first_segment} * 5 + 3)) : 0;
  if (has_entries && op.selected != nullptr) {
    sync_block<kWarps>();
    int64_t const limit = min(op.entry_rows, int64_t{first_entry} + group.most_visible);
    build_list(table, list, op.selected + int64_t{row} * op.top_k, op.top_k, segments, limit, warp, lane);
  } else if (warp == 0) {
    __syncwarp();
  }
  if (warp == 0 && lane == 0) {
    int count = 0, index = 0;
    auto push = [&](Source source, int x0, int row0, int keys, int64_t pool) {
      if (source != Source::kSelected) keys = static_cast<int>(min(int64_t{keys}, pool - row0));
      if (keys > 0 && row0 >= 0) table.runs[count++] = {source, table.start[index], x0, row0, keys};
    };
    for (; index < segments && count + table.window_count < kMaxRuns; ++index) {
      int const start = table.start[index], stop = table.stop[index];
      if (start <= group.highest_position && stop > group.lowest_position - op.window) {
        for (int w = 0; w < table.window_count; ++w) {
          int const low = max(table.windows[w].low, start), high = min(table.windows[w].high, stop);
          push(Source::kWindow, low, low - start + table.latent[index], high - low, op.latent_rows);
        }
      }
      if (!has_entries) continue;
      int const x0 = table.entry[index] - first_entry;
      if (op.selected == nullptr) {
        push(Source::kEntries, x0, table.entry[index], min(table.entries[index], group.most_visible - x0),
             op.entry_rows);
      } else {
        int const from = index == 0 ? 0 : table.filled[index - 1];
        push(Source::kSelected, from, from, table.filled[index] - from, 0);
      }
    }
    table.run_count = count;
    table.next_segment = next + index;
  }
  sync_block<kWarps>();
}

}  // namespace redknot::attention
