// A batch whose ops run when they are recorded, on the caller's thread and the pool. The first op that fails ends the
// batch: the rest is skipped, and the error is thrown when somebody waits for the batch.
//
// This class divides the work, and kernels do the arithmetic. How the work is divided never changes a bit.
#pragma once

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu_backend.h"
#include "backend/int16_rows.h"
#include "core/error.h"
#include "core/lists.h"
#include "kernels/cpu/kernels.h"

namespace moeflux {

cpu::Weights weights_of(const Matrix& matrix);

class CpuCommands final : public Commands {
 public:
  explicit CpuCommands(CpuBackend& backend)
      : backend_(backend),
        pool_(backend.pool_),
        kernels_(*backend.isa_.kernels),
        int16_(backend.isa_.int16),
        code_attention_(backend.isa_.code_attention),
        tiled_attention_(backend.isa_.tiled_attention) {}

  // How many of each the ops may need besides their arguments.
  struct Room {
    int64_t attention = 0;   // numbers
    int64_t candidates = 0;  // of top_k
    int64_t products = 0;    // and jobs
    int64_t rows = 0;        // of x
    int64_t int16 = 0;       // bytes
    int64_t chosen = 0;      // pairs of a row
    int64_t blocks = 0;      // of a session's rows

    static Room of(const WorkSizes& sizes);
    int64_t bytes() const;
  };

  // Returns the bytes it took.
  int64_t prepare(const WorkSizes& sizes);

  std::exception_ptr take_error() { return std::exchange(error_, nullptr); }

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
  void survey(View logits, int64_t count, View found) override;
  void shortlist(std::span<const ShortlistArgs> rows, int64_t count) override;
  void copy(View from, View to, int64_t bytes) override;

 private:
  // How many numbers a unit of work must touch to be worth handing to another thread.
  static constexpr int64_t worthwhile = 16384;

  template <typename Body>
  void op(const char* name, const Body& body) {
    if (error_) return;
    try {
      const int64_t number = backend_.ops_.fetch_add(1, std::memory_order_relaxed);
      if (number == backend_.fail_at_op_) throw DeviceError(concat("[", name, "] op ", number, " was told to fail"));
      body();
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  // Calls body(first, last) for parts of 0 ... items - 1; `work` is the numbers touched by one item.
  template <typename Body>
  void spread(int64_t items, int64_t work, const Body& body) {
    const int64_t step = std::max<int64_t>(1, worthwhile / std::max<int64_t>(1, work));
    pool_.parallel((items + step - 1) / step,
                   [&](int64_t unit) { body(unit * step, std::min(items, (unit + 1) * step)); });
  }

  // Calls body(row, head) for each head of n rows.
  template <typename Body>
  void for_heads(const Heads& x, int64_t n, int64_t work, const Body& body) {
    spread(n * x.heads, work, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) body(i / x.heads, i % x.heads);
    });
  }

  const cpu::AttentionKernels& kernels_of(const cpu::AttentionTask& task) const;
  static cpu::Rows kind_of(const Cache& rows);
  // The addresses of the blocks that hold so many rows; until the next op asks.
  const std::byte* const* blocks_of(const Cache& rows, int64_t count);
  // `rows`: in the same blocks as all others of the task.
  void run_attention(cpu::AttentionTask& task, const Cache& rows);
  // The rows of x that a matrix meets: row i is at x + i * stride, and row i of `source` where they are 16-bit
  // integers.
  struct Input {
    const float* x;
    int64_t stride;
    int64_t source;  // in int16_rows_; -1: the product is of f32
  };

  Input input_of(const Matrix& matrix, const float* x, int64_t stride, int64_t rows);
  // Converts the rows i of every source with wanted[i], or all rows without `wanted`.
  void convert_to_int16(const uint8_t* wanted);
  // out[i][r] for matrix rows first ... last - 1 and rows row(0) ... row(n - 1) of the input.
  template <typename Row>
  void multiply(const Matrix& matrix, int64_t first, int64_t last, const Input& input, const Row& row,
                float* const* out, int64_t n, const cpu::ReadNext& next) const;
  void gate_and_up(const ExpertArgs& args);
  void add_bias(View biases, int64_t expert, int64_t width, int64_t first, int64_t last, float* row) const;
  void down(const ExpertArgs& args, int64_t pairs);
  int64_t unit_outputs(int64_t outputs, int64_t depth, int64_t n, int64_t per_thread) const;

  CpuBackend& backend_;
  ThreadPool& pool_;
  const cpu::Kernels& kernels_;
  const cpu::Int16Kernels* int16_;                // null where the instruction set has none
  const cpu::AttentionKernels* code_attention_;   // likewise
  const cpu::AttentionKernels* tiled_attention_;  // likewise
  std::exception_ptr error_;

  // These lists are kept from batch to batch. `prepare` makes room for all that a model needs; without it they grow.
  struct Lists {
    std::vector<float> attention;
    std::vector<cpu::Candidate> candidates;
    std::vector<int64_t> unit_ends;        // of each product or job: units up to its end
    std::vector<int64_t> pair_starts;      // of each job: pairs before it
    std::vector<Input> inputs;             // of each product; of each job's gate and up, or down
    std::vector<uint8_t> wanted;           // rows of x that an op uses
    std::vector<ExpertJob> chosen;         // of chosen_expert_ffn: a job a pair
    std::vector<int32_t> pairs;            // its numbers
    std::vector<const std::byte*> blocks;  // of attention

    template <typename Self, typename Visit>
    static void each(Self& lists, const Room& room, const Visit& visit) {
      visit(lists.attention, room.attention);
      visit(lists.candidates, room.candidates);
      visit(lists.unit_ends, room.products);
      visit(lists.pair_starts, room.products);
      visit(lists.inputs, 2 * room.products);
      visit(lists.wanted, room.rows);
      visit(lists.chosen, room.chosen);
      visit(lists.pairs, room.chosen);
      visit(lists.blocks, room.blocks);
    }
  };
  Lists lists_;
  Int16Rows int16_rows_;
};

}  // namespace moeflux
