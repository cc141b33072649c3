// The heads of one row before attention: norms of queries and keys, their ropes, and the row that is kept.
#include <algorithm>
#include <cstring>
#include <utility>

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
  by_heads("rms_norm_heads", row.q, int64_t{row.q.heads} * row.q.n);
  if (heads.count >= both_norms) by_heads("rms_norm_heads", row.k, int64_t{row.k.heads} * row.k.n);
  const auto turn = [&](const HeadParams& of) {
    RopeParams rope = row.rope;
    rope.x = of.x;
    rope.row_stride = of.row_stride;
    rope.head_stride = of.head_stride;
    rope.heads = of.heads;
    flat("rope", rope, int64_t{rope.half_dim} * rope.heads * rope.n);
  };
  if (heads.count >= q_rope) turn(row.q);
  if (heads.count >= both_ropes) turn(row.k);
  if (heads.count >= keys_kept) append_rows(heads.append, row.keys);
}

// ---- Some rows, each of another session -----------------------------------------------------------------------------

bool CudaCommands::takes_rows_head_norm(const HeadParams& norm) {
  auto* waiting = std::get_if<RowsAppended>(&waiting_);
  if (waiting && waiting->heads.count == q_norm && waiting->heads.params.q.dim == norm.dim &&
      waiting->heads.params.q.n == norm.n && norm.heads * norm.dim > 0 && norm.head_stride == norm.dim &&
      norm.x != waiting->heads.params.q.x) {
    waiting->heads.params.k = norm;
    waiting->heads.count = both_norms;
    return true;
  }
  if (norm.dim > max_attention_dim || norm.n > many_rows) return false;
  RowsAppended rows;
  rows.heads.params.q = norm;
  rows.heads.count = q_norm;
  wait_with(std::move(rows));
  return true;
}

bool CudaCommands::takes_rows_rope(const RopeParams& params) {
  auto* waiting = std::get_if<RowsAppended>(&waiting_);
  if (!waiting) return false;
  HeadsRow& heads = waiting->heads;
  HeadsRowParams& row = heads.params;
  if (2 * params.half_dim > row.q.dim || params.n != row.q.n) return false;
  if (heads.count == both_norms && lies_as(row.q, params) && row.q.row_stride == params.row_stride) {
    row.rope = params;
  } else if (heads.count != q_rope || !lies_as(row.k, params) || row.k.row_stride != params.row_stride ||
             row.rope.angles != params.angles || row.rope.half_dim != params.half_dim ||
             row.rope.interleaved != params.interleaved) {
    return false;
  }
  ++heads.count;
  return true;
}

// Keys of all sessions, then their values. One launch has all of it when the last has come.
bool CudaCommands::takes_rows_append(const std::string& kernel, const AppendParams& params) {
  auto* waiting = std::get_if<RowsAppended>(&waiting_);
  if (!waiting || kernel == "append_codes") return false;
  HeadsRow& heads = waiting->heads;
  HeadsRowParams& row = heads.params;
  const bool is_key = heads.count == both_ropes;
  if (!is_key && (heads.count != keys_kept || kernel != heads.append)) return false;
  std::vector<const CachedRows*>& sessions = is_key ? waiting->keys : waiting->values;
  if (std::ranges::find(sessions, params.rows) != sessions.end()) return false;
  if (sessions.empty()) {
    if (is_key) {
      if (params.x != row.k.x || params.width != row.k.heads * row.k.dim || params.x_stride != row.k.row_stride)
        return false;
      heads.append = kernel;
      row.keys = params;
    } else {
      const int64_t end = int64_t{row.q.n} * params.x_stride;
      if (params.width % row.q.dim != 0 || meet(params.x, end, row.q.x, int64_t{row.q.n} * row.q.row_stride) ||
          meet(params.x, end, row.k.x, int64_t{row.q.n} * row.k.row_stride))
        return false;
      row.values = params;
    }
  } else {
    AppendParams next = is_key ? row.keys : row.values;
    next.x += sessions.size() * next.x_stride;
    next.rows = params.rows;
    if (kernel != heads.append || std::memcmp(&next, &params, sizeof next) != 0) return false;
  }
  sessions.push_back(params.rows);
  if (sessions.size() < row.q.n) return true;
  if (is_key) {
    heads.count = keys_kept;
    return true;
  }
  const RowsAppended all = std::move(*waiting);
  waiting_ = std::monostate();
  HeadsRowParams own = all.heads.params;
  own.keys.sessions = list_of(all.keys);
  own.values.sessions = list_of(all.values);
  const int64_t count = int64_t{own.q.heads} + own.k.heads + own.values.width / own.q.dim;
  launch(all.heads.append == "append_f32" ? "heads_row_f32" : "heads_row_bf16", {divide_up(count, head_warps), own.q.n},
         head_warps * lanes, own);
  return true;
}

void CudaCommands::launch_rows_appended(const RowsAppended& rows) {
  HeadsRow heads = rows.heads;
  heads.count = std::min<int>(heads.count, both_ropes);
  launch_heads(heads);
  const auto append = [&](AppendParams params, const std::vector<const CachedRows*>& sessions) {
    if (sessions.empty()) return;
    params.sessions = list_of(sessions);
    params.n = static_cast<uint32_t>(sessions.size());
    append_rows(rows.heads.append, params);
  };
  append(heads.params.keys, rows.keys);
  append(heads.params.values, rows.values);
}

}  // namespace moeflux::cuda
