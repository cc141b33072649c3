#include "engine/scratch.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/rounding.h"

namespace moeflux {
namespace {

constexpr int64_t view_alignment = 64;
constexpr int64_t most_logit_rows = 16;

// Hands out places first, memory when the sum is known.
class Layout {
 public:
  void place(View& view, int64_t elements) {
    places_.emplace_back(&view, end_);
    end_ += round_up(elements * 4, view_alignment);
  }

  int64_t bytes() const { return end_; }

  std::unique_ptr<Buffer> allocate(Backend& backend) {
    std::unique_ptr<Buffer> arena = backend.allocate(end_, "scratch");
    for (auto& [view, offset] : places_) *view = {arena.get(), offset};
    return arena;
  }

 private:
  std::vector<std::pair<View*, int64_t>> places_;
  int64_t end_ = 0;
};

void place_linear(Layout& layout, Scratch& s, const Variant& v, int64_t n) {
  layout.place(s.qkv, n * v.conv_channels());
  layout.place(s.convolved, n * v.conv_channels());
  layout.place(s.z, n * v.linear_total_value());
  for (View* view : {&s.alpha, &s.b, &s.decay, &s.beta}) layout.place(*view, n * v.linear_value_heads);
}

void place_attention(Layout& layout, Scratch& s, const Variant& v, int64_t n) {
  layout.place(s.q, n * v.q_proj_out());
  if (v.attention == Attention::gqa) {
    layout.place(s.k, n * v.kv_dim());
    layout.place(s.v, n * v.kv_dim());
    return;
  }
  layout.place(s.q_low, n * v.q_lora_rank);
  layout.place(s.kv, n * v.kv_a_out());
  layout.place(s.q_latent, n * v.num_heads * v.kv_lora_rank);
  layout.place(s.latents, n * v.num_heads * v.kv_lora_rank);
}

void place_feed_forward(Layout& layout, Scratch& s, const Variant& v, int64_t n) {
  const int64_t widest = std::max(v.dense_intermediate, v.shared_intermediate);
  layout.place(s.gate, n * widest);
  layout.place(s.up, n * widest);
  layout.place(s.shared, n * v.hidden_size);
  layout.place(s.shared_gate, n);
  const int64_t pairs = n * v.experts_per_token;
  layout.place(s.router, n * v.num_experts);
  layout.place(s.ids, pairs);
  layout.place(s.weights, pairs);
  layout.place(s.expert_scratch, pairs * 2 * v.moe_intermediate);
  layout.place(s.expert_out, pairs * v.hidden_size);
  const int64_t guess_rows = std::min(n, most_guess_rows);
  layout.place(s.guess_normed, guess_rows * v.hidden_size);
  layout.place(s.guess_router, guess_rows * v.num_experts);
  layout.place(s.guess_ids, guess_rows * v.experts_per_token);
  layout.place(s.guess_weights, guess_rows * v.experts_per_token);
}

void place_all(Layout& layout, Scratch& s, const Variant& v, int64_t rows) {
  s.rows = rows;
  s.logit_rows = std::min(rows, most_logit_rows);
  layout.place(s.tokens, rows);
  layout.place(s.angles, rows * v.rotary_dim);
  for (View* view : {&s.hidden, &s.normed, &s.out}) layout.place(*view, rows * v.hidden_size);
  layout.place(s.mixed, rows * std::max(v.o_proj_in(), v.linear_total_value()));
  place_linear(layout, s, v, rows);
  place_attention(layout, s, v, rows);
  place_feed_forward(layout, s, v, rows);
  layout.place(s.logits, s.logit_rows * v.vocab_size);
}

}  // namespace

int64_t scratch_bytes(const Variant& variant, int64_t rows) {
  Scratch scratch;
  Layout layout;
  place_all(layout, scratch, variant, rows);
  return layout.bytes();
}

Scratch make_scratch(const Variant& variant, int64_t rows, Backend& backend) {
  Scratch scratch;
  Layout layout;
  place_all(layout, scratch, variant, rows);
  scratch.arena = layout.allocate(backend);
  return scratch;
}

}  // namespace moeflux
