// GGUF's types of blocks: so many columns of a row lie in so many bytes, codes and scales side by side. The blocks of a
// row follow each other without gaps, in the order of the columns. docs/formats.md says what lies where in each.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace moeflux {

enum class BlockType : uint8_t {
  none,
  q8_0,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  mxfp4,
};

struct BlockShape {
  BlockType type;
  std::string_view name;  // GGUF's own; but its MXFP4 lies in another way than MXFP4 does elsewhere
  int number;             // of the type in a GGUF file
  int columns;            // of a block
  int bytes;              // of a block
  int bits;               // of a code
  int group;              // columns that share a scale
};

constexpr std::array block_shapes = {
    BlockShape{BlockType::q8_0, "Q8_0", 8, 32, 34, 8, 32},
    BlockShape{BlockType::q4_0, "Q4_0", 2, 32, 18, 4, 32},
    BlockShape{BlockType::q4_1, "Q4_1", 3, 32, 20, 4, 32},
    BlockShape{BlockType::q5_0, "Q5_0", 6, 32, 22, 5, 32},
    BlockShape{BlockType::q5_1, "Q5_1", 7, 32, 24, 5, 32},
    BlockShape{BlockType::q2_k, "Q2_K", 10, 256, 84, 2, 16},
    BlockShape{BlockType::q3_k, "Q3_K", 11, 256, 110, 3, 16},
    BlockShape{BlockType::q4_k, "Q4_K", 12, 256, 144, 4, 32},
    BlockShape{BlockType::q5_k, "Q5_K", 13, 256, 176, 5, 32},
    BlockShape{BlockType::q6_k, "Q6_K", 14, 256, 210, 6, 16},
    BlockShape{BlockType::iq4_nl, "IQ4_NL", 20, 32, 18, 4, 32},
    BlockShape{BlockType::iq4_xs, "IQ4_XS", 23, 256, 136, 4, 32},
    BlockShape{BlockType::mxfp4, "GGUF_MXFP4", 39, 32, 17, 4, 32},
};

// Of any type but `none`.
constexpr const BlockShape& block_shape(BlockType type) { return block_shapes[static_cast<size_t>(type) - 1]; }

// The type of that name, or of that number in a GGUF file; `none` where there is none.
constexpr BlockType block_type_named(std::string_view name) {
  for (const BlockShape& shape : block_shapes)
    if (shape.name == name) return shape.type;
  return BlockType::none;
}

constexpr BlockType block_type_numbered(int64_t number) {
  for (const BlockShape& shape : block_shapes)
    if (shape.number == number) return shape.type;
  return BlockType::none;
}

}  // namespace moeflux
