// Codes and scales of GGUF's blocks for products of digits and codes (see int16.h). It takes AVX-512 BW.
//
// A code becomes a whole number of 0 to 255: less than that, it is what it was, or it is raised to be one. The scale
// and the bias of a group make up for that. A code of E2M1 is 12 more than twice its number, one of IQ4 128 more than
// what it stands for, and signed codes are raised by the least of them. Both are exact in f32.
#include "kernels/cpu/block_numbers.inl"
#include "kernels/cpu/int16.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

// What is added to the codes of a type, to make them such numbers.
constexpr int raised_of(BlockType type) {
  switch (type) {
    case BlockType::q8_0:
    case BlockType::iq4_nl:
    case BlockType::iq4_xs:
      return 128;
    case BlockType::q4_0:
      return 8;
    case BlockType::q5_0:
      return 16;
    case BlockType::q3_k:
      return 4;
    case BlockType::q6_k:
      return 32;
    case BlockType::mxfp4:
      return 12;
    default:
      return 0;
  }
}

// ---- Codes ---------------------------------------------------------------------------------------------------------

typedef uint8_t All __attribute__((vector_size(64)));
typedef uint32_t AllWords __attribute__((vector_size(64)));

// Each half of a vector moved by bits of its own, within words of 32 bits.
MOEFLUX_INLINE All halves_right(__m512i bytes, uint32_t first, uint32_t second) {
  const AllWords by = {first,  first,  first,  first,  first,  first,  first,  first,
                       second, second, second, second, second, second, second, second};
  return (All)((AllWords)bytes >> by);
}
MOEFLUX_INLINE All halves_left(__m512i bytes, uint32_t first, uint32_t second) {
  const AllWords by = {first,  first,  first,  first,  first,  first,  first,  first,
                       second, second, second, second, second, second, second, second};
  return (All)((AllWords)bytes << by);
}

MOEFLUX_INLINE All lower_bits(__m512i bytes) { return (All)bytes & 15; }
MOEFLUX_INLINE All upper_bits(__m512i bytes) { return (All)((AllWords)bytes >> 4) & 15; }

MOEFLUX_INLINE __m512i two(const uint8_t* first, const uint8_t* second) {
  return _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(load<__m256i>(first)), load<__m256i>(second), 1);
}

// The 16 bytes of each quarter: those of even columns before those of odd ones.
MOEFLUX_INLINE __m512i evens_first(__m512i bytes) {
  const __m512i within =
      _mm512_maskz_broadcast_i32x4(all_lanes, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  return _mm512_shuffle_epi8(bytes, within);
}

// Codes that are bytes, in the order of the columns.
template <Order order>
MOEFLUX_INLINE BlockCodes of_bytes(All first, All second) {
  if constexpr (order == Order::parity) return even_and_odd((__m512i)first, (__m512i)second);
  const __m512i a = (__m512i)first;
  const __m512i b = (__m512i)second;
  return {_mm512_maskz_permutex2var_epi64(0xff, a, _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), b),
          _mm512_maskz_permutex2var_epi64(0xff, a, _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15), b)};
}

// Codes that are bytes: of the first and third stretch, and of the second and fourth.
template <Order order>
MOEFLUX_INLINE BlockCodes of_alternate_stretches(All first, All second) {
  if constexpr (order == Order::eights)  // quicker than to bring the columns of a stretch together
    return {_mm512_maskz_unpacklo_epi64(0xff, (__m512i)first, (__m512i)second),
            _mm512_maskz_unpackhi_epi64(0xff, (__m512i)first, (__m512i)second)};
  const __m512i a = evens_first((__m512i)first);
  const __m512i b = evens_first((__m512i)second);
  return {_mm512_maskz_permutex2var_epi64(0xff, a, _mm512_setr_epi64(0, 2, 8, 10, 4, 6, 12, 14), b),
          _mm512_maskz_permutex2var_epi64(0xff, a, _mm512_setr_epi64(1, 3, 9, 11, 5, 7, 13, 15), b)};
}

// Codes of 4 bits in 16 bytes for each stretch: the lower bits are its first 16 columns, the upper its last.
template <Order order>
MOEFLUX_INLINE BlockCodes of_stretches(const uint8_t* from, int64_t apart) {
  __m512i both = _mm512_zextsi128_si512(load<__m128i>(from));
  MOEFLUX_UNROLL
  for (int s = 1; s < 4; ++s)
    both = _mm512_mask_broadcast_i32x4(both, static_cast<__mmask16>(0xf << 4 * s), load<__m128i>(from + s * apart));
  if constexpr (order == Order::halves) return {(__m512i)lower_bits(both), (__m512i)upper_bits(both)};
  both = evens_first(both);
  const __m512i low = (__m512i)lower_bits(both);
  const __m512i high = (__m512i)upper_bits(both);
  return {_mm512_maskz_unpacklo_epi64(0xff, low, high), _mm512_maskz_unpackhi_epi64(0xff, low, high)};
}

MOEFLUX_INLINE __m512i looked_up_in_all(__m512i codes, const int8_t (&numbers)[16], int raised) {
  const Sixteen table = load<Sixteen>(numbers) + static_cast<uint8_t>(raised);
  return _mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(all_lanes, (__m128i)table), codes);
}

// The fifth bit of each code, from 32 bits of each stretch: of its even columns, or of its first ones. `second`: of the
// others.
template <Order order, int second>
MOEFLUX_INLINE __m512i fifth_bits_of_all(__m512i bits) {
  constexpr bool halves = order == Order::halves;
  // The byte of its stretch in which the bit of a column lies.
  const AllWords by_parity = {0x00000000, 0x01010101, 0x02020202, 0x03030303, 0x00000000, 0x01010101,
                              0x02020202, 0x03030303, 0x00000000, 0x01010101, 0x02020202, 0x03030303,
                              0x00000000, 0x01010101, 0x02020202, 0x03030303};
  const AllWords by_half = {0x00000000, 0x00000000, 0x01010101, 0x01010101, 0x00000000, 0x00000000,
                            0x01010101, 0x01010101, 0x00000000, 0x00000000, 0x01010101, 0x01010101,
                            0x00000000, 0x00000000, 0x01010101, 0x01010101};
  const AllWords stretch_bytes = {0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x04040404, 0x04040404,
                                  0x04040404, 0x04040404, 0x08080808, 0x08080808, 0x08080808, 0x08080808,
                                  0x0c0c0c0c, 0x0c0c0c0c, 0x0c0c0c0c, 0x0c0c0c0c};
  const AllWords which = stretch_bytes + (halves ? by_half + 0x02020202u * second : by_parity);
  const AllWords by_eight = {0x08040201, 0x80402010, 0x08040201, 0x80402010, 0x08040201, 0x80402010,
                             0x08040201, 0x80402010, 0x08040201, 0x80402010, 0x08040201, 0x80402010,
                             0x08040201, 0x80402010, 0x08040201, 0x80402010};
  const All bit = (All)(halves ? by_eight : AllWords{} + (0x40100401u << second));
  return (__m512i)((All)(((All)_mm512_shuffle_epi8(bits, (__m512i)which) & bit) != 0) & 16);
}

template <Order order>
MOEFLUX_INLINE BlockCodes with_fifth_bits(const BlockCodes& codes, const uint8_t* from, int64_t apart) {
  const FourWords four = {word_at(from), word_at(from + apart), word_at(from + 2 * apart), word_at(from + 3 * apart)};
  const __m512i bits = _mm512_maskz_broadcast_i32x4(all_lanes, (__m128i)four);
  return {_mm512_or_si512(codes.even, fifth_bits_of_all<order, 0>(bits)),
          _mm512_or_si512(codes.odd, fifth_bits_of_all<order, 1>(bits))};
}

// The codes of 128 columns as numbers of 0 to 255. `from` is where they begin; in a block of 256 columns, half of its
// bytes behind its start if `half` is 1.
template <BlockType type, Order order>
MOEFLUX_INLINE BlockCodes codes_of_blocks(const uint8_t* from, int64_t half) {
  constexpr BlockShape shape = block_shape(type);
  const uint8_t* block = from - half * (shape.bytes / 2);  // of 256 columns
  if constexpr (type == BlockType::q8_0) {
    const All sign = All{} + 128;
    return of_bytes<order>((All)two(from + 2, from + 36) ^ sign, (All)two(from + 70, from + 104) ^ sign);
  } else if constexpr (type == BlockType::q4_0) {
    return of_stretches<order>(from + 2, shape.bytes);
  } else if constexpr (type == BlockType::q4_1) {
    return of_stretches<order>(from + 4, shape.bytes);
  } else if constexpr (type == BlockType::q5_0) {
    return with_fifth_bits<order>(of_stretches<order>(from + 6, shape.bytes), from + 2, shape.bytes);
  } else if constexpr (type == BlockType::q5_1) {
    return with_fifth_bits<order>(of_stretches<order>(from + 8, shape.bytes), from + 4, shape.bytes);
  } else if constexpr (type == BlockType::mxfp4) {
    const BlockCodes codes = of_stretches<order>(from + 1, shape.bytes);
    return {raised(codes.even), raised(codes.odd)};
  } else if constexpr (type == BlockType::iq4_nl || type == BlockType::iq4_xs) {
    const BlockCodes codes = type == BlockType::iq4_nl ? of_stretches<order>(from + 2, shape.bytes)
                                                       : of_stretches<order>(block + 8 + half * 64, 16);
    return {looked_up_in_all(codes.even, iq4_numbers, raised_of(type)),
            looked_up_in_all(codes.odd, iq4_numbers, raised_of(type))};
  } else if constexpr (type == BlockType::q4_k) {
    __m512i both = load<__m512i>(block + 16 + half * 64);
    asm("" : "+v"(both));  // see codes_of
    return of_alternate_stretches<order>(lower_bits(both), upper_bits(both));
  } else if constexpr (type == BlockType::q5_k) {
    const __m512i both = load<__m512i>(block + 48 + half * 64);
    // The fifth bits of the four stretches, as the upper half of each byte.
    const __m512i four = (__m512i)((AllWords)two(block + 16, block + 16) << static_cast<int>(4 - 4 * half));
    return of_alternate_stretches<order>(lower_bits(both) | (halves_right(four, 0, 2) & 16),
                                         upper_bits(both) | (halves_right(four, 1, 3) & 16));
  } else if constexpr (type == BlockType::q6_k) {
    const __m512i both = load<__m512i>(block + half * 64);
    const __m512i high = two(block + 128 + half * 32, block + 128 + half * 32);
    return of_bytes<order>(lower_bits(both) | (halves_left(high, 4, 2) & 0x30),
                           upper_bits(both) | (halves_right(high, 0, 2) & 0x30));
  } else {
    const uint8_t* at = block + (type == BlockType::q2_k ? 16 : 32) + half * 32;
    const __m512i four = two(at, at);
    All first = halves_right(four, 0, 2) & 3;
    All second = halves_right(four, 4, 6) & 3;
    if constexpr (type == BlockType::q3_k) {
      const __m512i third = (__m512i)((AllWords)two(block, block) >> static_cast<int>(4 * half));
      first |= halves_left(third, 2, 1) & 4;
      second |= halves_right(third, 0, 1) & 4;
    }
    return of_bytes<order>(first, second);
  }
}

// The same if only the first `columns` of them are there. Codes of 0 and above follow them, for which x has zeros.
template <BlockType type, Order order>
MOEFLUX_INLINE BlockCodes codes_of_blocks(const uint8_t* from, int64_t half, int64_t columns) {
  constexpr BlockShape shape = block_shape(type);
  if constexpr (shape.columns == 256) {
    return codes_of_blocks<type, order>(from, half);
  } else {
    if (columns >= int16_block) return codes_of_blocks<type, order>(from, half);
    uint8_t rest[4 * shape.bytes] = {};
    __builtin_memcpy(rest, from, static_cast<size_t>(columns / shape.columns * shape.bytes));
    return codes_of_blocks<type, order>(rest, half);
  }
}

// The codes of 128 columns, of whatever kind. `half` and `order` matter to blocks only.
template <int bits, Order order = Order::parity>
MOEFLUX_INLINE BlockCodes codes_at(const uint8_t* from, int64_t half) {
  if constexpr (are_in_blocks(bits))
    return codes_of_blocks<block_type_of(bits), order>(from, half);
  else
    return codes_of<bits>(from);
}

// The same if only the first `columns` of them are there.
template <int bits, Order order = Order::parity>
MOEFLUX_INLINE BlockCodes codes_at(const uint8_t* from, int64_t half, int64_t columns) {
  if constexpr (are_in_blocks(bits))
    return codes_of_blocks<block_type_of(bits), order>(from, half, columns);
  else
    return codes_of<bits>(from, columns);
}

// ---- Scales --------------------------------------------------------------------------------------------------------

// 16 whole numbers, one a byte, times one factor for the first eight and another for the rest.
MOEFLUX_INLINE Floats eight_and_eight(Sixteen numbers, float first, float second) {
  typedef float Eight __attribute__((vector_size(32)));
  const Eight a = first - Eight{};
  const Eight b = second - Eight{};
  const Floats factors = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (Floats)_mm512_maskz_cvtepi32_ps(all_lanes, _mm512_maskz_cvtepi8_epi32(all_lanes, (__m128i)numbers)) * factors;
}

MOEFLUX_INLINE Sixteen twice_eight(const uint8_t* from) {
  typedef uint64_t Two __attribute__((vector_size(16)));
  return (Sixteen)(Two{} + load<uint64_t>(from));
}

// Scales of eight groups of a row from group `g` on, a multiple of 8, and then their biases, where the scales do not
// tell them. Of the types that int16_scales.inl does not load in another way.
template <BlockType type>
MOEFLUX_INLINE Floats row_scales(const uint8_t* row, int64_t g) {
  constexpr BlockShape shape = block_shape(type);
  const uint8_t* block = row + g * shape.group / shape.columns * shape.bytes;
  const int64_t half = g / 8 % 2;  // of a block with 16 groups
  if constexpr (type == BlockType::iq4_xs) {
    const float scale = f16_at(block);
    return eight_and_eight(scales_of_iq4_xs(block), scale, scale);
  } else if constexpr (type == BlockType::q3_k) {
    const float scale = f16_at(block + 108);
    const Sixteen all = scales_of_q3_k(block);
    const Sixteen first = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
    const Sixteen second =
        __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    return eight_and_eight(half ? second : first, scale, scale);
  } else {
    static_assert(type == BlockType::q2_k);
    const Sixteen both = twice_eight(block + half * 8);
    const Sixteen numbers = __builtin_shufflevector(both & 15, bits_from(both, 4, 15), 0, 1, 2, 3, 4, 5, 6, 7, 16, 17,
                                                    18, 19, 20, 21, 22, 23);
    return eight_and_eight(numbers, f16_at(block + 80), -f16_at(block + 82));
  }
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
