#pragma once

// Warpgroup matrix products of Hopper (sm_90a).

#include <cstdint>

// Other targets compile, and their launchers refuse before a kernel with these instructions could run.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define REDKNOT_WGMMA(...) asm volatile(__VA_ARGS__)
#else
#define REDKNOT_WGMMA(...) __trap()
#endif

namespace redknot::wgmma {

// Of a tile whose rows are 128 bytes, swizzled by 128 bytes; eight rows are 1024 bytes apart from the next eight.
// `leading`: the other distance, whose meaning depends on the order of the tile.
__device__ __forceinline__ constexpr uint64_t described(uint32_t shared_address, int leading) {
  return static_cast<uint64_t>((shared_address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}
// A K-major tile, which has no other distance.
__device__ __forceinline__ constexpr uint64_t descriptor(uint32_t shared_address) {
  return described(shared_address, 16);
}
// Where 16-byte chunk `chunk` of row `row` lies in such a tile.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
// Keys as the right operand: 64 channels of a key are a row, and the next 64 channels of all keys begin `stride` bytes
// further on.
__device__ __forceinline__ uint64_t transposed_descriptor(uint32_t shared_address, int stride) {
  return described(shared_address, stride);
}

// The same, `bytes` further on.
__device__ __forceinline__ uint64_t moved(uint64_t descriptor, int bytes) {
  uint64_t result;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(result)
      : "r"(static_cast<uint32_t>(descriptor) + (bytes >> 4)), "r"(static_cast<uint32_t>(descriptor >> 32)));
  return result;
}

__device__ __forceinline__ void fence() { REDKNOT_WGMMA("wgmma.fence.sync.aligned;" :: : "memory"); }
__device__ __forceinline__ void commit() { REDKNOT_WGMMA("wgmma.commit_group.sync.aligned;" :: : "memory"); }
template <int kPending>
__device__ __forceinline__ void wait() {
  REDKNOT_WGMMA("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// After a wait: sums are read here at the earliest.
template <int kTiles>
__device__ __forceinline__ void hold(float (&d)[kTiles][4]) {
#pragma unroll
  for (auto& sums : d) asm volatile("" : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])::"memory");
}
// Makes ordinary writes to shared memory visible to the matrix units; a barrier must follow.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The first operands of an assembly, and sums in one array that stand for them.
#define REDKNOT_R4 "%0, %1, %2, %3"
#define REDKNOT_R8 REDKNOT_R4 ", %4, %5, %6, %7"
#define REDKNOT_R16 REDKNOT_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REDKNOT_R32 REDKNOT_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REDKNOT_R64                                                                                                  \
  REDKNOT_R32                                                                                                        \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REDKNOT_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define REDKNOT_F16(i) REDKNOT_F4(i), REDKNOT_F4(i + 4), REDKNOT_F4(i + 8), REDKNOT_F4(i + 12)
#define REDKNOT_F64 REDKNOT_F16(0), REDKNOT_F16(16), REDKNOT_F16(32), REDKNOT_F16(48)

// d = a b + (accumulate ? d : 0): a [64, K] and b [128, K] by `descriptor`; K is 32 for e4m3, 16 for bf16.
[[maybe_unused]] __device__ __forceinline__ void multiply_e4m3(float (&d)[64], uint64_t a, uint64_t b,
                                                               bool accumulate) {
  REDKNOT_WGMMA(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" REDKNOT_R64
      "}, %64, %65, p, 1, 1;\n\t}" : REDKNOT_F64 : "l"(a),
      "l"(b), "r"(static_cast<int>(accumulate)));
}
[[maybe_unused]] __device__ __forceinline__ void multiply_bf16(float (&d)[64], uint64_t a, uint64_t b,
                                                               bool accumulate) {
  REDKNOT_WGMMA(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REDKNOT_R64
      "}, %64, %65, p, 1, 1, 0, 0;\n\t}" : REDKNOT_F64 : "l"(a),
      "l"(b), "r"(static_cast<int>(accumulate)));
}

// d[N / 8][4] = a b + (accumulate ? d : 0), fp32 sums; a [64, K], b [N, K] in shared memory, K-major, 128-byte swizzle;
// K is 16 for fp16 and bf16, 32 for e4m3. `multiply_registers`: a is this thread's fragment. `multiply`: a lies in
// shared memory as b does. `multiply_transposed`: a lies there M-major, 16 rows of 64 elements (128 bytes), swizzled by
// 128 bytes.
template <int kColumns, bool kBf16>
struct Product;
template <int kColumns>
struct CodeProduct;  // of e4m3

#define REDKNOT_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define REDKNOT_D16(i) REDKNOT_D4(i), REDKNOT_D4(i + 1), REDKNOT_D4(i + 2), REDKNOT_D4(i + 3)
// `registers`: the list of N / 2 sums in the assembly; the numbers of the operands that follow come after it.
#define REDKNOT_PRODUCT(columns, bf16, type, registers, sums, a0, a1, a2, a3, b4, p5)                                 \
  template <>                                                                                                         \
  struct Product<columns, bf16> {                                                                                     \
    static __device__ __forceinline__ void multiply_registers(float (&d)[columns / 8][4], uint32_t const (&a)[4],     \
                                                              uint64_t b, bool accumulate) {                          \
      REDKNOT_WGMMA("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " p5 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #columns   \
                    "k16.f32." type "." type " {" registers "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b4                \
                    ", p, 1, 1, 0;\n\t}" : sums : "r"(a[0]),                                                          \
                    "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));                      \
    }                                                                                                                 \
    static __device__ __forceinline__ void multiply(float (&d)[columns / 8][4], uint64_t a, uint64_t b,               \
                                                    bool accumulate) {                                                \
      REDKNOT_WGMMA("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " a2 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #columns   \
                    "k16.f32." type "." type " {" registers "}, " a0 ", " a1 ", p, 1, 1, 0, 0;\n\t}" : sums : "l"(a), \
                    "l"(b), "r"(static_cast<int>(accumulate)));                                                       \
    }                                                                                                                 \
    static __device__ __forceinline__ void multiply_transposed(float (&d)[columns / 8][4], uint64_t a, uint64_t b,    \
                                                               bool accumulate) {                                     \
      REDKNOT_WGMMA("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " a2 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #columns   \
                    "k16.f32." type "." type " {" registers "}, " a0 ", " a1 ", p, 1, 1, 1, 0;\n\t}" : sums : "l"(a), \
                    "l"(b), "r"(static_cast<int>(accumulate)));                                                       \
    }                                                                                                                 \
  };
#define REDKNOT_CODE_PRODUCT(columns, registers, sums, a0, b1, p2)                                                  \
  template <>                                                                                                       \
  struct CodeProduct<columns> {                                                                                     \
    static __device__ __forceinline__ void multiply(float (&d)[columns / 8][4], uint64_t a, uint64_t b,             \
                                                    bool accumulate) {                                              \
      REDKNOT_WGMMA("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " p2 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #columns \
                    "k32.f32.e4m3.e4m3 {" registers "}, " a0 ", " b1 ", p, 1, 1;\n\t}" : sums : "l"(a),             \
                    "l"(b), "r"(static_cast<int>(accumulate)));                                                     \
    }                                                                                                               \
  };

#define REDKNOT_S8 REDKNOT_D4(0), REDKNOT_D4(1)
#define REDKNOT_S32 REDKNOT_D16(0), REDKNOT_D16(4)

REDKNOT_PRODUCT(8, false, "f16", REDKNOT_R4, REDKNOT_D4(0), "%4", "%5", "%6", "%7", "%8", "%9")
REDKNOT_PRODUCT(8, true, "bf16", REDKNOT_R4, REDKNOT_D4(0), "%4", "%5", "%6", "%7", "%8", "%9")
REDKNOT_PRODUCT(16, false, "f16", REDKNOT_R8, REDKNOT_S8, "%8", "%9", "%10", "%11", "%12", "%13")
REDKNOT_PRODUCT(16, true, "bf16", REDKNOT_R8, REDKNOT_S8, "%8", "%9", "%10", "%11", "%12", "%13")
REDKNOT_PRODUCT(32, false, "f16", REDKNOT_R16, REDKNOT_D16(0), "%16", "%17", "%18", "%19", "%20", "%21")
REDKNOT_PRODUCT(32, true, "bf16", REDKNOT_R16, REDKNOT_D16(0), "%16", "%17", "%18", "%19", "%20", "%21")
REDKNOT_PRODUCT(64, false, "f16", REDKNOT_R32, REDKNOT_S32, "%32", "%33", "%34", "%35", "%36", "%37")
REDKNOT_PRODUCT(64, true, "bf16", REDKNOT_R32, REDKNOT_S32, "%32", "%33", "%34", "%35", "%36", "%37")

REDKNOT_CODE_PRODUCT(16, REDKNOT_R8, REDKNOT_S8, "%8", "%9", "%10")
REDKNOT_CODE_PRODUCT(32, REDKNOT_R16, REDKNOT_D16(0), "%16", "%17", "%18")
REDKNOT_CODE_PRODUCT(64, REDKNOT_R32, REDKNOT_S32, "%32", "%33", "%34")

#define REDKNOT_D64 REDKNOT_D16(0), REDKNOT_D16(4), REDKNOT_D16(8), REDKNOT_D16(12)

// d += a b, bf16, fp32 sums; b by `transposed_descriptor`, a this thread's fragment, or by `descriptor` (K-major).
__device__ __forceinline__ void sum_of_registers(float (&d)[16][4], uint32_t const (&a)[4], uint64_t b) {
  REDKNOT_WGMMA("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REDKNOT_R64
                "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;" : REDKNOT_D64 : "r"(a[0]),
                "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void sum_of_shared(float (&d)[16][4], uint64_t a, uint64_t b) {
  REDKNOT_WGMMA("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REDKNOT_R64
                "}, %64, %65, 1, 1, 1, 0, 1;" : REDKNOT_D64 : "l"(a),
                "l"(b));
}

// d = a b, [64, 16] with [64, 16], both by `descriptor`.
__device__ __forceinline__ void first_scores(float (&d)[8][4], uint64_t a, uint64_t b) {
#define REDKNOT_E4(i) "=f"(d[i][0]), "=f"(d[i][1]), "=f"(d[i][2]), "=f"(d[i][3])
  REDKNOT_WGMMA("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REDKNOT_R32
                "}, %32, %33, 0, 1, 1, 0, 0;" : REDKNOT_E4(0),
                REDKNOT_E4(1), REDKNOT_E4(2), REDKNOT_E4(3), REDKNOT_E4(4), REDKNOT_E4(5), REDKNOT_E4(6),
                REDKNOT_E4(7) : "l"(a), "l"(b));
#undef REDKNOT_E4
}

#undef REDKNOT_CODE_PRODUCT
#undef REDKNOT_PRODUCT
#undef REDKNOT_D4
#undef REDKNOT_D16
#undef REDKNOT_R4
#undef REDKNOT_R8
#undef REDKNOT_R16
#undef REDKNOT_R32
#undef REDKNOT_S8
#undef REDKNOT_S32
#undef REDKNOT_D64
#undef REDKNOT_R64
#undef REDKNOT_F4
#undef REDKNOT_F16
#undef REDKNOT_F64

}  // namespace redknot::wgmma

#undef REDKNOT_WGMMA
