// How much memory an engine and its sessions will take. It comes from the same layouts that later allocate.
#pragma once

#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/blocks/draft_ends.h"
#include "engine/blocks/make_blocks.h"
#include "format/store_directory.h"
#include "moeflux.h"

namespace moeflux {

constexpr int64_t max_top_k = 1024;

// The options with a value wherever a 0 leaves the choice open. StateError or BudgetError when the model cannot run so.
EngineOptions resolved(const StoreDirectory& store, EngineOptions options);
SessionOptions resolved(const Variant& variant, SessionOptions options);

// How many routed experts all layers have together.
int64_t all_experts(const Variant& variant);

// The largest pieces of work that batches of this model will bring, in chunks of `options.chunk` tokens.
WorkSizes work_sizes(const StoreDirectory& store, const std::vector<LayerBlocks>& layers, const EngineOptions& options);

// Room for all intermediate numbers, in chunks of `chunk` tokens. Its views are members of `scratch`, `layers`,
// `output`, which reads the stream for the head, and `draft`.
ScratchLayout scratch_layout(const Variant& variant, std::vector<LayerBlocks>& layers, Connection& output,
                             DraftEnds& draft, int64_t chunk, Scratch& scratch);

// For resolved options. `shared`: whether host and device share memory; `maps`: whether the device uses mapped files.
Footprint engine_footprint(const StoreDirectory& store, const EngineOptions& options, bool shared, bool maps);
// The part of it that is in a device's own memory.
Footprint engine_device_footprint(const StoreDirectory& store, const EngineOptions& options);
// Like those of moeflux.h. With `apart`, for tests, as if the device had memory of its own.
Footprint footprint(const StoreDirectory& store, const EngineOptions& options, const SessionOptions& session,
                    bool apart);
Footprint device_footprint(const StoreDirectory& store, const EngineOptions& options, const SessionOptions& session,
                           bool apart);
// What the device must compile before an engine of these options runs, by names of its own. `rows`: the type of keys
// and values. Nothing where nothing is missing.
std::vector<std::string> kernels_to_compile(const StoreDirectory& store, const EngineOptions& options, DType rows);
// `chunk`: of the engine. `shared`: whether host and device share memory. `room`: of the device.
Footprint session_footprint(const Variant& variant, const SessionOptions& options, int64_t drafts, int64_t chunk,
                            bool shared, DeltaRoom room);
// The part of it that is in a device's own memory.
Footprint session_device_footprint(const Variant& variant, const SessionOptions& options, int64_t drafts, int64_t chunk,
                                   DeltaRoom room);
// What a session's logits take.
int64_t logits_bytes(const Variant& variant, int64_t drafts);
int64_t survey_bytes(const Variant& variant, int64_t drafts);
// How many drafts a session may have at once.
int64_t drafts_of(Speculate speculate);

// Whether a layer that drafts is used. Elsewhere it is left out. ArgumentError where it is asked for and there is none.
bool uses_draft(const Variant& variant, Speculate speculate);

}  // namespace moeflux
