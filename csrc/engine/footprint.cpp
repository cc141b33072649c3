#include "engine/footprint.h"

#include <algorithm>
#include <set>

#include "backend/mirror.h"
#include "core/arena.h"
#include "core/error.h"
#include "core/text.h"
#include "devices/devices.h"
#include "engine/draft_memory.h"
#include "engine/draft_policy.h"
#include "engine/drafts.h"
#include "engine/experts/expert_side.h"
#include "engine/layer_state.h"
#include "engine/ngram_feed.h"
#include "engine/recorder.h"
#include "engine/scratch.h"
#include "engine/weights.h"
#include "io/expert_store.h"

namespace moeflux {
namespace {

// Long enough that an expert sees many tokens, short enough that the scratch stays a small part of memory.
constexpr int64_t default_chunk = 512;
constexpr int default_readers = 4;
constexpr int64_t default_max_context = 32768;
constexpr int64_t max_checkpoints_limit = 4096;

template <typename T>
void add_once(std::vector<T>& all, const T& one) {
  if (std::ranges::find(all, one) == all.end()) all.push_back(one);
}

void add_shapes(const StoreDirectory& store, WorkSizes& sizes) {
  for (const auto& [name, format] : store.formats) {
    const StoredTensor& weight = store.tensors.at(name + ".weight");
    if (weight.kind != TensorKind::matrix) continue;
    const int64_t columns = weight.shape.back();
    add_once(sizes.matrices, {format, weight.elements() / columns, format.columns_of(columns)});
    if (name == "model.embed_tokens") sizes.tokens = format;
  }
  const auto add_experts = [&](const ExpertLayout& layout) {
    const auto& [gate, up, down] = layout.formats;
    if (!layout.pieces.empty())
      add_once(sizes.experts, {MatrixShape{gate, layout.intermediate, layout.hidden},
                               MatrixShape{up, layout.intermediate, layout.hidden},
                               MatrixShape{down, layout.hidden, layout.intermediate}});
  };
  add_experts(store.experts);
  std::ranges::for_each(store.layouts, add_experts);
}

}  // namespace

int64_t all_experts(const Variant& variant) { return variant.experts().count * variant.moe_layers(); }

EngineOptions resolved(const StoreDirectory& store, EngineOptions options) {
  const Variant& variant = store.variant;
  const int64_t all = all_experts(variant);
  const int64_t slots = options.expert_slots == 0 ? all : std::min(options.expert_slots, all);
  if (slots < variant.experts().per_token)
    throw ArgumentError(concat("expert_slots: expected at least ", variant.experts().per_token,
                               ", the experts of one token in one layer, found ", options.expert_slots));
  options.expert_slots = slots;
  options.host_slots = slots == all ? 0 : std::min(options.host_slots, all);
  options.backend = device_entry(options.backend).name;
  if (options.host_slots == 0 || !device_entry(options.backend).has_host_experts) options.cpu_experts = CpuExperts::off;
  if (options.chunk == 0) options.chunk = default_chunk;
  if (options.readers == 0) options.readers = default_readers;
  return options;
}

SessionOptions resolved(const Variant& variant, SessionOptions options) {
  const auto require = [](bool holds, const char* what, int64_t max, int64_t found) {
    if (!holds) throw ArgumentError(concat(what, ": expected 1 to ", max, ", found ", found));
  };
  if (options.max_context == 0) options.max_context = std::min(variant.max_context, default_max_context);
  require(options.max_context >= 1 && options.max_context <= variant.max_context, "max_context", variant.max_context,
          options.max_context);
  require(options.max_checkpoints >= 1 && options.max_checkpoints <= max_checkpoints_limit, "max_checkpoints",
          max_checkpoints_limit, options.max_checkpoints);
  if (options.kv_dtype != DType::f32 && options.kv_dtype != DType::bf16 && options.kv_dtype != DType::i8)
    throw ArgumentError(concat("kv_dtype: expected F32, BF16 or I8, found ", dtype_name(options.kv_dtype)));
  return options;
}

WorkSizes work_sizes(const StoreDirectory& store, const std::vector<LayerBlocks>& layers,
                     const EngineOptions& options) {
  const Variant& variant = store.variant;
  const int64_t chunk = options.chunk;
  WorkSizes sizes;
  std::set<int64_t> groups;
  for (const QuantFormat& format : store.every_format())
    if (format.is_quantised()) {
      groups.insert(format.group_size);
      sizes.has_blocks = sizes.has_blocks || format.is_blocks();
    }
  if (!groups.empty()) {
    sizes.group = *groups.begin();
    sizes.group_sizes = static_cast<int64_t>(groups.size());
  }
  sizes.logits = variant.vocab_size;
  sizes.picks = max_top_k;
  sizes.products = 8;  // more than any layer has side by side, unless its block asks for more
  sizes.rows = chunk;
  sizes.input_rows = chunk;
  sizes.inputs = chunk * variant.hidden_size;
  sizes.row_blocks = blocks_of(variant.max_context);
  sizes.batches = options.ring_depth + 1;
  for (const LayerBlocks& layer : layers)
    LayerBlocks::each(layer, [&](const auto& block) { block.want(sizes, chunk); });
  add_shapes(store, sizes);
  return sizes;
}

ScratchLayout scratch_layout(const Variant& variant, std::vector<LayerBlocks>& layers, Connection& output,
                             DraftEnds& draft, int64_t chunk, Scratch& scratch) {
  ScratchLayout layout(chunk, variant.max_context);
  scratch.place(layout, variant);
  for (LayerBlocks& layer : layers) LayerBlocks::each(layer, [&](auto& block) { block.place(layout); });
  if (variant.ends()) output.place(layout);
  if (variant.draft) draft.place(layout);
  return layout;
}

Footprint engine_footprint(const StoreDirectory& store, const EngineOptions& options, bool shared, bool maps) {
  const Variant& v = store.variant;
  std::vector<LayerBlocks> layers = make_blocks(v);
  Connection output(stream_of(v));
  DraftEnds draft(stream_of(v));
  Scratch scratch;
  Footprint bytes;
  bytes.dense_weights = dense_layout(store, maps).bytes();
  bytes.expert_slots = arena_bytes(ExpertSide::planned_slots(store, options, shared));
  bytes.host_slots = arena_bytes(ExpertSide::planned_host_slots(store, options));
  bytes.scratch = scratch_layout(v, layers, output, draft, options.chunk, scratch).bytes(shared) +
                  MirroredBuffer::planned_bytes(max_top_k * 8, shared) +
                  device_entry(options.backend).prepared_bytes(work_sizes(store, layers, options));
  // Automatic reads may turn out to be buffered, which needs fewer such buffers. The plan is for direct reads.
  const ReadMode mode = options.reads == Reads::buffered ? ReadMode::buffered : ReadMode::direct;
  bytes.read_buffers = options.readers * bounce_of(store, mode);
  if (!shared) {
    bytes.read_buffers += ExpertSide::planned_staging(store, options);
    bytes.loading = DenseLanding::planned_bytes(store);
  }
  bytes.tables = ExpertSide::planned_tables(store, options) +
                 Recorder::planned_tables(options.ring_depth, v.experts().count) +
                 NgramFeed::planned_tables(v, options.chunk);
  bytes.ngram_rows = NgramFeed::planned_rows(store, options.chunk);
  return bytes;
}

Footprint engine_device_footprint(const StoreDirectory& store, const EngineOptions& options) {
  std::vector<LayerBlocks> layers = make_blocks(store.variant);
  Connection output(stream_of(store.variant));
  DraftEnds draft(stream_of(store.variant));
  Scratch scratch;
  const DeviceEntry& device = device_entry(options.backend);
  const WorkSizes sizes = work_sizes(store, layers, options);
  const int64_t prepared =
      device.prepared_bytes(sizes) - (device.prepared_host_bytes ? device.prepared_host_bytes(sizes) : 0);
  Footprint bytes;
  bytes.dense_weights = dense_layout(store, false).bytes();
  bytes.expert_slots = arena_bytes(ExpertSide::planned_slots(store, options, false));
  bytes.scratch = scratch_layout(store.variant, layers, output, draft, options.chunk, scratch).device_bytes() +
                  arena_bytes(max_top_k * 8) + prepared;
  return bytes;
}

int64_t drafts_of(Speculate speculate) { return speculate == Speculate::off ? 0 : max_drafts; }

bool uses_draft(const Variant& variant, Speculate speculate) {
  if (speculate == Speculate::mtp && !variant.draft)
    throw ArgumentError(
        concat("speculate: expected a model with a layer that drafts for mtp, as `moeflux convert --mtp` ",
               "keeps it, found ", printable(variant.name), " without"));
  return speculate == Speculate::mtp || speculate == Speculate::automatic;
}

int64_t logits_bytes(const Variant& variant, int64_t drafts) {
  return variant.ends() ? (1 + drafts) * variant.vocab_size * 4 : 0;
}

int64_t survey_bytes(const Variant& variant, int64_t drafts) {
  const int64_t of_row = int64_t{sizeof(ShortlistHead)} + ShortlistLayout(variant.vocab_size).bytes();
  return variant.ends() ? (1 + drafts) * of_row : 0;
}

Footprint session_footprint(const Variant& variant, const SessionOptions& options, int64_t drafts, int64_t chunk,
                            bool shared, DeltaRoom room) {
  const StateLayout layout = state_layout(variant, options.kv_dtype, room);
  Footprint bytes;
  bytes.rows = layout.rows_bytes(options, chunk);
  bytes.recurrent = arena_bytes(layout.recurrent_bytes) + Drafts::planned_bytes(drafts, layout.recurrent_bytes);
  bytes.checkpoints = options.max_checkpoints * arena_bytes(layout.recurrent_bytes);
  bytes.tokens =
      arena_bytes(options.max_context * 4) + MirroredBuffer::planned_bytes(logits_bytes(variant, drafts), shared);
  if (!shared) bytes.tokens += arena_bytes(layout.exchange_bytes());
  if (!shared && variant.ends()) bytes.tokens += MirroredBuffer::planned_bytes(survey_bytes(variant, drafts), shared);
  if (variant.draft) {
    bytes.rows += DraftMemory::planned_rows(variant, options, chunk);
    bytes.tokens += DraftMemory::planned_bytes(variant, options, drafts, shared);
  }
  return bytes;
}

// What there is once on a device whose memory is the host's, but for the tokens.
Footprint session_device_footprint(const Variant& variant, const SessionOptions& options, int64_t drafts, int64_t chunk,
                                   DeltaRoom room) {
  Footprint bytes = session_footprint(variant, options, drafts, chunk, true, room);
  bytes.tokens -= arena_bytes(options.max_context * 4);
  if (variant.ends()) bytes.tokens += MirroredBuffer::planned_bytes(survey_bytes(variant, drafts), true);
  return bytes;
}

Footprint& Footprint::operator+=(const Footprint& other) {
  dense_weights += other.dense_weights;
  expert_slots += other.expert_slots;
  host_slots += other.host_slots;
  scratch += other.scratch;
  read_buffers += other.read_buffers;
  tables += other.tables;
  loading += other.loading;
  ngram_rows += other.ngram_rows;
  rows += other.rows;
  recurrent += other.recurrent;
  checkpoints += other.checkpoints;
  tokens += other.tokens;
  return *this;
}

}  // namespace moeflux
