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

// A row-major matrix of bytes [rows, columns], copied in boxes of `box_rows` x 128 that land swizzled by 128 bytes.
// What lies outside the matrix is copied as zeros. `columns` is a multiple of 16.
inline Status encode_byte_matrix(CUtensorMap& map, void const* matrix, int64_t rows, int64_t columns, int box_rows) {
  auto const encode = tensor_map_encoder();
  REDKNOT_REQUIRE(encode != nullptr, Status::kCudaError);
  cuuint64_t const sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  cuuint64_t const strides[] = {static_cast<cuuint64_t>(columns)};
  cuuint32_t const box[] = {kPanelBytes, static_cast<cuuint32_t>(box_rows)};
  cuuint32_t const steps[] = {1, 1};
  CUresult const result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(matrix), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  REDKNOT_REQUIRE(result == CUDA_SUCCESS, Status::kCudaError);
  return Status::kSuccess;
}

}  // namespace redknot
