// The experts' matrix products: rows are quantised to e4m3, then CUTLASS runs one grouped GEMM with block scales whose
// sizes and addresses are worked out on the device, so that the host never learns how many rows an expert has.

#include "common/check.h"
#include "common/packing.cuh"
#include "kernels/moe/launch.h"

#ifdef REDKNOT_HAS_CUTLASS

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cutlass/detail/blockwise_scale_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

namespace redknot {
namespace {

constexpr int kBlock = 128;  // channels that share a scale
constexpr int kThreads = 256;
constexpr int kMaxExperts = 1024;
constexpr int64_t kAlignment = 256;

using Shape = cute::Shape<int, int, int>;
using ProblemShape = cutlass::gemm::GroupProblemShape<Shape>;
using Element = cutlass::float_e4m3_t;
using Output = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
using Cluster = cute::Shape<cute::_1, cute::_2, cute::_1>;
using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, kBlock, kBlock>;
using RowScaleLayout = decltype(Scales::deduce_layoutSFA());
using WeightScaleLayout = decltype(Scales::deduce_layoutSFB());

using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    float, float, void, RowMajor*, 8, Output, RowMajor*, 8,
    cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cute::tuple<RowMajor*, RowScaleLayout*>, 16, Element,
    cute::tuple<ColumnMajor*, WeightScaleLayout*>, 16, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
using StrideA = typename Kernel::InternalStrideA;
using StrideB = typename Kernel::InternalStrideB;
using StrideD = typename Kernel::InternalStrideD;

// What CUTLASS reads of one expert; each member an array over experts.
struct Groups {
  Shape* shapes;
  Element const** rows;
  Element const** weights;
  float const** row_scales;
  float const** weight_scales;
  Output** outs;
  StrideA* row_strides;
  StrideB* weight_strides;
  StrideD* out_strides;
  RowScaleLayout* row_scale_layouts;
  WeightScaleLayout* weight_scale_layouts;
};

// The workspace, cut into what it holds.
struct Workspace {
  uint8_t* codes;  // e4m3 [capacity, depth]
  float* scales;   // of each expert: [depth / 128, its rows]
  Groups groups;
  void* gemm;    // the rest
  int64_t used;  // bytes before `gemm`
};

template <typename T>
T* take(uint8_t* base, int64_t& offset, int64_t count) {
  T* const result = reinterpret_cast<T*>(base + offset);
  offset = ceil_to(offset + count * static_cast<int64_t>(sizeof(T)), kAlignment);
  return result;
}

Workspace cut(void* workspace, int64_t capacity, int64_t experts, int64_t depth) {
  auto* const base = static_cast<uint8_t*>(workspace);
  int64_t offset = 0;
  Workspace result{};
  result.codes = take<uint8_t>(base, offset, capacity * depth);
  result.scales = take<float>(base, offset, capacity * (depth / kBlock));
  Groups& groups = result.groups;
  groups.shapes = take<Shape>(base, offset, experts);
  groups.rows = take<Element const*>(base, offset, experts);
  groups.weights = take<Element const*>(base, offset, experts);
  groups.row_scales = take<float const*>(base, offset, experts);
  groups.weight_scales = take<float const*>(base, offset, experts);
  groups.outs = take<Output*>(base, offset, experts);
  groups.row_strides = take<StrideA>(base, offset, experts);
  groups.weight_strides = take<StrideB>(base, offset, experts);
  groups.out_strides = take<StrideD>(base, offset, experts);
  groups.row_scale_layouts = take<RowScaleLayout>(base, offset, experts);
  groups.weight_scale_layouts = take<WeightScaleLayout>(base, offset, experts);
  result.gemm = base + offset;
  result.used = offset;
  return result;
}

// One warp a row and 256 channels: codes, and the scale of each block at its expert's place.
__global__ void __launch_bounds__(kThreads)
    quantise_kernel(MoeGroupedGemmParams const params, uint8_t* codes, float* scales) {
  int64_t const rows = min(static_cast<int64_t>(params.ends[params.experts - 1]), params.capacity);
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const warps = kThreads / kWarp;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / kWarp; row < rows;
       row += static_cast<int64_t>(gridDim.x) * warps) {
    int low = 0;  // the first expert that ends after the row
    for (int high = params.experts - 1; low < high;) {
      int const middle = (low + high) / 2;
      if (params.ends[middle] > row) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    int64_t const first = low == 0 ? 0 : params.ends[low - 1];
    int64_t const count = params.ends[low] - first;
    auto const* source = static_cast<__nv_bfloat16 const*>(params.x) + row * params.depth;
    for (int channel = lane * kVector; channel < ceil_to(params.depth, kWarp * kVector); channel += kWarp * kVector) {
      bool const inside = channel < params.depth;
      float values[kVector];
      unpack_bf16(inside ? load_once(source + channel) : uint4{0, 0, 0, 0}, values);
      bool finite = true;
      int const exponent = scale_exponent(lane_max<16>(finite_peak(values, finite)));
      if (!inside) continue;
      *reinterpret_cast<uint2*>(codes + row * params.depth + channel) = encode_e4m3(values, exponent, finite);
      if (channel % kBlock == 0) {
        scales[first * (params.depth / kBlock) + (channel / kBlock) * count + row - first] = power_of_two(exponent);
      }
    }
  }
}

__global__ void group_kernel(MoeGroupedGemmParams const params, uint8_t const* codes, float const* scales,
                             Groups const groups) {
  int const expert = static_cast<int>(threadIdx.x);
  if (expert >= params.experts) return;
  int64_t const end = min(static_cast<int64_t>(params.ends[expert]), params.capacity);
  int64_t const first = expert == 0 ? 0 : min(static_cast<int64_t>(params.ends[expert - 1]), params.capacity);
  int const count = static_cast<int>(end - first);
  int64_t const depth = params.depth;
  int64_t const width = params.width;
  Shape const shape = cute::make_shape(count, params.width, params.depth);
  groups.shapes[expert] = shape;
  groups.rows[expert] = reinterpret_cast<Element const*>(codes + first * depth);
  groups.weights[expert] = static_cast<Element const*>(params.weight) + expert * width * depth;
  groups.row_scales[expert] = scales + first * (depth / kBlock);
  groups.weight_scales[expert] = params.weight_scale + expert * (width / kBlock) * (depth / kBlock);
  groups.outs[expert] = static_cast<Output*>(params.out) + first * width;
  StrideA row_stride{};
  StrideB weight_stride{};
  StrideD out_stride{};
  cute::get<0>(row_stride) = depth;
  cute::get<0>(weight_stride) = depth;
  cute::get<0>(out_stride) = width;
  groups.row_strides[expert] = row_stride;
  groups.weight_strides[expert] = weight_stride;
  groups.out_strides[expert] = out_stride;
  groups.row_scale_layouts[expert] = Scales::tile_atom_to_shape_SFA(cute::append<4>(shape, 1));
  groups.weight_scale_layouts[expert] = Scales::tile_atom_to_shape_SFB(cute::append<4>(shape, 1));
}

typename Gemm::Arguments arguments_of(MoeGroupedGemmParams const& params, Groups const& groups) {
  cutlass::KernelHardwareInfo hardware;
  cudaGetDevice(&hardware.device_id);
  hardware.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(hardware.device_id);
  typename Gemm::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGrouped,
      {params.experts, groups.shapes, nullptr},
      {groups.rows, groups.row_strides, groups.weights, groups.weight_strides, groups.row_scales,
       groups.row_scale_layouts, groups.weight_scales, groups.weight_scale_layouts},
      {{}, nullptr, groups.out_strides, groups.outs, groups.out_strides},
      hardware};
  arguments.epilogue.thread.alpha = 1.0F;
  arguments.epilogue.thread.beta = 0.0F;
  return arguments;
}

}  // namespace

size_t moe_grouped_gemm_workspace(int64_t capacity, int32_t experts, int32_t depth, int32_t width) {
  if (capacity <= 0 || experts <= 0 || depth <= 0 || width <= 0) return 0;
  MoeGroupedGemmParams params{};
  params.experts = experts;
  Workspace const workspace = cut(nullptr, capacity, experts, depth);
  return static_cast<size_t>(workspace.used) + Gemm::get_workspace_size(arguments_of(params, workspace.groups));
}

Status moe_grouped_gemm(MoeGroupedGemmParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.capacity >= 0 && params.experts > 0 && params.depth > 0 && params.width > 0);
  REDKNOT_SUPPORTED(params.experts <= kMaxExperts && params.depth % kBlock == 0 && params.width % kBlock == 0);
  REDKNOT_SUPPORTED(params.capacity <= INT32_MAX);
  if (params.capacity == 0) return Status::kSuccess;
  REDKNOT_VALID(params.x != nullptr && params.ends != nullptr && params.weight != nullptr && params.out != nullptr);
  REDKNOT_VALID(params.weight_scale != nullptr && params.workspace != nullptr);
  REDKNOT_REQUIRE(aligned(params.x, 16) && aligned(params.weight, 16) && aligned(params.out, 16) &&
                      aligned(params.workspace, kAlignment),
                  Status::kMisaligned);
  size_t const needed = moe_grouped_gemm_workspace(params.capacity, params.experts, params.depth, params.width);
  REDKNOT_REQUIRE(params.workspace_bytes >= needed, Status::kWorkspaceTooSmall);
  Workspace const workspace = cut(params.workspace, params.capacity, params.experts, params.depth);
  constexpr unsigned kBlocks = 132 * 8;
  quantise_kernel<<<kBlocks, kThreads, 0, stream>>>(params, workspace.codes, workspace.scales);
  REDKNOT_LAUNCHED();
  group_kernel<<<1, kMaxExperts, 0, stream>>>(params, workspace.codes, workspace.scales, workspace.groups);
  REDKNOT_LAUNCHED();
  Gemm gemm;
  typename Gemm::Arguments const arguments = arguments_of(params, workspace.groups);
  REDKNOT_SUPPORTED(gemm.can_implement(arguments) == cutlass::Status::kSuccess);
  REDKNOT_REQUIRE(gemm.initialize(arguments, workspace.gemm, stream) == cutlass::Status::kSuccess, Status::kCudaError);
  REDKNOT_REQUIRE(gemm.run(stream) == cutlass::Status::kSuccess, Status::kCudaError);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace redknot

#else

namespace redknot {

size_t moe_grouped_gemm_workspace(int64_t, int32_t, int32_t, int32_t) { return 0; }

Status moe_grouped_gemm(MoeGroupedGemmParams const&, cudaStream_t) { return Status::kUnsupported; }

}  // namespace redknot

#endif
