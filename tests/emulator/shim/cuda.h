// The words of CUDA's dialect as C++, and the functions of cuda/basics.h that are assembly on a GPU.
#pragma once
#pragma GCC system_header
#include <stddef.h>
#include <stdint.h>

struct msl_snapshot {
  uint32_t mask;  // of the lanes that took part
  char value[32][16];
  const void* folded_by;
  char folded[16];
};
struct msl_copy {
  void* to;
  const void* from;
  uint32_t group;
  uint32_t bytes;
  alignas(16) char early[16];
};
struct msl_exchanged {
  msl_snapshot* snapshot;
  uint64_t lane;  // of the caller
};
extern "C" {
// Not inlined and convergent: the runtime knows a rendezvous by the address it is called from.
__attribute__((convergent, noinline)) msl_exchanged msl_exchange(const void* value, uint32_t size);
__attribute__((convergent, noinline)) void msl_barrier(uint32_t flags);
__attribute__((convergent, noinline)) void msl_simdgroup_barrier(uint32_t flags);
void* msl_threadgroup_variable(uint32_t id, uint32_t bytes, const char* name);
void* msl_dynamic_memory(const char* name);
void msl_copy_later(void* to, const void* from, uint32_t bytes);
void msl_end_of_copies();
bool msl_next_copy(uint32_t still, msl_copy* copy);
void msl_make_arrivals(const unsigned long long* arrivals, uint32_t count, uint32_t threads);
void msl_copy_in_bulk(void* to, const void* from, uint32_t bytes, const unsigned long long* arrival);
void msl_expect_bytes(const unsigned long long* arrival, uint32_t bytes);
void msl_arrive_with_copies(const unsigned long long* arrival);
void msl_await_arrival(const unsigned long long* arrival, uint32_t turn);
void msl_begin_products();
void msl_multiply_later(int (*sums)[4], uint32_t fragments, bool more, uint64_t columns);
void msl_end_products();
void msl_await_products(uint32_t still);
void msl_show_copies();
void msl_may_be_anything(const void* place, uint32_t bytes);
void msl_arrive_in_cluster();
void msl_await_cluster();
void msl_wait_for_previous();
void msl_let_next_come();
__attribute__((const)) const MslPlace* msl_place();
void msl_undefined(const char* what);
float expf(float);
float logf(float);
double exp2(double);
}

#define MSL_INLINE static inline __attribute__((always_inline))
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __restrict__

// ---- Places ---------------------------------------------------------------------------------------------------------

struct msl_index {
  uint32_t x, y, z;
};
#define MSL_INDEX(field) (*(const msl_index*)msl_place()->field)
#define threadIdx MSL_INDEX(thread_position_in_threadgroup)
#define blockIdx MSL_INDEX(threadgroup_position_in_grid)
#define blockDim MSL_INDEX(threads_per_threadgroup)
#define gridDim MSL_INDEX(threadgroups_per_grid)

// `__shared__ T name[n];` becomes MSL_THREADGROUP_VARIABLE(id, name, [n], T), and `extern __shared__ T name[];`
// MSL_DYNAMIC_MEMORY(name, T).
template <typename T>
MSL_INLINE T& msl_threadgroup_place(uint32_t id, const char* name) {
  return *(T*)msl_threadgroup_variable(id, sizeof(T), name);
}
#define MSL_THREADGROUP_VARIABLE(id, name, extents, ...) \
  typedef __VA_ARGS__ msl_type_of_##name extents;        \
  msl_type_of_##name& name = msl_threadgroup_place<msl_type_of_##name>(id, #name)
#define MSL_DYNAMIC_MEMORY(name, ...) __VA_ARGS__* const name = (__VA_ARGS__*)msl_dynamic_memory(#name)

// ---- Vectors --------------------------------------------------------------------------------------------------------

struct __attribute__((aligned(8))) uint2 {
  uint32_t x, y;
};
struct __attribute__((aligned(16))) uint4 {
  uint32_t x, y, z, w;
};
struct __attribute__((aligned(8))) float2 {
  float x, y;
};
struct __attribute__((aligned(16))) float4 {
  float x, y, z, w;
};
MSL_INLINE uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
MSL_INLINE uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
MSL_INLINE float2 make_float2(float x, float y) { return {x, y}; }
MSL_INLINE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- Numbers --------------------------------------------------------------------------------------------------------

MSL_INLINE uint32_t min(uint32_t a, uint32_t b) { return b < a ? b : a; }
MSL_INLINE uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }
MSL_INLINE int min(int a, int b) { return b < a ? b : a; }
MSL_INLINE int max(int a, int b) { return a < b ? b : a; }
MSL_INLINE unsigned long long min(unsigned long long a, unsigned long long b) { return b < a ? b : a; }
MSL_INLINE unsigned long long max(unsigned long long a, unsigned long long b) { return a < b ? b : a; }
MSL_INLINE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MSL_INLINE float sqrtf(float x) { return __builtin_sqrtf(x); }
MSL_INLINE float fabsf(float x) { return __builtin_fabsf(x); }
MSL_INLINE float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
MSL_INLINE float fminf(float a, float b) { return __builtin_fminf(a, b); }
MSL_INLINE float __uint_as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
MSL_INLINE uint32_t __float_as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }
// The nearest, the even one on ties; a NaN is 0, and what is too large the largest.
MSL_INLINE int __float2int_rn(float x) {
  if (!(x == x)) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  if (x < -2147483648.0f) return -2147483647 - 1;
  return (int)__builtin_rintf(x);
}
// Four of the eight bytes of a (0 ... 3) and b (4 ... 7), one a nibble of the selector.
MSL_INLINE uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
MSL_INLINE float f16(uint16_t bits) { return (float)__builtin_bit_cast(_Float16, bits); }

// ---- Warps ----------------------------------------------------------------------------------------------------------

MSL_INLINE void __syncthreads() { msl_barrier(3); }
MSL_INLINE void __syncwarp() { msl_simdgroup_barrier(3); }

template <typename T>
MSL_INLINE T msl_value_of(const msl_exchanged& met, uint32_t lane, const char* what) {
  if (lane > 31 || !(met.snapshot->mask >> lane & 1)) msl_undefined(what);
  T value;
  __builtin_memcpy(&value, met.snapshot->value[lane & 31], sizeof(T));
  return value;
}
template <typename T>
MSL_INLINE msl_exchanged msl_met(uint32_t mask, T value) {
  static_assert(sizeof(T) <= 16, "too wide a value");
  if (mask != 0xffffffffu) msl_undefined("a warp's operation names some of its lanes: expected all");
  return msl_exchange(&value, sizeof(T));
}
template <typename T>
MSL_INLINE T __shfl_sync(uint32_t mask, T value, uint32_t lane) {
  return msl_value_of<T>(msl_met(mask, value), lane, "__shfl_sync from an inactive lane");
}
template <typename T>
MSL_INLINE T __shfl_xor_sync(uint32_t mask, T value, uint32_t distance) {
  const msl_exchanged met = msl_met(mask, value);
  return msl_value_of<T>(met, (uint32_t)met.lane ^ distance, "__shfl_xor_sync from an inactive lane");
}
template <typename T>
MSL_INLINE T __shfl_down_sync(uint32_t mask, T value, uint32_t delta) {
  const msl_exchanged met = msl_met(mask, value);
  if (met.lane + delta > 31) return value;
  return msl_value_of<T>(met, (uint32_t)met.lane + delta, "__shfl_down_sync from an inactive lane");
}
MSL_INLINE uint32_t __ballot_sync(uint32_t mask, int vote) {
  const msl_exchanged met = msl_met(mask, vote != 0);
  uint32_t votes = 0;
  for (uint32_t i = 0; i < 32; i++)
    if (met.snapshot->mask >> i & 1 && met.snapshot->value[i][0]) votes |= 1u << i;
  return votes;
}

MSL_INLINE uint32_t warp_max(uint32_t x) {
  const msl_exchanged met = msl_met(0xffffffffu, x);
  for (uint32_t i = 0; i < 32; i++) x = max(x, msl_value_of<uint32_t>(met, i, "warp_max with inactive lanes"));
  return x;
}
MSL_INLINE uint32_t warp_peers(uint32_t x) {
  const msl_exchanged met = msl_met(0xffffffffu, x);
  uint32_t peers = 0;
  for (uint32_t i = 0; i < 32; i++)
    if (msl_value_of<uint32_t>(met, i, "warp_peers with inactive lanes") == x) peers |= 1u << i;
  return peers;
}
MSL_INLINE uint32_t count_bits(uint32_t x) { return (uint32_t)__builtin_popcount(x); }
MSL_INLINE uint32_t warp_min(uint32_t x) { return ~warp_max(~x); }
MSL_INLINE uint32_t warp_total(uint32_t x) {
  const msl_exchanged met = msl_met(0xffffffffu, x);
  uint32_t total = 0;
  for (uint32_t i = 0; i < 32; i++) total += msl_value_of<uint32_t>(met, i, "warp_total with inactive lanes");
  return total;
}

// As cuda/basics.h says it. In two exchanges, because the second's values take the place of the first's.
MSL_INLINE void multiply_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1) {
  uint8_t rows[2][32];
  const uint4 own = {a0, a1, a2, a3};
  const msl_exchanged first = msl_met(0xffffffffu, own);
  const uint32_t g = (uint32_t)first.lane / 4, t = (uint32_t)first.lane % 4;
  for (uint32_t i = 0; i < 4; i++) {
    const uint4 a = msl_value_of<uint4>(first, 4 * g + i, "multiply_bytes with inactive lanes");
    __builtin_memcpy(rows[0] + 4 * i, &a.x, 4);
    __builtin_memcpy(rows[1] + 4 * i, &a.y, 4);
    __builtin_memcpy(rows[0] + 16 + 4 * i, &a.z, 4);
    __builtin_memcpy(rows[1] + 16 + 4 * i, &a.w, 4);
  }
  const msl_exchanged second = msl_met(0xffffffffu, (uint2{b0, b1}));
  for (uint32_t column = 0; column < 2; column++)
    for (uint32_t i = 0; i < 4; i++) {
      const uint2 b = msl_value_of<uint2>(second, 4 * (2 * t + column) + i, "multiply_bytes with inactive lanes");
      for (uint32_t j = 0; j < 4; j++)
        for (uint32_t row = 0; row < 2; row++) {
          c[2 * row + column] += (int)rows[row][4 * i + j] * (int8_t)(b.x >> 8 * j & 255);
          c[2 * row + column] += (int)rows[row][16 + 4 * i + j] * (int8_t)(b.y >> 8 * j & 255);
        }
    }
}

MSL_INLINE void multiply_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1, const int (&c)[4]) {
  for (int i = 0; i < 4; i++) d[i] = c[i];
  multiply_bytes(d, a0, a1, a2, a3, b0, b1);
}

// A copy comes as late as it may, but reads at once before the kernel waits for the one before.
MSL_INLINE void copy_16(void* to, const void* from) {
  if ((uint64_t)to % 16 || (uint64_t)from % 16) msl_undefined("a copy of sixteen bytes that is not aligned");
  msl_copy_later(to, from, 16);
}
MSL_INLINE void copy_4(void* to, const void* from) {
  if ((uint64_t)to % 4 || (uint64_t)from % 4) msl_undefined("a copy of four bytes that is not aligned");
  msl_copy_later(to, from, 4);
}
MSL_INLINE void end_of_copies() { msl_end_of_copies(); }
template <uint32_t still>
MSL_INLINE void wait_for_copies() {
  msl_copy copy;
  while (msl_next_copy(still, &copy)) {
    const void* from = copy.from ? copy.from : copy.early;
    if (copy.bytes == 16)
      *(uint4*)copy.to = *(const uint4*)from;
    else
      *(uint32_t*)copy.to = *(const uint32_t*)from;
  }
}

// Likewise, by arrivals. Here they come when somebody awaits them.
MSL_INLINE void make_arrivals(unsigned long long* arrivals, uint32_t count, uint32_t arriving) {
  msl_make_arrivals(arrivals, count, arriving);
}
MSL_INLINE void arrive_with_copies(unsigned long long* arrival) { msl_arrive_with_copies(arrival); }
MSL_INLINE void expect_bytes(unsigned long long* arrival, uint32_t bytes) { msl_expect_bytes(arrival, bytes); }
MSL_INLINE void copy_in_bulk(void* to, const void* from, uint32_t bytes, unsigned long long* arrival) {
  msl_copy_in_bulk(to, from, bytes, arrival);
}
MSL_INLINE void await_arrival(unsigned long long* arrival, uint32_t turn) { msl_await_arrival(arrival, turn); }

// Products are made when the thread awaits them. Nothing looks for a warpgroup of whose warps some do not multiply, or
// for show_copies behind the barrier instead of before it.
MSL_INLINE void begin_products() { msl_begin_products(); }
MSL_INLINE void end_products() { msl_end_products(); }
template <uint32_t still, uint32_t fragments>
MSL_INLINE void await_products(int (&)[3][fragments][4]) {
  msl_await_products(still);
}
MSL_INLINE uint64_t shared_columns(const void* b, uint32_t apart) { return (uint64_t)b | (uint64_t)(apart >> 4) << 48; }
MSL_INLINE uint64_t behind(uint64_t columns, uint32_t bytes) { return columns + bytes; }
template <bool more, uint32_t fragments>
MSL_INLINE void multiply_columns(int (&c)[fragments][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                 uint64_t b) {
  static_assert(fragments == 2 || fragments == 4 || fragments == 8, "as cuda/basics.h");
  msl_met(0xffffffffu, (uint4{a0, a1, a2, a3}));
  msl_multiply_later(c, fragments, more, b);
}
MSL_INLINE void show_copies() { msl_show_copies(); }
MSL_INLINE void may_be_anything(const void* place, uint32_t bytes) { msl_may_be_anything(place, bytes); }

// Of a kernel whose blocks run by themselves, neither does anything.
MSL_INLINE void arrive_in_cluster() { msl_arrive_in_cluster(); }
MSL_INLINE void await_cluster() { msl_await_cluster(); }

// In a graph the first block of a kernel may have come before the kernels that it waits for have begun, if those let
// it.
MSL_INLINE void let_next_come() { msl_let_next_come(); }
MSL_INLINE void wait_for_previous() { msl_wait_for_previous(); }

// Otherwise nothing is late here.
MSL_INLINE void prefetch_line(const void*) {}
MSL_INLINE void prefetch_bytes(const void*, uint32_t) {}
MSL_INLINE float quick_inverse(float x, bool& is_right) { return 1.0f / x; }
MSL_INLINE uint32_t made_once(uint32_t x) { return x; }
