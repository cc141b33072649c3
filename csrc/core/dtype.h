// Element types that occur in weight files.
#pragma once

#include <cstddef>
#include <string_view>

namespace moeflux {

enum class DType { u8, i8, u32, bf16, f16, f32, f8_e4m3, i32, i64 };

constexpr size_t dtype_bytes(DType type) {
  switch (type) {
    case DType::u8:
    case DType::i8:
    case DType::f8_e4m3:
      return 1;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::u32:
    case DType::i32:
    case DType::f32:
      return 4;
    case DType::i64:
      return 8;
  }
  return 0;
}

// The name safetensors files use.
constexpr std::string_view dtype_name(DType type) {
  switch (type) {
    case DType::u8:
      return "U8";
    case DType::i8:
      return "I8";
    case DType::u32:
      return "U32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::f32:
      return "F32";
    case DType::f8_e4m3:
      return "F8_E4M3";
    case DType::i32:
      return "I32";
    case DType::i64:
      return "I64";
  }
  return "";
}

}  // namespace moeflux
