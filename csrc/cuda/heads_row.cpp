// The heads of one row before attention: norms of queries and keys, their ropes, and the row that is kept.
#include "cuda/cuda_commands.h"

namespace moeflux::cuda {
namespace {

enum Ops : int { q_norm = 1, both_norms, q_rope, both_ropes, keys_kept };

bool lies_as(const HeadParams& norm, const RopeParams& rope) {
  return norm.x == rope.x && norm.heads == rope.heads && norm.head_stride == rope.head_stride;
}

}  // namespace

// Always: it is launched by itself if nothing follows.
bool CudaCommands::takes_head_norm(const HeadParams& params) {
  auto* waiting = std::get_if<HeadsRow>(&waiting_);
  if (waiting && waiting->count == q_norm && waiting->params.q.dim == params.dim && params.heads * params.dim > 0 &&
      params.head_stride == params.dim && params.x != waiting->params.q.x) {
    waiting->params.k = params;
    waiting->count = both_norms;
    return true;
  }
  if (takes_convolved_norm(params)) return true;
  if (params.dim > max_attention_dim) return false;
  HeadsRow row;
  row.params.q = params;
  row.count = q_norm;
  wait_with(std::move(row));
  return true;
}

bool CudaCommands::takes_rope(const RopeParams& params) {
  auto* waiting = std::get_if<HeadsRow>(&waiting_);
  if (!waiting || 2 * params.half_dim > waiting->params.q.dim) return false;
  HeadsRowParams& row = waiting->params;
  if (waiting->count == both_norms && lies_as(row.q, params)) {
    row.rope = params;
  } else if (waiting->count != q_rope || !lies_as(row.k, params) || row.rope.angles != params.angles ||
             row.rope.half_dim != params.half_dim || row.rope.interleaved != params.interleaved) {
    return false;
  }
  ++waiting->count;
  return true;
}

// With the row of values all is there.
bool CudaCommands::takes_row(const std::string& kernel, const AppendParams& params) {
  auto* waiting = std::get_if<HeadsRow>(&waiting_);
  if (!waiting || kernel == "append_codes") return false;
  HeadsRowParams& row = waiting->params;
  if (waiting->count == both_ropes) {
    if (params.x != row.k.x || params.width != row.k.heads * row.k.dim) return false;
    row.keys = params;
    waiting->append = kernel;
    waiting->count = keys_kept;
    return true;
  }
  if (waiting->count != keys_kept || kernel != waiting->append || params.width % row.q.dim != 0) return false;
  const float* end = params.x + params.width;
  const bool meets_q = row.q.x < end && params.x < row.q.x + row.q.heads * row.q.head_stride;
  const bool meets_k = row.k.x < end && params.x < row.k.x + row.k.heads * row.k.head_stride;
  if (meets_q || meets_k) return false;
  row.values = params;
  const HeadsRowParams all = row;
  waiting_ = std::monostate();
  by_heads(kernel == "append_f32" ? "heads_row_f32" : "heads_row_bf16", all,
           int64_t{all.q.heads} + all.k.heads + all.values.width / all.q.dim);
  return true;
}

// What has come, one by one.
void CudaCommands::launch_heads(const HeadsRow& heads) {
  const HeadsRowParams& row = heads.params;
  by_heads("rms_norm_heads", row.q, row.q.heads);
  if (heads.count >= both_norms) by_heads("rms_norm_heads", row.k, row.k.heads);
  const auto turn = [&](const HeadParams& of) {
    RopeParams rope = row.rope;
    rope.x = of.x;
    rope.row_stride = of.row_stride;
    rope.head_stride = of.head_stride;
    rope.heads = of.heads;
    flat("rope", rope, int64_t{rope.half_dim} * rope.heads);
  };
  if (heads.count >= q_rope) turn(row.q);
  if (heads.count >= both_ropes) turn(row.k);
  if (heads.count >= keys_kept) append_rows(heads.append, row.keys);
}

}  // namespace moeflux::cuda
