#pragma once

// Descriptors of matrices in device memory, for the copy engine of Hopper and later (TMA).

#include <cuda.h>

#include "common/check.h"

namespace redknot {

inline constexpr int kPanelBytes = 128;  // columns of one copied box: a swizzled row of shared memory

// The driver's encoder. It is looked up in the loaded driver, so that libraries load where there is none; null there.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static auto const encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    constexpr unsigned kCudaVersion = 12000;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kCudaVersion, cudaEnableDefault, &found);
    bool const usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(usable ? entry : nullptr);
  }();
  return encoder;
}

// A tensor of `kRank` axes, the innermost first, that is copied in boxes whose rows of 128 bytes land swizzled by 128
// bytes. `strides`: bytes from one to the next along every axis but the first. What lies outside the tensor is copied
// as zeros.
template <int kRank>
Status encode_boxes(CUtensorMap& map, CUtensorMapDataType type, void const* tensor, cuuint64_t const (&sizes)[kRank],
                    cuuint64_t const (&strides)[kRank - 1], cuuint32_t const (&box)[kRank]) {
  auto const encode = tensor_map_encoder();
  REDKNOT_REQUIRE(encode != nullptr, Status::kCudaError);
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  CUresult const result =
      encode(&map, type, kRank, const_cast<void*>(tensor), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  REDKNOT_REQUIRE(result == CUDA_SUCCESS, Status::kCudaError);
  return Status::kSuccess;
}

// A row-major matrix of bytes [rows, columns] in boxes of `box_rows` x 128. `columns` is a multiple of 16.
inline Status encode_byte_matrix(CUtensorMap& map, void const* matrix, int64_t rows, int64_t columns, int box_rows) {
  auto const row_bytes = static_cast<cuuint64_t>(columns);
  return encode_boxes<2>(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, matrix, {row_bytes, static_cast<cuuint64_t>(rows)},
                         {row_bytes}, {kPanelBytes, static_cast<cuuint32_t>(box_rows)});
}

}  // namespace redknot
