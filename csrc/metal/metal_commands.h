// A batch for a GPU: which kernel, on which grid, with which arguments. Recording encodes it. Nothing runs before
// `commit`, unless the batch is so long that part of it departs earlier. The first op that fails ends the batch, and
// the error is thrown when somebody waits for it.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "core/error.h"
#include "gpu/attention_task.h"
#include "gpu/products.h"
#include "metal/attention_steps.h"
#include "metal/metal_backend.h"
#include "params.h"

namespace moeflux::metal {

// An extent of a grid.
inline uint32_t divide_up(int64_t value, int64_t by) { return static_cast<uint32_t>((value + by - 1) / by); }

class MetalCommands final : public Commands {
 public:
  explicit MetalCommands(MetalBackend& backend) : backend_(backend) {}
  ~MetalCommands() override;

  // Lets depart what was recorded.
  void commit();
  // Says that there is a ticket for what departed. Without a ticket, dropping the batch waits for that.
  void submitted() { submitted_ = true; }
  int64_t last() const { return last_; }    // command buffer of the batch; 0: none
  int64_t marked() const { return mark_; }  // number of its mark; 0: none
  std::exception_ptr take_error() { return std::exchange(error_, nullptr); }

  // Bytes of the lists of one batch: its pairs, and the blocks that they are divided into.
  static int64_t list_bytes(int64_t pairs, int64_t jobs);

  void embed(const Matrix& table, View ids, View out, int64_t n) override;
  void rms_norm(View x, View weight, View out, int64_t n, int64_t width, float eps) override;
  void rms_norm_heads(const Heads& x, View weight, int64_t n, float eps, float scale) override;
  void layer_norm(View x, View weight, View bias, int64_t n, int64_t width, float eps) override;
  void gated_rms_norm(const Heads& x, const Heads& z, View weight, int64_t n, float eps) override;
  void matmul(std::span<const Product> products, int64_t n) override;
  void rope(const Heads& x, View angles, int64_t half, bool interleaved, int64_t n) override;
  void append(View x, int64_t x_stride, const Cache& cache, int64_t first, int64_t n) override;
  void attention(const AttentionArgs& args, int64_t n) override;
  void mla_attention(const LatentAttentionArgs& args, int64_t n) override;
  void index_scores(const IndexScoresArgs& args, int64_t n) override;
  void index_select(const IndexSelectArgs& args, int64_t n) override;
  void gather_rows(const GatherRowsArgs& args) override;
  void conv1d(const ConvArgs& args, int64_t n) override;
  void delta_gates(const DeltaGatesArgs& args, int64_t n) override;
  void gated_delta(const DeltaArgs& args, int64_t n) override;
  void route_softmax(const RouteArgs& args, int64_t n) override;
  void route_grouped(const RouteArgs& args, int64_t n) override;
  void expert_ffn(const ExpertArgs& args) override;
  void chosen_expert_ffn(const ChosenExpertArgs& args, int64_t n) override;
  void swiglu(View gate, View up, View out, int64_t count) override;
  void geglu(View gate, View up, View out, int64_t count) override;
  void combine(const CombineArgs& args, int64_t n) override;
  void residual_add(View x, View y, View out, int64_t count) override;
  void bias_add(View x, View bias, int64_t n, int64_t width) override;
  void scale(View x, float factor, int64_t count) override;
  void soft_cap(View x, float cap, int64_t count) override;
  void silu(View x, float factor, int64_t count) override;
  void hyper_norm(View x, View weight, View out, int64_t n, int64_t streams, int64_t width, float eps) override;
  void hyper_mix(const HyperMixArgs& args, int64_t n) override;
  void hyper_add(const HyperAddArgs& args, int64_t n) override;
  void ngram_gate(const NgramGateArgs& args, int64_t n) override;
  void sigmoid_gate(const Heads& x, const Heads& gate, int64_t n) override;
  void top_k(View logits, int64_t count, int64_t k, View ids, View values) override;
  void copy(View from, View to, int64_t bytes) override;
  void mark() override;
  int64_t hold() override;

 private:
  friend void attention_scores(Commands& commands, const AttentionSteps& args);
  friend void attention_softmax(Commands& commands, const AttentionSteps& args);
  friend void attention_values(Commands& commands, const AttentionSteps& args);

  struct Kernel {
    std::string file;
    std::string name;
  };
  struct Lists;
  using Second = gpu::Second;
  // The blocks of a session's rows as kernels take them.
  struct RowTable {
    const View* blocks;  // that it was made of
    int64_t count;
    View table;  // a RowBlock each
    std::array<View, row_buffers> buffers;
  };

  template <typename Body>
  void op(const char* name, const Body& body) {
    encode([&] {
      if (backend_.ops_++ == backend_.fail_at_op_)
        throw DeviceError(concat("[", name, "] op ", backend_.fail_at_op_, " was told to fail"));
      barrier();
      body();
    });
  }
  template <typename Body>
  void encode(const Body& body) {
    if (error_) return;
    try {
      body();
    } catch (...) {
      error_ = std::current_exception();
      buffer_.reset();
    }
  }
  // The first dispatch of an op comes after a barrier. Within the op, a barrier stands only before a dispatch that
  // reads what an earlier one wrote.
  void barrier();
  CommandBuffer& buffer();
  template <typename Params>
  void dispatch(const Kernel& kernel, const Params& params, std::initializer_list<View> buffers, Extent threadgroups) {
    dispatch(kernel, std::as_bytes(std::span(&params, 1)), {buffers.begin(), buffers.size()}, threadgroups);
  }
  void dispatch(const Kernel& kernel, std::span<const std::byte> params, std::span<const View> buffers,
                Extent threadgroups);
  // Dispatches a thread for each of `extent`, in whole threadgroups along the first axis.
  template <typename Params>
  void flat(const Kernel& kernel, const Params& params, std::initializer_list<View> buffers, int64_t x, int64_t y = 1,
            int64_t z = 1) {
    flat(kernel, std::as_bytes(std::span(&params, 1)), {buffers.begin(), buffers.size()}, x, y, z);
  }
  void flat(const Kernel& kernel, std::span<const std::byte> params, std::span<const View> buffers, int64_t x,
            int64_t y, int64_t z);
  // Counts multiplications that were recorded. Lets them depart when the GPU has enough to do for a while.
  void did(double multiplications);
  View or_nothing(View view) const { return view ? view : View{backend_.nothing_.get(), 0}; }

  void multiply(std::span<const Product> batch, int64_t n);
  RowTable row_table(std::span<const View> blocks, int64_t rows);
  // Both in one command buffer. The ring has room for two tables of the longest context.
  std::pair<RowTable, RowTable> row_tables(std::span<const View> first, int64_t first_rows,
                                           std::span<const View> second, int64_t second_rows);
  void run_attention(const gpu::AttentionTask& task, int64_t n);
  void attend(const gpu::AttentionTask& task, int64_t first, int64_t n);
  RouteParams route_params(const RouteArgs& args) const;
  Lists lists_of(const ExpertArgs& args);
  View room_for(int64_t bytes, ListRing& ring);
  void feed_forward(const Lists& lists, const ExpertMatrices& expert, int64_t base, const ExpertArgs& args);
  void product_of_experts(const char* kernel, const Lists& lists, int64_t base, const Matrix& matrix,
                          const Second& second, View bias, int64_t k, View x, View out);

  MetalBackend& backend_;
  std::unique_ptr<CommandBuffer> buffer_;
  int64_t last_ = 0;
  bool submitted_ = false;
  int64_t mark_ = 0;
  int64_t mark_to_raise_ = 0;         // the mark in buffer_, for the case that it fails
  bool holds_ = false;                // whether buffer_ does
  double multiplications_ = 0;        // those in buffer_
  std::vector<RowTable> row_tables_;  // those that buffer_ has
  std::exception_ptr error_;
};

}  // namespace moeflux::metal
