#include "metal/metal_commands.h"

#include <algorithm>
#include <utility>

namespace moeflux::metal {
namespace {

HeadNormParams head_norm(const Heads& x, const Heads& gate, bool has_weight, float eps, float scale) {
  return {.row_stride = static_cast<uint32_t>(x.row_stride),
          .head_stride = static_cast<uint32_t>(x.head_stride),
          .gate_row_stride = static_cast<uint32_t>(gate.row_stride),
          .gate_head_stride = static_cast<uint32_t>(gate.head_stride),
          .dim = static_cast<uint32_t>(x.dim),
          .has_weight = has_weight,
          .eps = eps,
          .scale = scale};
}

bool same(View a, View b) { return a.buffer == b.buffer && a.offset == b.offset; }

void require_in_place(bool holds, const char* op) {
  if (!holds) throw StateError(concat("[", op, "] expected to be in place, found another output"));
}

}  // namespace

// ---- Encoding -------------------------------------------------------------------------------------------------------

CommandBuffer& MetalCommands::buffer() {
  if (!buffer_) buffer_ = backend_.device_->begin();
  return *buffer_;
}

void MetalCommands::barrier() {
  if (buffer_) buffer_->barrier();
}

MetalCommands::~MetalCommands() {
  if (submitted_ || last_ == 0) return;
  try {
    backend_.flight_->wait(last_);
  } catch (const DeviceError&) {
  }
}

void MetalCommands::commit() {
  if (!buffer_) return;
  last_ = backend_.flight_->depart();
  multiplications_ = 0;
  holds_ = false;
  row_tables_.clear();
  const auto mark = static_cast<uint64_t>(std::exchange(mark_to_raise_, 0));
  try {
    buffer_->commit(
        [flight = backend_.flight_, number = last_, marks = backend_.marks_, mark](const std::string& error) {
          flight->arrive(number, error);
          if (!error.empty() && mark) marks->raise(mark);  // nobody else will raise it, and somebody may wait for it
        });
  } catch (...) {  // the command buffer stayed here
    backend_.flight_->arrive(last_, "a command buffer could not depart");
    throw;
  }
  buffer_.reset();
}

// A command buffer that holds departs as a whole. It is released only after the batch was submitted, so until then
// recording may wait for nothing in it.
void MetalCommands::did(double multiplications) {
  multiplications_ += multiplications;
  if (multiplications_ >= backend_.max_work_ && !holds_) commit();
}

void MetalCommands::mark() {
  encode([&] {
    mark_ = mark_to_raise_ = ++backend_.last_mark_;
    buffer().raise(*backend_.marks_, static_cast<uint64_t>(mark_));
  });
}

int64_t MetalCommands::hold() {
  const int64_t number = ++backend_.last_hold_;
  encode([&] {
    buffer().wait(*backend_.released_, static_cast<uint64_t>(number));
    holds_ = true;
  });
  return number;
}

void MetalCommands::dispatch(const Kernel& kernel, std::span<const std::byte> params, std::span<const View> buffers,
                             Extent threadgroups) {
  if (threadgroups.x == 0 || threadgroups.y == 0 || threadgroups.z == 0) return;
  const Pipelines::Ready& ready = backend_.pipelines_.get(kernel.file, kernel.name);
  buffer().dispatch(*ready.pipeline, params, buffers, threadgroups, {ready.threads});
}

void MetalCommands::flat(const Kernel& kernel, std::span<const std::byte> params, std::span<const View> buffers,
                         int64_t x, int64_t y, int64_t z) {
  if (x == 0 || y == 0 || z == 0) return;
  const Pipeline& pipeline = *backend_.pipelines_.get(kernel.file, kernel.name).pipeline;
  const uint32_t threads = std::min({flat_threads, divide_up(x, lanes) * lanes, pipeline.max_threads / lanes * lanes});
  buffer().dispatch(pipeline, params, buffers,
                    {divide_up(x, threads), static_cast<uint32_t>(y), static_cast<uint32_t>(z)}, {threads});
}

// ---- Vectors --------------------------------------------------------------------------------------------------------

void MetalCommands::rms_norm(View x, View weight, View out, int64_t n, int64_t width, float eps) {
  op("rms_norm", [&] {
    const NormParams params = {static_cast<uint32_t>(width), eps};
    const Extent groups = {static_cast<uint32_t>(n)};
    if (same(x, out))
      dispatch({"elementwise", "rms_norm_in_place"}, params, {x, weight}, groups);
    else
      dispatch({"elementwise", "rms_norm"}, params, {x, weight, out}, groups);
  });
}

void MetalCommands::rms_norm_heads(const Heads& x, View weight, int64_t n, float eps, float scale) {
  op("rms_norm_heads", [&] {
    dispatch({"elementwise", "rms_norm_heads"}, head_norm(x, x, bool(weight), eps, scale), {x.view, or_nothing(weight)},
             {static_cast<uint32_t>(x.heads), static_cast<uint32_t>(n)});
  });
}

void MetalCommands::layer_norm(View x, View weight, View bias, int64_t n, int64_t width, float eps) {
  op("layer_norm", [&] {
    dispatch({"elementwise", "layer_norm"}, NormParams{static_cast<uint32_t>(width), eps}, {x, weight, bias},
             {static_cast<uint32_t>(n)});
  });
}

void MetalCommands::gated_rms_norm(const Heads& x, const Heads& z, View weight, int64_t n, float eps) {
  op("gated_rms_norm", [&] {
    dispatch({"elementwise", "gated_rms_norm"}, head_norm(x, z, true, eps, 1), {x.view, weight, z.view},
             {static_cast<uint32_t>(x.heads), static_cast<uint32_t>(n)});
  });
}

void MetalCommands::rope(const Heads& x, View angles, int64_t half, bool interleaved, int64_t n) {
  op("rope", [&] {
    const RopeParams params = {.row_stride = static_cast<uint32_t>(x.row_stride),
                               .head_stride = static_cast<uint32_t>(x.head_stride),
                               .half_dim = static_cast<uint32_t>(half),
                               .interleaved = interleaved};
    flat({"elementwise", "rope"}, params, {x.view, angles}, half, x.heads, n);
  });
}

void MetalCommands::append(View x, int64_t x_stride, const Cache& cache, int64_t first, int64_t n) {
  op("append", [&] {
    if (n == 0) return;
    const RowTable rows = row_table(cache.blocks, first + n);
    const auto buffer_of = [&](int64_t row) { return cache.blocks[static_cast<size_t>(row / block_rows)].buffer; };
    int64_t end = first;
    for (int64_t begin = first; begin < first + n; begin = end) {  // as far as blocks lie in one buffer
      while (end < first + n && buffer_of(end) == buffer_of(begin)) end = (end / block_rows + 1) * block_rows;
      end = std::min(end, first + n);
      const View from = x.at((begin - first) * x_stride);
      const View to = {buffer_of(begin), 0};
      if (cache.dtype == DType::i8) {
        const AppendCodesParams params = {.first = static_cast<uint64_t>(begin),
                                          .begin = static_cast<uint64_t>(cache.offset),
                                          .x_stride = static_cast<uint32_t>(x_stride),
                                          .width = static_cast<uint32_t>(cache.width),
                                          .dim = static_cast<uint32_t>(cache.head)};
        dispatch({"elementwise", "append_codes"}, params, {from, rows.table, to},
                 {static_cast<uint32_t>(cache.scales()), static_cast<uint32_t>(end - begin)});
        continue;
      }
      const AppendParams params = {.first = static_cast<uint64_t>(begin),
                                   .begin = static_cast<uint64_t>(cache.offset),
                                   .x_stride = static_cast<uint32_t>(x_stride),
                                   .width = static_cast<uint32_t>(cache.width)};
      flat({"elementwise", cache.dtype == DType::bf16 ? "append_bf16" : "append_f32"}, params, {from, rows.table, to},
           cache.width, end - begin);
    }
  });
}

void MetalCommands::swiglu(View gate, View up, View out, int64_t count) {
  op("swiglu", [&] {
    require_in_place(same(gate, out), "swiglu");
    flat({"elementwise", "swiglu"}, FlatParams{static_cast<uint32_t>(count)}, {gate, up}, count);
  });
}

void MetalCommands::geglu(View gate, View up, View out, int64_t count) {
  op("geglu", [&] {
    require_in_place(same(gate, out), "geglu");
    flat({"elementwise", "geglu"}, FlatParams{static_cast<uint32_t>(count)}, {gate, up}, count);
  });
}

void MetalCommands::residual_add(View x, View y, View out, int64_t count) {
  op("residual_add", [&] {
    require_in_place(same(x, out), "residual_add");
    flat({"elementwise", "residual_add"}, FlatParams{static_cast<uint32_t>(count)}, {x, y}, count);
  });
}

void MetalCommands::bias_add(View x, View bias, int64_t n, int64_t width) {
  op("bias_add",
     [&] { flat({"elementwise", "bias_add"}, BiasParams{static_cast<uint32_t>(width)}, {x, bias}, width, n); });
}

void MetalCommands::scale(View x, float factor, int64_t count) {
  op("scale", [&] { flat({"elementwise", "scale"}, FactorParams{static_cast<uint32_t>(count), factor}, {x}, count); });
}

void MetalCommands::soft_cap(View x, float cap, int64_t count) {
  op("soft_cap",
     [&] { flat({"elementwise", "soft_cap"}, FactorParams{static_cast<uint32_t>(count), cap}, {x}, count); });
}

void MetalCommands::silu(View x, float factor, int64_t count) {
  op("silu", [&] { flat({"hyper", "silu_of"}, FactorParams{static_cast<uint32_t>(count), factor}, {x}, count); });
}

// ---- Residual streams -----------------------------------------------------------------------------------------------

static StreamParams stream_params(int64_t streams, int64_t width, float eps = 0) {
  return {static_cast<uint32_t>(streams), static_cast<uint32_t>(width), eps};
}

void MetalCommands::hyper_norm(View x, View weight, View out, int64_t n, int64_t streams, int64_t width, float eps) {
  op("hyper_norm", [&] {
    dispatch({"hyper", "hyper_norm"}, stream_params(streams, width, eps), {x, weight, out},
             {static_cast<uint32_t>(streams), static_cast<uint32_t>(n)});
  });
}

void MetalCommands::hyper_mix(const HyperMixArgs& args, int64_t n) {
  op("hyper_mix", [&] {
    flat({"hyper", "hyper_mix"}, stream_params(args.streams, args.width), {args.normed, args.gates, args.out},
         args.width, n);
  });
}

void MetalCommands::hyper_add(const HyperAddArgs& args, int64_t n) {
  op("hyper_add", [&] {
    flat({"hyper", "hyper_add"}, stream_params(args.streams, args.width), {args.x, args.y, args.gates}, args.width,
         args.streams, n);
  });
}

void MetalCommands::ngram_gate(const NgramGateArgs& args, int64_t n) {
  op("ngram_gate", [&] {
    dispatch({"hyper", "ngram_gate"}, stream_params(args.streams, args.width),
             {args.key, args.query, args.value, args.out},
             {static_cast<uint32_t>(args.streams), static_cast<uint32_t>(n)});
  });
}

// ---- Gates and sums -------------------------------------------------------------------------------------------------

void MetalCommands::sigmoid_gate(const Heads& x, const Heads& gate, int64_t n) {
  op("sigmoid_gate", [&] {
    const HeadGateParams params = {.row_stride = static_cast<uint32_t>(x.row_stride),
                                   .head_stride = static_cast<uint32_t>(x.head_stride),
                                   .gate_row_stride = static_cast<uint32_t>(gate.row_stride),
                                   .gate_head_stride = static_cast<uint32_t>(gate.head_stride),
                                   .dim = static_cast<uint32_t>(x.dim)};
    flat({"elementwise", "sigmoid_gate"}, params, {x.view, gate.view}, x.dim, x.heads, n);
  });
}

void MetalCommands::combine(const CombineArgs& args, int64_t n) {
  op("combine", [&] {
    require_in_place(!args.residual || same(args.residual, args.out), "combine");
    const CombineParams params = {.hidden = static_cast<uint32_t>(args.hidden),
                                  .k = static_cast<uint32_t>(args.k),
                                  .has_residual = bool(args.residual),
                                  .has_shared = bool(args.shared),
                                  .has_gate = bool(args.shared_gate)};
    flat({"elementwise", "combine"}, params,
         {args.out, args.outputs, args.weights, or_nothing(args.shared), or_nothing(args.shared_gate)}, args.hidden, n);
  });
}

void MetalCommands::copy(View from, View to, int64_t bytes) {
  op("copy", [&] {
    const int64_t numbers = bytes / 4;
    flat({"elementwise", "copy_numbers"}, FlatParams{static_cast<uint32_t>(numbers)}, {from, to}, numbers);
  });
}

// ---- Choosing -------------------------------------------------------------------------------------------------------

RouteParams MetalCommands::route_params(const RouteArgs& args) const {
  if (args.experts > int64_t{max_experts})
    throw FormatError(concat("metal: expected at most ", max_experts,
                             " experts in a layer, which is what its routers choose from, found ", args.experts,
                             ": load with backend=\"cpu\""));
  return {.experts = static_cast<uint32_t>(args.experts),
          .k = static_cast<uint32_t>(args.k),
          .normalize = args.normalize,
          .groups = static_cast<uint32_t>(args.groups),
          .groups_kept = static_cast<uint32_t>(args.groups_kept),
          .has_factors = bool(args.factors),
          .scaling = args.scaling};
}

void MetalCommands::route_softmax(const RouteArgs& args, int64_t n) {
  op("route_softmax", [&] {
    dispatch({"route", "route_softmax"}, route_params(args),
             {args.logits, or_nothing(args.factors), args.ids, args.weights}, {static_cast<uint32_t>(n)});
  });
}

void MetalCommands::route_grouped(const RouteArgs& args, int64_t n) {
  op("route_grouped", [&] {
    dispatch({"route", "route_grouped"}, route_params(args), {args.logits, args.bias, args.ids, args.weights},
             {static_cast<uint32_t>(n)});
  });
}

// It works in rounds. Each leaves the k best of every block to the next, until one block is left.
void MetalCommands::top_k(View logits, int64_t count, int64_t k, View ids, View values) {
  op("top_k", [&] {
    if (k > int64_t{top_k_block} / 2)
      throw ArgumentError(concat("[top_k] k: expected at most ", top_k_block / 2, " on Metal, found ", k));
    View from = logits;
    View from_ids = or_nothing({});
    for (uint32_t has_ids = 0, room = 0;; has_ids = 1, room ^= 1) {
      const int64_t blocks = (count + top_k_block - 1) / top_k_block;
      const int64_t left = (blocks - 1) * k + std::min(k, count - (blocks - 1) * top_k_block);
      View to = values;
      View to_ids = ids;
      if (blocks > 1) {
        for (std::unique_ptr<Buffer>& picks : backend_.picks_[room])
          if (!picks || picks->bytes() < 4 * left) picks = backend_.allocate(4 * left, Memory::device, "top-k");
        to = {backend_.picks_[room][0].get(), 0};
        to_ids = {backend_.picks_[room][1].get(), 0};
      }
      if (has_ids) barrier();
      dispatch({"route", "top_k"}, TopKParams{static_cast<uint32_t>(count), static_cast<uint32_t>(k), has_ids},
               {from, from_ids, to, to_ids}, {static_cast<uint32_t>(blocks)});
      if (blocks == 1) return;
      from = to;
      from_ids = to_ids;
      count = left;
    }
  });
}

}  // namespace moeflux::metal
