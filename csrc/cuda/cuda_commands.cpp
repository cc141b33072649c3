#include "cuda/cuda_commands.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/shortlist.h"

namespace moeflux::cuda {
namespace {

bool same(View a, View b) { return a.buffer == b.buffer && a.offset == b.offset; }

void require_in_place(bool holds, const char* op) {
  if (!holds) throw StateError(concat("[", op, "] expected to be in place, found another output"));
}

HeadParams head_params(const Heads& x, const Heads& gate, View weight, int64_t n, float eps, float scale) {
  return {.x = address<float>(x.view),
          .weight = address<const float>(weight),
          .gate = address<const float>(gate.view),
          .row_stride = static_cast<uint32_t>(x.row_stride),
          .head_stride = static_cast<uint32_t>(x.head_stride),
          .gate_row_stride = static_cast<uint32_t>(gate.row_stride),
          .gate_head_stride = static_cast<uint32_t>(gate.head_stride),
          .dim = static_cast<uint32_t>(x.dim),
          .heads = static_cast<uint32_t>(x.heads),
          .n = static_cast<uint32_t>(n),
          .eps = eps,
          .scale = scale};
}

FlatParams flat_params(View x, View y, int64_t count) {
  return {address<float>(x), address<const float>(y), static_cast<uint64_t>(count)};
}

constexpr int64_t most_copied_bytes = 4 << 20;    // by a launch: logits of a row; the driver copies more
constexpr int64_t most_fetched_bytes = 64 << 10;  // the same from the host

bool are_words(const WordsPlaces& places, int64_t bytes) {
  return bytes % word_bytes == 0 && reinterpret_cast<uintptr_t>(places.from) % word_bytes == 0 &&
         reinterpret_cast<uintptr_t>(places.to) % word_bytes == 0;
}

}  // namespace

// ---- Vectors --------------------------------------------------------------------------------------------------------

void CudaCommands::rms_norm(View x, View weight, View out, int64_t n, int64_t width, float eps) {
  op("rms_norm", [&] {
    const NormParams params = {address<const float>(x), address<const float>(weight), address<float>(out),
                               static_cast<uint32_t>(width), eps};
    if (n == 1 && !same(x, out)) return wait_with(params);
    if (!same(x, out) && norm_waits(params, n)) return;
    launch("rms_norm", {static_cast<uint32_t>(n)}, row_threads, params);
  });
}

void CudaCommands::rms_norm_heads(const Heads& x, View weight, int64_t n, float eps, float scale) {
  op("rms_norm_heads", [&] {
    const HeadParams params = head_params(x, {}, weight, n, eps, scale);
    if (n > 1 ? takes_norm_of_convolved(params) || takes_rows_head_norm(params) : takes_head_norm(params)) return;
    by_heads("rms_norm_heads", params, x.heads * n);
  });
}

void CudaCommands::layer_norm(View x, View weight, View bias, int64_t n, int64_t width, float eps) {
  op("layer_norm", [&] {
    const LayerNormParams params = {.x = address<float>(x),
                                    .weight = address<const float>(weight),
                                    .bias = address<const float>(bias),
                                    .width = static_cast<uint32_t>(width),
                                    .n = static_cast<uint32_t>(n),
                                    .eps = eps};
    by_heads("layer_norm", params, n);
  });
}

void CudaCommands::gated_rms_norm(const Heads& x, const Heads& z, View weight, int64_t n, float eps) {
  op("gated_rms_norm", [&] {
    const HeadParams params = head_params(x, z, weight, n, eps, 1);
    if (n > 1 ? heads_wait(params) : takes_gated_norm(params)) return;
    by_heads("gated_rms_norm", params, x.heads * n);
  });
}

void CudaCommands::rope(const Heads& x, View angles, int64_t half, bool interleaved, int64_t n) {
  op("rope", [&] {
    const RopeParams params = {.x = address<float>(x.view),
                               .angles = address<const float>(angles),
                               .row_stride = static_cast<uint32_t>(x.row_stride),
                               .head_stride = static_cast<uint32_t>(x.head_stride),
                               .half_dim = static_cast<uint32_t>(half),
                               .heads = static_cast<uint32_t>(x.heads),
                               .n = static_cast<uint32_t>(n),
                               .interleaved = interleaved};
    if (n > 1 ? takes_rows_rope(params) : takes_rope(params)) return;
    flat("rope", params, half * x.heads * n);
  });
}

void CudaCommands::append(View x, int64_t x_stride, const Cache& cache, int64_t first, int64_t n) {
  op("append", [&] {
    if (n == 0) return;
    const AppendParams params = {.x = address<const float>(x),
                                 .rows = cached_rows(cache.blocks, first, n),
                                 .sessions = nullptr,
                                 .begin = static_cast<uint64_t>(cache.offset),
                                 .x_stride = static_cast<uint32_t>(x_stride),
                                 .width = static_cast<uint32_t>(cache.width),
                                 .dim = static_cast<uint32_t>(cache.head),
                                 .n = static_cast<uint32_t>(n)};
    const std::string kernel = concat("append_", gpu::type_of(cache));
    if (n > 1) return append_rows(kernel, params);
    if (takes_row(kernel, params) || takes_rows_append(kernel, params)) return;
    if (!takes_append(kernel, params)) wait_with(Appended{kernel, params, {params.rows}});
  });
}

void CudaCommands::append_rows(const std::string& kernel, const AppendParams& params) {
  const int64_t n = params.n;
  if (kernel == "append_codes")  // a warp for each scale
    by_heads(kernel.c_str(), params, n * (params.width / params.dim));
  else
    flat(kernel, params, n * params.width);
}

void CudaCommands::swiglu(View gate, View up, View out, int64_t count) {
  op("swiglu", [&] {
    require_in_place(same(gate, out), "swiglu");
    if (takes_swiglu(gate, up, count) || takes_rows_swiglu(gate, up, count)) return;
    const SwigluParams params = {
        address<float>(gate), address<const float>(up), static_cast<uint64_t>(count), 0, 0, false};
    wait_with(RowsGated{params});
  });
}

void CudaCommands::geglu(View gate, View up, View out, int64_t count) {
  op("geglu", [&] {
    require_in_place(same(gate, out), "geglu");
    const SwigluParams params = {
        address<float>(gate), address<const float>(up), static_cast<uint64_t>(count), 0, 0, true};
    flat("swiglu", params, count);
  });
}

void CudaCommands::residual_add(View x, View y, View out, int64_t count) {
  op("residual_add", [&] {
    require_in_place(same(x, out), "residual_add");
    if (takes_residual(x, y, count) || takes_rows_residual(x, y, count)) return;
    wait_with(RowsAdded{flat_params(x, y, count)});
  });
}

void CudaCommands::bias_add(View x, View bias, int64_t n, int64_t width) {
  op("bias_add", [&] {
    const BiasParams params = {address<float>(x), address<const float>(bias), static_cast<uint64_t>(n * width),
                               static_cast<uint32_t>(width)};
    flat("bias_add", params, n * width);
  });
}

void CudaCommands::scale(View x, float factor, int64_t count) {
  op("scale", [&] { flat("scale", FactorParams{address<float>(x), static_cast<uint64_t>(count), factor}, count); });
}

void CudaCommands::soft_cap(View x, float cap, int64_t count) {
  op("soft_cap", [&] { flat("soft_cap", FactorParams{address<float>(x), static_cast<uint64_t>(count), cap}, count); });
}

void CudaCommands::silu(View x, float factor, int64_t count) {
  op("silu", [&] { flat("silu_of", FactorParams{address<float>(x), static_cast<uint64_t>(count), factor}, count); });
}

// ---- Residual streams -----------------------------------------------------------------------------------------------

static StreamParams stream_params(View x, View y, View z, View out, int64_t n, int64_t streams, int64_t width,
                                  float eps = 0) {
  return {.x = address<const float>(x),
          .y = address<const float>(y),
          .z = address<const float>(z),
          .out = address<float>(out),
          .streams = static_cast<uint32_t>(streams),
          .width = static_cast<uint32_t>(width),
          .n = static_cast<uint32_t>(n),
          .eps = eps};
}

void CudaCommands::hyper_norm(View x, View weight, View out, int64_t n, int64_t streams, int64_t width, float eps) {
  op("hyper_norm", [&] {
    launch("hyper_norm", {static_cast<uint32_t>(n * streams)}, row_threads,
           stream_params(x, weight, {}, out, n, streams, width, eps));
  });
}

void CudaCommands::hyper_mix(const HyperMixArgs& args, int64_t n) {
  op("hyper_mix", [&] {
    flat("hyper_mix", stream_params(args.normed, args.gates, {}, args.out, n, args.streams, args.width),
         n * args.width);
  });
}

void CudaCommands::hyper_add(const HyperAddArgs& args, int64_t n) {
  op("hyper_add", [&] {
    flat("hyper_add", stream_params(args.y, args.gates, {}, args.x, n, args.streams, args.width),
         n * args.streams * args.width);
  });
}

void CudaCommands::ngram_gate(const NgramGateArgs& args, int64_t n) {
  op("ngram_gate", [&] {
    by_heads("ngram_gate", stream_params(args.key, args.query, args.value, args.out, n, args.streams, args.width),
             n * args.streams);
  });
}

// ---- Gates and sums -------------------------------------------------------------------------------------------------

void CudaCommands::sigmoid_gate(const Heads& x, const Heads& gate, int64_t n) {
  op("sigmoid_gate", [&] {
    if (takes_gate(x, gate, n)) return;
    flat("sigmoid_gate", head_params(x, gate, {}, n, 0, 1), x.dim * x.heads * n);
  });
}

void CudaCommands::combine(const CombineArgs& args, int64_t n) {
  op("combine", [&] {
    require_in_place(!args.residual || same(args.residual, args.out), "combine");
    const CombineParams params = {.residual = address<const float>(args.residual),
                                  .outputs = address<const float>(args.outputs),
                                  .weights = address<const float>(args.weights),
                                  .shared = address<const float>(args.shared),
                                  .shared_gate = address<const float>(args.shared_gate),
                                  .out = address<float>(args.out),
                                  .hidden = static_cast<uint32_t>(args.hidden),
                                  .k = static_cast<uint32_t>(args.k),
                                  .n = static_cast<uint32_t>(n)};
    if (n == 1 ? takes_sum(params) : sum_waits(params)) return;
    flat("combine", params, args.hidden * n);
  });
}

// ---- Copies ---------------------------------------------------------------------------------------------------------

// What is in the GPU's memory is copied by a launch, which can be in a graph: to the same memory, or a few bytes to the
// host's. Copies of as many bytes, one after another, are one. What the host writes before it lets a batch go on is
// fetched by a launch, too: an engine of copies may have experts to bring before, and words of a launch are taken when
// the batch is submitted.
void CudaCommands::copy(View from, View to, int64_t bytes) {
  op("copy", [&] {
    if (bytes == 0) return;
    made_.reset();
    const bool from_host = from.buffer->memory() != Memory::device, to_host = to.buffer->memory() != Memory::device;
    const int64_t most = from_host ? (launches_.is_held() ? most_fetched_bytes : 0)
                         : to_host ? most_crossing_bytes
                                   : most_copied_bytes;
    const WordsPlaces places = {address<const uint32_t>(from), address<uint32_t>(to)};
    if (bytes <= most && are_words(places, bytes)) {
      if (!takes_copy(places, bytes)) wait_with(Copies{{places}, bytes});
      return;
    }
    finish();
    launches_.copy(from, to, bytes);
  });
}

bool CudaCommands::takes_copy(const WordsPlaces& places, int64_t bytes) {
  auto* waiting = std::get_if<Copies>(&waiting_);
  if (!waiting || waiting->bytes != bytes) return false;
  const auto meet = [bytes](const uint32_t* a, const uint32_t* b) {
    const auto first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
    return (first < second ? second - first : first - second) < static_cast<uintptr_t>(bytes);
  };
  const auto is_in_the_way = [&](const WordsPlaces& before) {
    return meet(before.to, places.from) || meet(before.to, places.to) || meet(before.from, places.to);
  };
  if (std::ranges::any_of(waiting->places, is_in_the_way)) return false;
  waiting->places.push_back(places);
  return true;
}

void CudaCommands::launch_copies(const Copies& copies) {
  const auto words = static_cast<uint32_t>(copies.bytes / word_bytes);
  WordsParams params = {.places = copies.places.front(), .list = nullptr, .count = words};
  if (copies.places.size() > 1) {
    const List list = launches_.list(static_cast<int64_t>(copies.places.size() * sizeof(WordsPlaces)));
    std::ranges::copy(copies.places, list.values<WordsPlaces>());
    params.list = reinterpret_cast<const WordsPlaces*>(list.device);
  }
  launch("copy_words", {divide_up(words, copied_words), static_cast<uint32_t>(copies.places.size())}, flat_threads,
         params);
}

// ---- Choosing -------------------------------------------------------------------------------------------------------

RouteParams CudaCommands::route_params(const RouteArgs& args) {
  if (args.experts > int64_t{max_experts})
    throw FormatError(concat("cuda: expected at most ", max_experts,
                             " experts in a layer, which is what its routers choose from, found ", args.experts,
                             ": load with backend=\"cpu\""));
  return {.logits = address<const float>(args.logits),
          .bias = address<const float>(args.bias),
          .factors = address<const float>(args.factors),
          .ids = address<int>(args.ids),
          .weights = address<float>(args.weights),
          .experts = static_cast<uint32_t>(args.experts),
          .k = static_cast<uint32_t>(args.k),
          .normalize = args.normalize,
          .groups = static_cast<uint32_t>(args.groups),
          .groups_kept = static_cast<uint32_t>(args.groups_kept),
          .scaling = args.scaling};
}

bool CudaCommands::is_few(const RouteArgs& args) { return args.experts <= int64_t{few_experts} && args.groups == 0; }

// Of few experts, by a launch of its own.
void CudaCommands::launch_choice(uint32_t rows, const RouteParams& route) {
  launch("route_softmax_few", {rows}, few_experts, route);
}

void CudaCommands::route_softmax(const RouteArgs& args, int64_t n) {
  op("route_softmax", [&] {
    const bool are_few = is_few(args);
    const RouteParams params = route_params(args);
    if (are_few && (n == 1 ? takes_route(params) : takes_rows_route(params, n))) return;
    finish();
    const std::optional<MadeDigits> made = made_;
    const auto rows = static_cast<uint32_t>(n);
    if (are_few)
      launch_choice(rows, params);
    else
      launch("route_softmax", {rows}, lanes, params);
    if (made && keeps_digits(*made, params.weights, n * args.k) &&
        keeps_digits(*made, reinterpret_cast<const float*>(params.ids), n * args.k))
      made_ = made;
  });
}

void CudaCommands::route_grouped(const RouteArgs& args, int64_t n) {
  op("route_grouped", [&] { launch("route_grouped", {static_cast<uint32_t>(n)}, lanes, route_params(args)); });
}

// It works in rounds. Each leaves the k best of every block to the next, until one block is left.
void CudaCommands::top_k(View logits, int64_t count, int64_t k, View ids, View values) {
  op("top_k", [&] {
    if (k > int64_t{top_k_block} / 2)
      throw ArgumentError(concat("[top_k] k: expected at most ", top_k_block / 2, " on CUDA, found ", k));
    TopKParams params = {.values = address<const float>(logits),
                         .ids = nullptr,
                         .best_values = address<float>(values),
                         .best_ids = address<int>(ids),
                         .count = 0,
                         .k = static_cast<uint32_t>(k)};
    for (size_t round = 0;; round ^= 1) {
      const int64_t blocks = divide_up(count, top_k_block);
      const int64_t left = (blocks - 1) * k + std::min(k, count - (blocks - 1) * top_k_block);
      const bool is_last = blocks == 1;
      params.count = static_cast<uint32_t>(count);
      params.best_values = is_last ? address<float>(values) : room<float>(picked_values + round, 4 * left);
      params.best_ids = is_last ? address<int>(ids) : room<int>(picked_ids + round, 4 * left);
      launch("top_k", {static_cast<uint32_t>(blocks)}, row_threads, params);
      if (is_last) return;
      params.values = params.best_values;
      params.ids = params.best_ids;
      count = left;
    }
  });
}

// Those of several rows, one after another, are one.
void CudaCommands::survey(View logits, int64_t count, View found) {
  op("survey", [&] {
    ShortlistRow row = {};
    row.logits = address<const float>(logits);
    row.head = address<int>(found);
    auto* waiting = std::get_if<Surveys>(&waiting_);
    if (waiting && waiting->count == count &&
        std::ssize(waiting->rows) * divide_up(count, top_k_block) * 16 < launches_.room_limit(surveyed))
      return waiting->rows.push_back(row);
    wait_with(Surveys{{row}, count});
  });
}

void CudaCommands::launch_surveys(const Surveys& surveys) {
  const uint32_t blocks = divide_up(surveys.count, top_k_block);
  const auto n = static_cast<uint32_t>(surveys.rows.size());
  SurveyParams params = {.values = surveys.rows.front().logits,
                         .rows = nullptr,
                         .found = nullptr,
                         .best = room<uint64_t>(surveyed, int64_t{blocks} * n * 16),
                         .result = surveys.rows.front().head,
                         .count = static_cast<uint64_t>(surveys.count)};
  if (n > 1) {
    const List list = launches_.list(static_cast<int64_t>(n * sizeof(ShortlistRow)));
    std::ranges::copy(surveys.rows, list.values<ShortlistRow>());
    params.rows = reinterpret_cast<const ShortlistRow*>(list.device);
  }
  launch("survey", {blocks, n}, row_threads, params);
  params.found = std::exchange(params.best, nullptr);
  params.count = blocks;
  launch("survey", {1, n}, row_threads, params);
}

static_assert(listed_block == shortlist_block && listed_group == shortlist_group);
static_assert(most_listed == moeflux::most_listed && most_listed_groups == moeflux::most_listed_groups);
static_assert(sizeof(ShortlistBlock) == sizeof(moeflux::ShortlistBlock) && sizeof(ShortlistHead) == 16);

void CudaCommands::shortlist(std::span<const ShortlistArgs> rows, int64_t count) {
  op("shortlist", [&] {
    const ShortlistLayout layout(count);
    const List list = launches_.list(static_cast<int64_t>(rows.size() * sizeof(ShortlistRow)));
    for (size_t i = 0; i < rows.size(); ++i) {
      auto* const at = address<std::byte>(rows[i].list);
      list.values<ShortlistRow>()[i] = {.logits = address<const float>(rows[i].logits),
                                        .blocks = reinterpret_cast<ShortlistBlock*>(at),
                                        .head = address<int>(rows[i].head),
                                        .tokens = reinterpret_cast<int*>(at + layout.tokens_at()),
                                        .values = reinterpret_cast<float*>(at + layout.logits_at()),
                                        .groups = reinterpret_cast<float*>(at + layout.groups_at()),
                                        .factor = rows[i].factor};
    }
    const ShortlistParams params = {.rows = reinterpret_cast<const ShortlistRow*>(list.device),
                                    .count = static_cast<uint32_t>(count),
                                    .blocks = static_cast<uint32_t>(layout.blocks)};
    const auto number = static_cast<uint32_t>(rows.size());
    launch("shortlist_blocks", {params.blocks, number}, row_threads, params);
    launch("shortlist", {number}, list_warps * lanes, params);
  });
}

}  // namespace moeflux::cuda
