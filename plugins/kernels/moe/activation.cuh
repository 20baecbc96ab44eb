#pragma once

namespace redknot {

// silu(min(gate, limit)) * clamp(up, -limit, limit). Comparisons, not fminf: NaN goes through, as in torch.clamp.
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float limit) {
  float const clamped = gate > limit ? limit : gate;
  float const low = up < -limit ? -limit : up;
  float const bounded = up > limit ? limit : low;
  return __fdividef(clamped, 1.0F + __expf(-clamped)) * bounded;
}

}  // namespace redknot
