// The rows that a session keeps, in blocks.
#pragma once

#include "basics.h"

// Those of a kind that begin so many bytes behind the first of their block.
DEV u8* cached_rows(const CachedRows* rows, u64 row, u64 begin, u32 block_rows = cached_block) {
  return reinterpret_cast<u8* const*>(rows + 1)[row / block_rows] + begin;
}

DEV float number_of(const float* numbers, u64 i) { return numbers[i]; }
DEV float number_of(const u16* numbers, u64 i) { return bf16(numbers[i]); }
DEV float number_of(const signed char* numbers, u64 i) { return float(numbers[i]); }

// Two beside each other, the first at an even place.
DEV float2 two_numbers_of(const float* numbers) { return *reinterpret_cast<const float2*>(numbers); }
DEV float2 two_numbers_of(const u16* numbers) {
  const u32 both = *reinterpret_cast<const u32*>(numbers);
  return {bf16(u16(both)), bf16(u16(both >> 16))};
}
DEV float2 two_numbers_of(const signed char* numbers) { return {float(numbers[0]), float(numbers[1])}; }

// What the numbers of a head are multiplied by. Only codes have scales: behind those of a block's `rows` rows.
DEV float scale_of(const float*, u32, u32, u32, u32) { return 1.0f; }
DEV float scale_of(const u16*, u32, u32, u32, u32) { return 1.0f; }
DEV float scale_of(const signed char* codes, u32 rows, u32 width, u32 head, u32 row) {
  return bf16(reinterpret_cast<const u16*>(codes + u64(rows) * width)[head * rows + row]);
}
