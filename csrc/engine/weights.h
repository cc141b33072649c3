// The weights that stay: everything but the routed experts, resolved to members so that no step looks up a name. They
// are in one arena; where the device reads files in place, matrices stay where a file of hardly anything else has them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "format/store_directory.h"
#include "io/reader.h"
#include "moeflux.h"

namespace moeflux {

// gate and up [width, hidden], down [hidden, width]
struct FeedForwardWeights {
  Matrix gate;
  Matrix up;
  Matrix down;
};

struct LinearAttentionWeights {
  Matrix qkv;    // [conv_channels, hidden]
  Matrix z;      // [value heads * value dim, hidden]
  Matrix a;      // [value heads, hidden]
  Matrix b;      // [value heads, hidden]
  Matrix out;    // [hidden, value heads * value dim]
  View conv;     // [conv_channels, taps]
  View a_log;    // [value heads]
  View dt_bias;  // [value heads]
  View norm;     // [value dim]
};

struct FullAttentionWeights {
  Matrix q;     // [heads * dim, or twice that with a gate, hidden]
  Matrix k;     // [kv_heads * dim, hidden]
  Matrix v;     // [kv_heads * dim, hidden]
  Matrix o;     // [hidden, heads * dim]
  View q_norm;  // [dim]
  View k_norm;  // [dim]
};

// The way from latents to keys and values is kept either as kv_b or as embed_q and unembed_out; the other is empty.
struct LatentAttentionWeights {
  Matrix q_a;          // [q_lora_rank, hidden]; empty when queries are not compressed
  View q_a_norm;       // [q_lora_rank]
  Matrix q_b;          // [heads * (nope + rope), q_lora_rank or hidden]
  Matrix kv_a;         // [rank + rope, hidden]
  View kv_a_norm;      // [rank]
  Matrix kv_b;         // [heads * (nope + v), rank]
  Matrix embed_q;      // [heads * rank, nope]: a stack, one matrix a head
  Matrix unembed_out;  // [heads * v, rank]: likewise
  Matrix o;            // [hidden, heads * v]
};

struct ExpertSideWeights {
  Matrix router;              // [experts, hidden]
  View bias;                  // [experts]; grouped routing only
  FeedForwardWeights shared;  // empty without a shared expert
  Matrix shared_gate;         // [1, hidden]; empty unless the shared expert is gated
};

// Of the three kinds of attention and the two of feed-forward, the layer's own are filled.
struct LayerWeights {
  View input_norm;  // [hidden]
  View post_norm;   // [hidden]
  LinearAttentionWeights linear;
  FullAttentionWeights full;
  LatentAttentionWeights latent;
  FeedForwardWeights dense;
  ExpertSideWeights experts;
};

struct ModelWeights {
  Matrix embed;  // [vocab, hidden]
  Matrix head;   // [vocab, hidden]; the embedding itself when tied
  View norm;     // [hidden]
  std::vector<LayerWeights> layers;
  std::unique_ptr<Buffer> arena;
  std::vector<std::unique_ptr<Buffer>> maps;
  std::vector<std::unique_ptr<Reader>> mapped;  // their files

  int64_t bytes() const;  // of memory
  // IoError naming a file that is mapped and no longer what it was.
  void check_unchanged() const;
};

struct DenseLayout {
  // A part of a file that is mapped: whole pages.
  struct Map {
    int64_t file = 0;
    int64_t begin = 0;
    int64_t bytes = 0;
  };
  // Of a tensor, in the arena or in one of the maps.
  struct Place {
    int64_t map = -1;
    int64_t offset = 0;
  };

  std::map<std::string, Place> places;
  std::vector<Map> maps;
  int64_t arena = 0;

  int64_t bytes() const;  // of memory
};

// With `maps`: what can be used in place is, where it fills nearly all of what would be mapped.
DenseLayout dense_layout(const StoreDirectory& store, bool maps);

// Reads them into memory of `backend`. Vectors are widened to f32; matrices stay as stored. `progress` is told after
// each piece; when it says to stop: StateError.
ModelWeights load_weights(const StoreDirectory& store, Backend& backend, const Progress& progress = {});

}  // namespace moeflux
