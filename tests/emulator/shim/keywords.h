// Address spaces and keywords, last: from here on the words belong to the kernel.
//
// MSL_ADDRESS_SPACES keeps them in the type system (device 1, constant 2, threadgroup 3, the numbers that Apple's
// compiler uses): the lint's build, and the one for CUDA.
#pragma once
#pragma GCC system_header
#include "atomic.h"
#include "simdgroup_matrix.h"

#define MSL_DEVICE __attribute__((address_space(1)))
#define MSL_THREADGROUP __attribute__((address_space(3)))
#if defined(MSL_PTX)
#define device MSL_DEVICE
#define constant const MSL_DEVICE  // arguments lie in global memory there
#define threadgroup MSL_THREADGROUP
#elif defined(MSL_ADDRESS_SPACES)
#define device MSL_DEVICE
#define constant const __attribute__((address_space(2)))
#define threadgroup MSL_THREADGROUP
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel static

// `threadgroup T name[n];` in a kernel's body becomes MSL_THREADGROUP_VARIABLE(id, name, [n], T).
#if defined(MSL_PTX)
#define MSL_THREADGROUP_VARIABLE(id, name, extents, ...) \
  static __attribute__((loader_uninitialized)) MSL_THREADGROUP __VA_ARGS__ name extents
#else
template <typename T>
MSL_INLINE threadgroup T& msl_threadgroup_place(uint32_t id, const char* name) {
  return *(threadgroup T*)msl_threadgroup_variable(id, sizeof(T), name);
}
#define MSL_THREADGROUP_VARIABLE(id, name, extents, ...) \
  typedef __VA_ARGS__ msl_type_of_##name extents;        \
  threadgroup msl_type_of_##name& name = msl_threadgroup_place<msl_type_of_##name>(id, #name)
#endif

// What the generated wrappers call: an untyped argument as the kernel's parameter.
#if defined(MSL_PTX)
#define MSL_POINTER MSL_DEVICE void*
#else
#define MSL_POINTER void*
#endif
template <typename Parameter>
struct msl_argument;
template <typename T>
struct msl_argument<T*> {
  static constexpr uint32_t size = sizeof(T), alignment = alignof(T);
  MSL_INLINE T* from(MSL_POINTER pointer) { return (T*)pointer; }
#if defined(MSL_PTX)
  MSL_INLINE T* from(MSL_THREADGROUP char* pointer) { return (T*)pointer; }
#endif
};
template <typename T>
struct msl_argument<T&> {
  static constexpr uint32_t size = sizeof(T), alignment = alignof(T);
  MSL_INLINE T& from(MSL_POINTER pointer) { return *(T*)pointer; }
};
// A position or an extent, in as many dimensions as the parameter has.
template <typename T>
struct msl_position {
  MSL_INLINE T from(metal::uint3 position) {
    typedef typename metal::shape_of<T>::element element;
    if constexpr (metal::shape_of<T>::count == 1)
      return T(position.x);
    else if constexpr (metal::shape_of<T>::count == 2)
      return T{element(position.x), element(position.y)};
    else
      return T{element(position.x), element(position.y), element(position.z)};
  }
};

#if defined(MSL_CPU)
// The compiler calls it to round float to bfloat, and not every libgcc has it.
extern "C" __attribute__((visibility("hidden"), used, no_sanitize("thread"))) __bf16 __truncsfbf2(float value) {
  uint32_t bits = __builtin_bit_cast(uint32_t, value);
  bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  uint16_t rounded = is_nan ? uint16_t(bits >> 16 | 64) : uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  return __builtin_bit_cast(__bf16, rounded);
}
#endif

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define FLT_MAX 3.402823466e+38f
#define FLT_EPSILON 1.1920929e-7f
#define UINT_MAX 4294967295u
#define INT_MAX 2147483647
#define M_PI_F 3.14159265358979323846f
#define float2(...) metal::make_vec<float, 2>(__VA_ARGS__)
#define float3(...) metal::make_vec<float, 3>(__VA_ARGS__)
#define float4(...) metal::make_vec<float, 4>(__VA_ARGS__)
#define half2(...) metal::make_vec<metal::half, 2>(__VA_ARGS__)
#define half4(...) metal::make_vec<metal::half, 4>(__VA_ARGS__)
#define int2(...) metal::make_vec<int, 2>(__VA_ARGS__)
#define uint2(...) metal::make_vec<metal::uint, 2>(__VA_ARGS__)
#define uint3(...) metal::make_vec<metal::uint, 3>(__VA_ARGS__)
#define uint4(...) metal::make_vec<metal::uint, 4>(__VA_ARGS__)
#define uchar4(...) metal::make_vec<metal::uchar, 4>(__VA_ARGS__)
#define ulong2(...) metal::make_vec<metal::ulong, 2>(__VA_ARGS__)
#define double msl_has_no_double_type
