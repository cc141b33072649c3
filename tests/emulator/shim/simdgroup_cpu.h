// Lanes as fibers of the runtime: one rendezvous of the active lanes, after which each sees what all of them brought.
#pragma once
#pragma GCC system_header

struct msl_snapshot {
  uint32_t mask;  // of the lanes that took part
  char value[32][16];
  const void* folded_by;  // the function that has made one value of all of them; null: none yet
  char folded[16];
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
void msl_undefined(const char* what);
}

namespace metal {

MSL_INLINE void threadgroup_barrier(mem_flags flags) { msl_barrier(uint(flags)); }
MSL_INLINE void simdgroup_barrier(mem_flags flags) { msl_simdgroup_barrier(uint(flags)); }

template <typename T>
struct simd_exchange {
  msl_snapshot* snapshot;
  uint own;

  MSL_INLINE simd_exchange of(T value) {
    static_assert(sizeof(T) <= 16, "too wide a value for a simdgroup operation");
    msl_exchanged met = msl_exchange(&value, sizeof(T));
    return {met.snapshot, uint(met.lane)};
  }
  bool active(uint lane) const { return lane < 32 && (snapshot->mask >> lane & 1); }
  T at(uint lane) const {
    T value;
    __builtin_memcpy(&value, snapshot->value[lane & 31], sizeof(T));
    return value;
  }
  T needed(uint lane, const char* what) const {
    if (!active(lane)) msl_undefined(what);
    return at(lane);
  }
};

MSL_INLINE uint own_lane() { return simd_exchange<int>::of(0).own; }

template <typename T>
MSL_INLINE T simd_shuffle(T value, ushort lane) {
  static_assert(is_exchanged<T>, "lanes exchange float, int and uint");
  return simd_exchange<T>::of(value).needed(lane, "simd_shuffle from an inactive lane");
}
template <typename T>
MSL_INLINE T simd_shuffle_xor(T value, ushort mask) {
  static_assert(is_exchanged<T>, "lanes exchange float, int and uint");
  auto met = simd_exchange<T>::of(value);
  return met.needed(met.own ^ mask, "simd_shuffle_xor from an inactive lane");
}
template <typename T>
MSL_INLINE T simd_shuffle_down(T value, ushort delta) {
  static_assert(is_exchanged<T>, "lanes exchange float, int and uint");
  auto met = simd_exchange<T>::of(value);
  return met.own + delta > 31 ? value : met.needed(met.own + delta, "simd_shuffle_down from an inactive lane");
}
template <typename T>
MSL_INLINE T simd_shuffle_up(T value, ushort delta) {
  static_assert(is_exchanged<T>, "lanes exchange float, int and uint");
  auto met = simd_exchange<T>::of(value);
  return met.own < delta ? value : met.needed(met.own - delta, "simd_shuffle_up from an inactive lane");
}
template <typename T>
MSL_INLINE T simd_broadcast_first(T value) {
  auto met = simd_exchange<T>::of(value);
  return met.at(__builtin_ctz(met.snapshot->mask));
}

// In the order of a butterfly; lanes that are not active are left out.
template <typename Op, typename T>
__attribute__((noinline)) void simd_butterfly(msl_snapshot* snapshot) {
  T part[32];
  bool there[32];
  for (uint i = 0; i < 32; i++) {
    there[i] = snapshot->mask >> i & 1;
    __builtin_memcpy(&part[i], snapshot->value[i], sizeof(T));
  }
  for (uint half_width = 16; half_width; half_width >>= 1)
    for (uint i = 0; i < half_width; i++) {
      if (!there[i + half_width]) continue;
      part[i] = there[i] ? Op::apply(part[i], part[i + half_width]) : part[i + half_width];
      there[i] = true;
    }
  __builtin_memcpy(snapshot->folded, &part[0], sizeof(T));
}

// The first lane to go on does it for all.
template <typename Op, typename T>
MSL_INLINE T simd_fold(T value) {
  static_assert(is_exchanged<T>, "lanes exchange float, int and uint");
  msl_snapshot* snapshot = simd_exchange<T>::of(value).snapshot;
  const void* mine = (const void*)&simd_butterfly<Op, T>;
  if (snapshot->folded_by != mine) {
    simd_butterfly<Op, T>(snapshot);
    snapshot->folded_by = mine;
  }
  T folded;
  __builtin_memcpy(&folded, snapshot->folded, sizeof(T));
  return folded;
}

template <typename T>
MSL_INLINE T simd_prefix_inclusive_sum(T value) {
  auto met = simd_exchange<T>::of(value);
  T sum = T(0);
  for (uint i = 0; i <= met.own; i++)
    if (met.active(i)) sum = sum + met.at(i);
  return sum;
}
template <typename T>
MSL_INLINE T simd_prefix_exclusive_sum(T value) {
  auto met = simd_exchange<T>::of(value);
  T sum = T(0);
  for (uint i = 0; i < met.own; i++)
    if (met.active(i)) sum = sum + met.at(i);
  return sum;
}

MSL_INLINE simd_vote simd_ballot(bool vote) {
  auto met = simd_exchange<int>::of(vote);
  ulong lanes = 0;
  for (uint i = 0; i < 32; i++)
    if (met.active(i) && met.at(i)) lanes |= 1ul << i;
  return simd_vote(lanes);
}
MSL_INLINE bool simd_any(bool vote) { return ulong(simd_ballot(vote)) != 0; }
MSL_INLINE bool simd_all(bool vote) { return ulong(simd_ballot(!vote)) == 0; }

}  // namespace metal
