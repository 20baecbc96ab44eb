#pragma once

// What a launcher answers. Launchers never abort and never throw: adapters turn a status into the error of their
// framework.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace redknot {

enum class Status : int32_t {
  kSuccess = 0,
  kInvalidArgument,      // a size, stride or pointer that no caller may hand in
  kUnsupported,          // a valid request that this build has no kernel for
  kMisaligned,           // a pointer that is not aligned as the params struct says
  kWorkspaceTooSmall,    // fewer bytes than the workspace function asked for
  kCudaError,            // the CUDA runtime refused an attribute or a launch
  kNoCommunicator,       // no communicator was handed in for the group of a collective
  kCommunicatorRefused,  // NCCL is missing, refused the communicator or the call, or has another number of ranks
};

constexpr char const* status_text(Status status) {
  switch (status) {
    case Status::kSuccess: return "success";
    case Status::kInvalidArgument: return "invalid argument";
    case Status::kUnsupported: return "not supported by this build";
    case Status::kMisaligned: return "misaligned pointer";
    case Status::kWorkspaceTooSmall: return "workspace too small";
    case Status::kCudaError: return "the CUDA runtime refused the launch";
    case Status::kNoCommunicator: return "no communicator was handed in for this group";
    case Status::kCommunicatorRefused:
      return "NCCL is missing, refused the communicator, or has another number of ranks";
  }
  return "unknown status";
}

}  // namespace redknot
