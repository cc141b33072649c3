// What every kernel file begins with: the words of the language, what warps tell each other, and what only a GPU can
// say. All of the assembly is here. The emulator of tests/ has its own definitions of what stands under MOEFLUX_GPU. It
// defines MOEFLUX_COPIES, MOEFLUX_CLUSTERS and MOEFLUX_WARPGROUPS, too, for the same chips as this file does.
//
// The text is compiled with --fmad=false: two instances of one template must round alike, or a row would depend on its
// neighbours. So only what says fmaf is fused.
#pragma once

#include "params.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MOEFLUX_GPU
#endif

#define DEV __device__ __forceinline__

// A kernel. The host compiles a file with all of its kernels or, with MOEFLUX_ALONE, one of them: that of which
// MAKE_name is 1. Any other MAKE_name is no macro, so DROP is the second word.
#ifdef MOEFLUX_ALONE
#define IF_CHOSEN(made, ...) IF_ONE(made, __VA_ARGS__)
#define IF_ONE(made, ...) SECOND_WORD(SHIFT_##made KEEP, DROP, )(__VA_ARGS__)
#define SHIFT_1 KEEP,
#define SECOND_WORD(...) SECOND_OF(__VA_ARGS__)
#define SECOND_OF(first, second, ...) second
#define KEEP(...) __VA_ARGS__
#define DROP(...)
#else
#define IF_CHOSEN(made, ...) __VA_ARGS__
#endif
#define KERNEL(name, Params, bounds, function) \
  IF_CHOSEN(                                   \
      MAKE_##name,                             \
      extern "C" __global__ void __launch_bounds__ bounds name(const Params params) { function(params); })

using namespace moeflux::cuda;

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr float lowest = -3.402823466e+38f;  // stands for minus infinity

#if defined(MOEFLUX_GPU)

// ---- Order between kernels ------------------------------------------------------------------------------------------

// Where the host launches programmatically (9.0 on), the next kernel may come while this one runs, and this one may
// have come while the one before ran. Every kernel calls both, before it reads or writes what another kernel may have.
// So whatever is ordered in the stream is ordered here.
DEV void let_next_come() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEV void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Products of integers -------------------------------------------------------------------------------------------

// c[16, 8] += a[16, 32] . b[32, 8], of unsigned and signed bytes, by a warp. Lane 4 g + t has of a the rows g and g +
// 8, columns 4 t ... 4 t + 3 (a0, a1) and those + 16 (a2, a3); of b column g, the same rows (b0, b1); of c the rows g
// and g + 8, columns 2 t and 2 t + 1.
DEV void multiply_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
#define MULTIPLY_8(x, y, a, b)                                                       \
  asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};" \
      : "+r"(x), "+r"(y)                                                             \
      : "r"(a), "r"(b))
  MULTIPLY_8(c[0], c[1], a0, b0);
  MULTIPLY_8(c[0], c[1], a2, b1);
  MULTIPLY_8(c[2], c[3], a1, b0);
  MULTIPLY_8(c[2], c[3], a3, b1);
#undef MULTIPLY_8
#endif
}
// d = c + a . b, of what is said above.
DEV void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const int (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#else
  for (int i = 0; i < 4; i++) d[i] = c[i];
  multiply_bytes(d, a0, a1, a2, a3, b0, b1);
#endif
}

// The same by a warpgroup, four warps one after the other of which each has sixteen rows of a, where the chip has that
// (9.0): of `fragments` times eight columns. Those of b are in shared memory: a column's bytes 0 ... 15 behind those of
// the column before, then likewise its bytes 16 ... 31; eight columns more are `apart` bytes further. Products are
// under way from end_products to await_products, after begin_products. With `more` they are added to c.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MOEFLUX_WARPGROUPS
#define FOUR_SUMS(kind, c) kind((c)[0]), kind((c)[1]), kind((c)[2]), kind((c)[3])
DEV void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for sums c, which nobody reads before. Of what was ended, the last `still` may go on.
template <u32 still, u32 fragments>
DEV void await_products(int (&c)[3][fragments][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(still) : "memory");
#pragma unroll
  for (u32 d = 0; d < 3; d++)
#pragma unroll
    for (u32 f = 0; f < fragments; f++) asm volatile("" : FOUR_SUMS("+r", c[d][f])::"memory");
}
DEV u64 shared_columns(const void* b, u32 apart) {
  return u64(u32(__cvta_generic_to_shared(b)) >> 4) | u64(128 >> 4) << 16 | u64(apart >> 4) << 32;
}
DEV u64 behind(u64 columns, u32 bytes) { return columns + (bytes >> 4); }
template <bool more>
DEV void multiply_columns(int (&c)[8][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p;}"
      : FOUR_SUMS("+r", c[0]), FOUR_SUMS("+r", c[1]), FOUR_SUMS("+r", c[2]), FOUR_SUMS("+r", c[3]),
        FOUR_SUMS("+r", c[4]), FOUR_SUMS("+r", c[5]), FOUR_SUMS("+r", c[6]), FOUR_SUMS("+r", c[7])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(more)
      : "memory");
}
template <bool more>
DEV void multiply_columns(int (&c)[4][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0;"
      "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, %20, p;}"
      : FOUR_SUMS("+r", c[0]), FOUR_SUMS("+r", c[1]), FOUR_SUMS("+r", c[2]), FOUR_SUMS("+r", c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(more)
      : "memory");
}
template <bool more>
DEV void multiply_columns(int (&c)[2][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %13, 0;"
      "wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p;}"
      : FOUR_SUMS("+r", c[0]), FOUR_SUMS("+r", c[1])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(more)
      : "memory");
}
#endif

// The largest of the lanes' numbers, the smallest, and the sum of all, in every lane.
#if __CUDA_ARCH__ >= 800
DEV u32 warp_total(u32 x) { return __reduce_add_sync(0xffffffffu, x); }
DEV u32 warp_max(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
DEV u32 warp_min(u32 x) { return __reduce_min_sync(0xffffffffu, x); }
#else
DEV u32 warp_total(u32 x) {
  for (u32 distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}
DEV u32 warp_max(u32 x) {
  for (u32 distance = 16; distance > 0; distance /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}
DEV u32 warp_min(u32 x) { return ~warp_max(~x); }
#endif

// The lanes whose number is the caller's, a bit for each, and how many bits there are.
DEV u32 warp_peers(u32 x) { return __match_any_sync(0xffffffffu, x); }
DEV u32 count_bits(u32 x) { return u32(__popc(int(x))); }

// ---- Copies to shared memory ----------------------------------------------------------------------------------------

// Sixteen bytes, which come while the thread goes on. Copies are in groups, in the order in which these end, and a
// thread waits until no more than `still` of its groups are under way. Others see them after a barrier.
DEV void copy_16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  const u32 at = u32(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
#else
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
#endif
}
DEV void copy_4(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  const u32 at = u32(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
#else
  *reinterpret_cast<u32*>(to) = *reinterpret_cast<const u32*>(from);
#endif
}
DEV void end_of_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <u32 still>
DEV void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(still) : "memory");
#endif
}

// What the thread has copied is for products of warpgroups, too. Before a barrier.
DEV void show_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Asks the L2 cache for what is at `p`; nobody waits.
DEV void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// A multiple of 16 bytes, likewise aligned. Not before 9.0.
DEV void prefetch_bytes(const void* p, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}

// ---- Copies to shared memory ----------------------------------------------------------------------------------------

// From 9.0 on, one instruction copies many bytes, and a barrier in shared memory knows when all that it expects has
// come. What generic loads have read may be copied over after a barrier of the block.
#if __CUDA_ARCH__ >= 900
#define MOEFLUX_COPIES
DEV u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
// A thread makes the barriers; the others see them after the block's next barrier.
// `arriving` threads arrive at each.
DEV void make_arrivals(u64* arrivals, u32 count, u32 arriving) {
#pragma unroll 1
  for (u32 i = 0; i < count; i++)
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(arrivals + i)), "r"(arriving) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// When all that the thread has copied by sixteen bytes is there.
DEV void arrive_with_copies(u64* arrival) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(arrival)) : "memory");
}
// By the thread that asks for them. What it has stored is there, too, when all has come.
DEV void expect_bytes(u64* arrival, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(arrival)), "r"(bytes)
               : "memory");
}
// A multiple of 16 bytes, and both places are aligned to that.
DEV void copy_in_bulk(void* to, const void* from, u32 bytes, u64* arrival) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(arrival))
               : "memory");
}
// Until all has come for the first time (turn 0), for the second (1), for the third (0) ...
DEV void await_arrival(u64* arrival, u32 turn) {
  u32 is_there = 0;
  while (is_there == 0)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(is_there)
                 : "r"(shared_address(arrival)), "r"(turn)
                 : "memory");
}
#endif

// ---- Clusters -------------------------------------------------------------------------------------------------------

// From 9.0 on, a few blocks beside each other may be a cluster: they run at the same time. All threads of these blocks
// arrive, then wait: what they loaded or stored before is over then.
#if __CUDA_ARCH__ >= 900
#define MOEFLUX_CLUSTERS
DEV void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEV void await_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#else
DEV void arrive_in_cluster() {}
DEV void await_cluster() {}
#endif

// Threads may read what nobody has written there, in shared memory, because they make nothing of it. This is for the
// emulator, which would find fault with that.
DEV void may_be_anything(const void*, u32) {}

// The same number, of which the compiler does not know how it was made: so it makes it once, and not in every loop.
DEV u32 made_once(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 1 / x, rounded as a division is, unless x is among the largest or smallest numbers: then `is_right` becomes false. A
// division looks at that, too, but goes another way then, and so divisions come one after the other.
DEV float quick_inverse(float x, bool& is_right) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  is_right = is_right && (__float_as_uint(x) + 0x01800000u & 0x7f800000u) > 0x01ffffffu;
  return fmaf(near, -fmaf(near, x, -1.0f), near);
}

DEV float f16(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

#endif  // MOEFLUX_GPU

#if defined(MOEFLUX_CLUSTERS)
#define CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER_OF(blocks)
#endif

DEV void begin_kernel() {
  let_next_come();
  wait_for_previous();
}

// ---- Warps ----------------------------------------------------------------------------------------------------------

constexpr u32 everyone = 0xffffffffu;

DEV u32 lane_of() { return threadIdx.x % lanes; }
DEV u32 warp_of() { return threadIdx.x / lanes; }

// In every lane the same, because a butterfly adds the same pairs in each.
DEV float warp_sum(float x) {
  for (u32 distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(everyone, x, distance);
  return x;
}
DEV float warp_max(float x) {
  for (u32 distance = lanes / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(everyone, x, distance));
  return x;
}

// By what the norm of a row multiplies it. Eight warps have a chain in each lane; then come the sums of their lanes,
// then that of the warps. In a block of any size these sums are the same. `scratch` has room for eight numbers.
DEV float norm_factor(const float* x, u32 width, float eps, float* scratch) {
  constexpr u32 chains = row_threads / lanes, together = 8;  // numbers that are loaded before any is used
#pragma unroll 1
  for (u32 chain = warp_of(); chain < chains; chain += blockDim.x / lanes) {
    float squares = 0.0f;
#pragma unroll 1
    for (u32 first = chain * lanes + lane_of(); first < width; first += together * row_threads) {
      float numbers[together];
#pragma unroll
      for (u32 j = 0; j < together; j++) {
        const u32 i = first + j * row_threads;
        numbers[j] = i < width ? x[i] : 0.0f;  // zeros add nothing
      }
#pragma unroll
      for (u32 j = 0; j < together; j++) squares = fmaf(numbers[j], numbers[j], squares);
    }
    squares = warp_sum(squares);
    if (lane_of() == 0) scratch[chain] = squares;
  }
  __syncthreads();
  return 1.0f / sqrtf(warp_sum(lane_of() < chains ? scratch[lane_of()] : 0.0f) / float(width) + eps);
}

// The same of a head, which a warp has.
DEV float head_factor(const float* x, u32 dim, float eps) {
  float squares = 0.0f;
  for (u32 i = lane_of(); i < dim; i += lanes) squares = fmaf(x[i], x[i], squares);
  return 1.0f / sqrtf(warp_sum(squares) / float(dim) + eps);
}

// ---- Numbers --------------------------------------------------------------------------------------------------------

DEV float bf16(u16 bits) { return __uint_as_float(u32(bits) << 16); }
DEV u16 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return u16(bits >> 16 | 64);
  return u16((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
DEV bool is_nan(float x) { return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u; }

DEV float normed(float x, float factor, float weight) { return x * factor * weight; }

// e^x within two units of the last place. The CPU makes the same bits (csrc/kernels/cpu/digits.inl): no instruction
// that is not exact has a part in it.
DEV float exp_of(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  // x = n ln 2 + rest. To add 1.5 * 2^23 rounds to a whole number, which is in the low bits then.
  const float shifted = fmaf(x, 1.44269502f, 12582912.0f), n = shifted - 12582912.0f;
  const float rest = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
  float power = fmaf(1.39354309e-3f, rest, 8.36575683e-3f);
  power = fmaf(power, rest, 4.16664667e-2f);
  power = fmaf(power, rest, 0.166666657f);
  power = fmaf(power, rest, 0.5f);
  power = fmaf(power * rest, rest, rest) + 1.0f;
  // 2^n in two factors, because one would leave the range at both ends.
  const u32 exponent = __float_as_uint(shifted) - 0x4b400000u + 256u, half = exponent >> 1;
  return power * __uint_as_float((half - 1u) << 23) * __uint_as_float((exponent - half - 1u) << 23);
}
DEV float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }
DEV float silu(float x) { return x * sigmoid(x); }
// The same of each.
template <u32 count>
DEV void silu_of_all(float (&x)[count]) {
  float below[count], inverse[count];
  bool is_right = true;
#pragma unroll
  for (u32 i = 0; i < count; i++) below[i] = 1.0f + exp_of(-x[i]), inverse[i] = quick_inverse(below[i], is_right);
  if (!is_right) {
#pragma unroll
    for (u32 i = 0; i < count; i++) inverse[i] = 1.0f / below[i];
  }
#pragma unroll
  for (u32 i = 0; i < count; i++) x[i] *= inverse[i];
}
// gelu(x) = x / 2 * (1 + tanh(y)) = x * sigmoid(2 y), y being sqrt(2 / pi) * (x + 0.044715 x^3).
DEV float gelu(float x) { return x * sigmoid(x * (1.5957691216f + 0.0713548163f * (x * x))); }
// Gate and up of a feed-forward: SwiGLU, or GeGLU, or with a limit clamped_swiglu, whose comparisons leave NaN what it
// is.
DEV float gated(float gate, float up, float alpha, float limit, u32 is_geglu) {
  if (!(limit > 0.0f)) return (is_geglu ? gelu(gate) : silu(gate)) * up;
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return gate * sigmoid(gate * alpha) * (up + 1.0f);
}

// The number 127 less is the exponent; 0 is subnormal, and 255 infinity.
DEV float power_of_two(u32 exponent) { return __uint_as_float(max(exponent << 23, 0x00400000u)); }

DEV float number_at(const u8* numbers, u64 i, u32 type) {
  if (type == number_bf16) return bf16(reinterpret_cast<const u16*>(numbers)[i]);
  if (type == number_f16) return f16(reinterpret_cast<const u16*>(numbers)[i]);
  if (type == number_u8) return power_of_two(numbers[i]);
  return reinterpret_cast<const float*>(numbers)[i];
}
DEV u32 bytes_of(u32 type) { return type == number_f32 ? 4 : type == number_u8 ? 1 : 2; }
