// Lanes as those of a warp. Every operation names all 32 lanes, which forces them together: kernels keep simdgroup
// operations in flow that is uniform for a simdgroup, which the emulator's strict mode checks.
#pragma once
#pragma GCC system_header

namespace metal {

constexpr uint all_lanes = 0xffffffffu;

MSL_INLINE void threadgroup_barrier(mem_flags) { __syncthreads(); }
MSL_INLINE void simdgroup_barrier(mem_flags) { __nvvm_bar_warp_sync(all_lanes); }
MSL_INLINE uint own_lane() { return __nvvm_read_ptx_sreg_laneid(); }

template <typename T>
MSL_INLINE T shuffled(T value, uint lane) {
  if constexpr (sizeof(T) > 4) {
    struct Words {
      int word[sizeof(T) / 4];
    } words = __builtin_bit_cast(Words, value);
    for (unsigned i = 0; i < sizeof(T) / 4; i++)
      words.word[i] = __nvvm_shfl_sync_idx_i32(all_lanes, words.word[i], lane, 31);
    return __builtin_bit_cast(T, words);
  } else {
    int word = 0;
    __builtin_memcpy(&word, &value, sizeof(T));
    word = __nvvm_shfl_sync_idx_i32(all_lanes, word, lane, 31);
    T result;
    __builtin_memcpy(&result, &word, sizeof(T));
    return result;
  }
}

template <typename T>
MSL_INLINE T simd_shuffle(T value, ushort lane) {
  static_assert(is_exchanged<T>, "lanes exchange float, int and uint");
  return shuffled(value, lane);
}
template <typename T>
MSL_INLINE T simd_shuffle_xor(T value, ushort mask) {
  static_assert(is_exchanged<T>, "lanes exchange float, int and uint");
  return shuffled(value, own_lane() ^ mask);
}
template <typename T>
MSL_INLINE T simd_shuffle_down(T value, ushort delta) {
  static_assert(is_exchanged<T>, "lanes exchange float, int and uint");
  uint lane = own_lane() + delta;
  return shuffled(value, lane > 31 ? own_lane() : lane);
}
template <typename T>
MSL_INLINE T simd_shuffle_up(T value, ushort delta) {
  static_assert(is_exchanged<T>, "lanes exchange float, int and uint");
  uint lane = own_lane();
  return shuffled(value, lane < delta ? lane : lane - delta);
}
template <typename T>
MSL_INLINE T simd_broadcast_first(T value) {
  return shuffled(value, 0);
}

template <typename Op, typename T>
MSL_INLINE T simd_fold(T value) {
  static_assert(is_exchanged<T>, "lanes exchange float, int and uint");
  for (uint mask = 16; mask; mask >>= 1) value = Op::apply(value, shuffled(value, own_lane() ^ mask));
  return value;
}

template <typename T>
MSL_INLINE T simd_prefix_inclusive_sum(T value) {
  T sum = T(0);
  for (uint i = 0; i < 32; i++) {
    T other = shuffled(value, i);
    if (i <= own_lane()) sum = sum + other;
  }
  return sum;
}
template <typename T>
MSL_INLINE T simd_prefix_exclusive_sum(T value) {
  T sum = T(0);
  for (uint i = 0; i < 32; i++) {
    T other = shuffled(value, i);
    if (i < own_lane()) sum = sum + other;
  }
  return sum;
}

MSL_INLINE simd_vote simd_ballot(bool vote) { return simd_vote(__nvvm_vote_ballot_sync(all_lanes, vote)); }
MSL_INLINE bool simd_any(bool vote) { return __nvvm_vote_any_sync(all_lanes, vote); }
MSL_INLINE bool simd_all(bool vote) { return __nvvm_vote_all_sync(all_lanes, vote); }

}  // namespace metal
