// The tensors a model is made of, routed experts aside, as its layers list them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moeflux {

enum class TensorKind {
  vector,  // one float tensor of exactly this name and shape: a vector, or one for each expert
  matrix,  // NAME.weight, with NAME.scales and NAME.biases when quantised along the last axis
  stack,   // the same with a leading axis: one matrix per head
  conv,    // one float tensor [channels, taps, 1]
  table,   // one float tensor of exactly this name, whose rows are read from the file as they are needed
};

// Whether this is a tensor of its own and no part of a matrix.
constexpr bool is_vector(TensorKind kind) { return kind == TensorKind::vector || kind == TensorKind::conv; }

struct TensorRequirement {
  std::string name;  // a base name for matrix and stack, else the whole name
  TensorKind kind;
  std::vector<int64_t> shape;  // logical: columns, not packed words
};

// Every name gets the prefix of the layer at hand.
class TensorList {
 public:
  using Has = std::function<bool(const std::string&)>;

  // `has` tells whether the store holds a tensor of that whole name, for layers that may be kept in two ways.
  TensorList(int64_t hidden, Has has) : hidden_(hidden), has_(std::move(has)) {}

  int64_t hidden() const { return hidden_; }
  void at(std::string prefix) { prefix_ = std::move(prefix); }
  bool has(std::string_view name) const { return has_(prefix_ + std::string(name)); }

  void vector(std::string_view name, int64_t size) { add(name, TensorKind::vector, {size}); }
  void vectors(std::string_view name, int64_t count, int64_t size) { add(name, TensorKind::vector, {count, size}); }
  void matrix(std::string_view name, int64_t rows, int64_t columns) { add(name, TensorKind::matrix, {rows, columns}); }
  void stack(std::string_view name, int64_t matrices, int64_t rows, int64_t columns) {
    add(name, TensorKind::stack, {matrices, rows, columns});
  }
  void conv(std::string_view name, int64_t channels, int64_t taps) { add(name, TensorKind::conv, {channels, taps, 1}); }
  void table(std::string_view name, int64_t rows, int64_t width) { add(name, TensorKind::table, {rows, width}); }
  // gate_proj, up_proj and down_proj: down(silu(gate x) * up x).
  void gated_mlp(const std::string& name, int64_t intermediate);

  std::vector<TensorRequirement> take() { return std::move(list_); }

 private:
  void add(std::string_view name, TensorKind kind, std::vector<int64_t> shape) {
    list_.push_back({prefix_ + std::string(name), kind, std::move(shape)});
  }

  int64_t hidden_;
  Has has_;
  std::string prefix_;
  std::vector<TensorRequirement> list_;
};

}  // namespace moeflux
