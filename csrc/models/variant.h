// The shape and flavours of one model: the twin of moeflux.Variant, field for field. Meanings are documented
// there. A Variant that comes from format/variant_json.h obeys every rule of `check_variant`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moeflux {

enum class ModelType { qwen3_5_moe, qwen3_next, qwen3_moe, deepseek_v3 };
enum class Attention { gqa, mla };
enum class RopeKind { vanilla, yarn };
enum class RouterKind { softmax, noaux_tc };
enum class SharedExpertKind { none, gated, plain };
enum class LayerKind { linear, full };
enum class MlpKind { dense, moe };

constexpr int64_t max_context_limit = int64_t{1} << 20;

struct Variant {
  std::string name;
  ModelType model_type = ModelType::qwen3_5_moe;

  Attention attention = Attention::gqa;
  RopeKind rope = RopeKind::vanilla;
  RouterKind router = RouterKind::softmax;
  SharedExpertKind shared_expert = SharedExpertKind::none;
  bool attention_gate = false;
  bool tied_embeddings = false;

  std::vector<LayerKind> layer_kinds;
  std::vector<MlpKind> mlp_kinds;

  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  double rms_norm_eps = 0;
  int64_t max_context = 0;

  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;
  double rope_theta = 0;

  int64_t linear_key_heads = 0;
  int64_t linear_value_heads = 0;
  int64_t linear_key_dim = 0;
  int64_t linear_value_dim = 0;
  int64_t conv_kernel = 0;

  int64_t q_lora_rank = 0;
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_dim = 0;
  int64_t qk_rope_dim = 0;
  int64_t v_head_dim = 0;

  int64_t num_experts = 0;
  int64_t experts_per_token = 0;
  int64_t moe_intermediate = 0;
  int64_t shared_intermediate = 0;
  int64_t dense_intermediate = 0;
  bool normalize_topk = true;
  int64_t num_groups = 0;
  int64_t groups_per_token = 0;
  double routed_scaling = 1;

  double yarn_factor = 0;
  int64_t yarn_original_context = 0;
  double yarn_beta_fast = 0;
  double yarn_beta_slow = 0;
  double yarn_mscale = 0;
  double yarn_mscale_all_dim = 0;

  std::vector<int64_t> eos_ids;
  int64_t bos_id = -1;
  int64_t think_start_id = -1;
  int64_t think_end_id = -1;

  std::vector<std::string> lossy;

  int64_t num_layers() const { return static_cast<int64_t>(layer_kinds.size()); }
  bool is_full(int64_t layer) const { return layer_kinds[static_cast<size_t>(layer)] == LayerKind::full; }
  bool is_moe(int64_t layer) const { return mlp_kinds[static_cast<size_t>(layer)] == MlpKind::moe; }

  int64_t linear_total_key() const { return linear_key_heads * linear_key_dim; }
  int64_t linear_total_value() const { return linear_value_heads * linear_value_dim; }
  int64_t conv_channels() const { return 2 * linear_total_key() + linear_total_value(); }
  int64_t kv_dim() const { return num_kv_heads * head_dim; }
  int64_t q_proj_out() const { return num_heads * head_dim * (attention_gate ? 2 : 1); }
  int64_t o_proj_in() const { return num_heads * (attention == Attention::mla ? v_head_dim : head_dim); }
  int64_t kv_a_out() const { return kv_lora_rank + qk_rope_dim; }
  int64_t kv_b_out() const { return num_heads * (qk_nope_dim + v_head_dim); }

  // f32 bytes of one linear layer's state: the convolution's last inputs, and [value head][value][key].
  int64_t conv_state_bytes() const { return conv_kernel > 1 ? (conv_kernel - 1) * conv_channels() * 4 : 0; }
  int64_t recurrent_state_bytes() const { return linear_value_heads * linear_value_dim * linear_key_dim * 4; }

  // n when exactly the layers n-1, 2n-1, ... are full; 0 when the pattern is another.
  int64_t full_attention_interval() const {
    int64_t interval = 0;
    for (int64_t i = 0; i < num_layers() && !interval; ++i)
      if (is_full(i)) interval = i + 1;
    for (int64_t i = 0; i < num_layers() && interval; ++i)
      if (is_full(i) != ((i + 1) % interval == 0)) interval = 0;
    return interval;
  }

  bool operator==(const Variant&) const = default;
};

}  // namespace moeflux
