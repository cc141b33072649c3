// Scalar, vector and traits of the Metal Shading Language as clang knows them.
//
// Vectors are clang's ext_vector_type, which is what Apple's compiler uses: swizzles, arithmetic and as_type come with
// it. The shim is freestanding: no library header is included, so that `thread`, `device`, `kernel` can be macros.
#pragma once
#pragma GCC system_header
#include <stddef.h>
#include <stdint.h>

#if !defined(MSL_CPU) && !defined(MSL_PTX)
#error "define MSL_CPU or MSL_PTX"
#endif

#define MSL_INLINE static inline __attribute__((always_inline))

namespace metal {

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::ptrdiff_t;
using ::size_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;

template <typename T, int count>
using vec = T __attribute__((ext_vector_type(count)));

#define MSL_VECTORS(T)    \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(bool)
#undef MSL_VECTORS

// ---- Traits ----------------------------------------------------------------------------------------------------

template <typename A, typename B>
constexpr bool is_same_v = __is_same(A, B);
template <bool condition, typename Yes, typename No>
struct conditional {
  typedef Yes type;
};
template <typename Yes, typename No>
struct conditional<false, Yes, No> {
  typedef No type;
};
template <bool condition, typename Yes, typename No>
using conditional_t = typename conditional<condition, Yes, No>::type;

// How many numbers a type holds, and of which type.
template <typename T>
struct shape_of {
  static constexpr int count = 1;
  typedef T element;
};
template <typename T, int n>
struct shape_of_vector {
  static constexpr int count = n;
  typedef T element;
};
template <typename T>
struct shape_of<vec<T, 2>> : shape_of_vector<T, 2> {};
template <typename T>
struct shape_of<vec<T, 3>> : shape_of_vector<T, 3> {};
template <typename T>
struct shape_of<vec<T, 4>> : shape_of_vector<T, 4> {};

// ---- Making vectors --------------------------------------------------------------------------------------------
// float4(a, b.xy, 1) comes here through the function-like macros of keywords.h: clang's own conversion wants braces.

template <typename T, int n, typename Part>
MSL_INLINE void append_part(vec<T, n>& result, int& at, Part part) {
  if constexpr (shape_of<Part>::count == 1)
    result[at++] = static_cast<T>(part);
  else
    for (int i = 0; i < shape_of<Part>::count; i++) result[at++] = static_cast<T>(part[i]);
}

template <typename T, int n>
MSL_INLINE vec<T, n> make_vec() {
  return vec<T, n>{};
}

template <typename T, int n, typename Part>
MSL_INLINE vec<T, n> make_vec(Part part) {
  vec<T, n> result;
  if constexpr (shape_of<Part>::count == 1) {
    for (int i = 0; i < n; i++) result[i] = static_cast<T>(part);
  } else {
    static_assert(shape_of<Part>::count == n, "a vector made of one of another width");
    for (int i = 0; i < n; i++) result[i] = static_cast<T>(part[i]);
  }
  return result;
}

template <typename T, int n, typename First, typename Second, typename... Rest>
MSL_INLINE vec<T, n> make_vec(First first, Second second, Rest... rest) {
  vec<T, n> result;
  int at = 0;
  append_part<T, n>(result, at, first);
  append_part<T, n>(result, at, second);
  (append_part<T, n>(result, at, rest), ...);
  return result;
}

template <typename To, typename From>
MSL_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between sizes");
  return __builtin_bit_cast(To, from);
}

}  // namespace metal
