// 8 x 8 matrices of a simdgroup: two elements a lane, laid out as Apple GPUs show it. Kernels rely on load, store and
// multiply only, never on the layout.
#pragma once
#pragma GCC system_header
#include "simdgroup.h"

namespace metal {

template <typename T, int rows, int columns>
struct simdgroup_matrix {
  static_assert(rows == 8 && columns == 8, "Metal has 8 x 8 only");
  vec<T, 2> elements;
  vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;

MSL_INLINE uint matrix_row(uint lane) { return (lane / 4 & 4) + (lane / 2 & 3); }
MSL_INLINE uint matrix_column(uint lane) { return (lane / 4 & 2) * 2 + (lane & 1) * 2; }
MSL_INLINE uint lane_of_element(uint row, uint column) {
  uint quad = (row & 4) | (column >> 1 & 2) | (row >> 1 & 1);
  return quad * 4 + (row & 1) * 2 + (column >> 1 & 1);
}

template <typename T, int rows, int columns>
MSL_INLINE simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, rows, columns> matrix;
  matrix.elements = vec<T, 2>{value, value};
  return matrix;
}

template <typename T, typename Pointer>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, Pointer from, ulong stride = 8,
                               vec<ulong, 2> origin = vec<ulong, 2>{0, 0}, bool transpose = false) {
  uint lane = own_lane(), row = matrix_row(lane), column = matrix_column(lane);
  for (uint i = 0; i < 2; i++)
    matrix.elements[i] = transpose ? from[(origin.y + column + i) * stride + origin.x + row]
                                   : from[(origin.y + row) * stride + origin.x + column + i];
}

template <typename T, typename Pointer>
MSL_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, Pointer to, ulong stride = 8,
                                vec<ulong, 2> origin = vec<ulong, 2>{0, 0}) {
  uint lane = own_lane(), row = matrix_row(lane), column = matrix_column(lane);
  for (uint i = 0; i < 2; i++) to[(origin.y + row) * stride + origin.x + column + i] = matrix.elements[i];
}

// d = a * b + c, each element a chain of multiply-adds.
template <typename D, typename A, typename B, typename C>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  float sum0 = float(c.elements[0]), sum1 = float(c.elements[1]);
#if defined(MSL_CPU)
  auto met = simd_exchange<vec<float, 4>>::of(
      vec<float, 4>{float(a.elements[0]), float(a.elements[1]), float(b.elements[0]), float(b.elements[1])});
  if (met.snapshot->mask != 0xffffffffu) msl_undefined("simdgroup_multiply_accumulate with inactive lanes");
  const uint row = matrix_row(met.own), column = matrix_column(met.own);
  for (uint k = 0; k < 8; k++) {
    float left = met.at(lane_of_element(row, k))[k & 1];
    auto right = met.at(lane_of_element(k, column));
    sum0 = __builtin_fmaf(left, right[2], sum0);
    sum1 = __builtin_fmaf(left, right[3], sum1);
  }
#else
  const uint row = matrix_row(own_lane()), column = matrix_column(own_lane());
  for (uint k = 0; k < 8; k++) {
    uint left_lane = lane_of_element(row, k), right_lane = lane_of_element(k, column);
    float even = shuffled(float(a.elements[0]), left_lane), odd = shuffled(float(a.elements[1]), left_lane);
    float left = k & 1 ? odd : even;
    sum0 = __builtin_fmaf(left, shuffled(float(b.elements[0]), right_lane), sum0);
    sum1 = __builtin_fmaf(left, shuffled(float(b.elements[1]), right_lane), sum1);
  }
#endif
  d.elements[0] = D(sum0);
  d.elements[1] = D(sum1);
}

}  // namespace metal
