#pragma once

#include "common/export.h"
#include "common/status.h"
#include "kernels/collectives/params.h"

namespace redknot {

// Hands in the communicator (an ncclComm_t, kept by the caller) that collectives of `group` run on; null takes it back.
// kCommunicatorRefused: NCCL is not there, or does not know the communicator.
REDKNOT_API Status set_communicator(int32_t group, void* communicator);
// Never a silent no-op: without a healthy communicator of params.world ranks the answer is an error.
REDKNOT_API Status collective(CollectiveParams const& params, cudaStream_t stream);

}  // namespace redknot

// The same for callers without C++: the status as a number, and its text.
extern "C" REDKNOT_API int32_t redknot_set_communicator(int32_t group, void* communicator);
extern "C" REDKNOT_API char const* redknot_status_text(int32_t status);
