#pragma once

#include <cstdint>

namespace redknot {

enum class CollectiveKind : int32_t { kAllGather = 0, kReduceScatter = 1, kAllReduce = 2 };
enum class CollectiveType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt32 = 2, kInt64 = 3, kBytes = 4 };

// A collective over the ranks of one communicator; every rank hands in the same sizes (ranks with fewer rows pad them).
struct CollectiveParams {
  CollectiveKind kind;
  CollectiveType type;
  int32_t group;     // names the communicator, see set_communicator
  int32_t world;     // ranks the caller expects; another number in the communicator is refused
  void const* send;  // all-gather: [count]; reduce-scatter: [world * count]; all-reduce: [count]
  void* receive;     // all-gather: [world * count]; reduce-scatter: [count]; all-reduce: [count]
  int64_t count;     // elements of one rank's part
};

}  // namespace redknot
