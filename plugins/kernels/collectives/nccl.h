#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace redknot::nccl {

// The part of NCCL's stable C interface that is called here. Bound when the first communicator is handed in: whoever
// made that communicator has the library loaded, and a machine without GPUs needs none.
using Communicator = void*;

struct Library {
  int (*comm_count)(Communicator, int*);
  int (*comm_async_error)(Communicator, int*);
  int (*all_gather)(void const*, void*, size_t, int, Communicator, cudaStream_t);
  int (*reduce_scatter)(void const*, void*, size_t, int, int, Communicator, cudaStream_t);
  int (*all_reduce)(void const*, void*, size_t, int, int, Communicator, cudaStream_t);
};

inline constexpr int kSuccess = 0;  // ncclSuccess
inline constexpr int kSum = 0;      // ncclSum
inline constexpr int kUint8 = 1;    // ncclUint8 and the ncclDataType_t below
inline constexpr int kInt32 = 2;
inline constexpr int kInt64 = 4;
inline constexpr int kFloat32 = 7;
inline constexpr int kBFloat16 = 9;

// Null where no NCCL can be loaded.
Library const* library();

}  // namespace redknot::nccl
