#include "backend/cpu_commands.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"

namespace moeflux {
namespace {

float* head_of(const Heads& x, int64_t row, int64_t head) {
  return x.view.f32() + row * x.row_stride + head * x.head_stride;
}

const float* row_of(const View& view, int64_t offset) { return view.f32() + offset; }

}  // namespace

CpuCommands::Room CpuCommands::Room::of(const WorkSizes& sizes) {
  cpu::TopKTask top_k;
  top_k.count = sizes.logits;
  top_k.k = std::min(sizes.picks, sizes.logits);
  // The same for every instruction set, whichever is chosen.
  const cpu::Isa& isa = cpu::available_isas().front();
  return {sizes.value_dim ? cpu::attention_scratch_bound(sizes.value_dim) : 0,
          isa.kernels->route.top_k_scratch(top_k),
          sizes.products,
          sizes.rows,
          isa.int16 ? sizes.group_sizes * Int16Rows::bytes_for(sizes.inputs, sizes.input_rows, sizes.group) : 0,
          sizes.rows ? sizes.pairs / sizes.rows : 0,
          sizes.row_blocks};
}

int64_t CpuCommands::Room::bytes() const { return planned_bytes<Lists>(*this) + Int16Rows::held_for(int16, products); }

int64_t CpuCommands::prepare(const WorkSizes& sizes) {
  const Room room = Room::of(sizes);
  reserve_lists(lists_, room);
  lists_.attention.resize(static_cast<size_t>(room.attention));
  lists_.candidates.resize(static_cast<size_t>(room.candidates));
  int16_rows_.reserve(room.int16, room.products);
  return held_bytes(lists_, room) + int16_rows_.held();
}

// ---- Elementwise ---------------------------------------------------------------------------------------------------

void CpuCommands::embed(const Matrix& table, View ids, View out, int64_t n) {
  op("embed", [&] {
    const cpu::Weights weights = weights_of(table);
    spread(n, table.columns, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        kernels_.matmul.dequantize(weights, ids.i32()[i], out.f32() + i * table.columns);
    });
  });
}

void CpuCommands::rms_norm(View x, View weight, View out, int64_t n, int64_t width, float eps) {
  op("rms_norm", [&] {
    spread(n, width, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        kernels_.elementwise.rms_norm(x.f32() + i * width, weight.f32(), out.f32() + i * width, width, eps, 1.0f);
    });
  });
}

void CpuCommands::rms_norm_heads(const Heads& x, View weight, int64_t n, float eps, float scale) {
  op("rms_norm_heads", [&] {
    const float* factors = weight ? weight.f32() : nullptr;
    for_heads(x, n, x.dim, [&](int64_t row, int64_t head) {
      float* numbers = head_of(x, row, head);
      kernels_.elementwise.rms_norm(numbers, factors, numbers, x.dim, eps, scale);
    });
  });
}

void CpuCommands::layer_norm(View x, View weight, View bias, int64_t n, int64_t width, float eps) {
  op("layer_norm", [&] {
    spread(n, 2 * width, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        kernels_.elementwise.layer_norm(x.f32() + i * width, weight.f32(), bias.f32(), width, eps);
    });
  });
}

void CpuCommands::gated_rms_norm(const Heads& x, const Heads& z, View weight, int64_t n, float eps) {
  op("gated_rms_norm", [&] {
    for_heads(x, n, 2 * x.dim, [&](int64_t row, int64_t head) {
      kernels_.elementwise.gated_rms_norm(head_of(x, row, head), head_of(z, row, head), weight.f32(), x.dim, eps);
    });
  });
}

void CpuCommands::rope(const Heads& x, View angles, int64_t half, bool interleaved, int64_t n) {
  op("rope", [&] {
    for_heads(x, n, 4 * half, [&](int64_t row, int64_t head) {
      kernels_.elementwise.rope(head_of(x, row, head), angles.f32() + row * half * 2, half, interleaved);
    });
  });
}

void CpuCommands::append(View x, int64_t x_stride, const Cache& cache, int64_t first, int64_t n) {
  op("append", [&] {
    const int64_t row_bytes = cache.row_bytes();
    spread(n, cache.width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end;) {
        const int64_t in_block = (first + i) % cache.rows();
        std::byte* block = cache.blocks[static_cast<size_t>((first + i) / cache.rows())].bytes();
        std::byte* to = block + cache.offset + in_block * row_bytes;
        uint16_t* scales = reinterpret_cast<uint16_t*>(block + cache.scales_offset()) + in_block;
        for (const int64_t last = std::min(end, i + cache.rows() - in_block); i < last;
             ++i, to += row_bytes, ++scales) {
          const float* from = x.f32() + i * x_stride;
          if (cache.dtype == DType::i8)
            for (int64_t head = 0; head < cache.scales(); ++head)
              scales[head * cache.rows()] = kernels_.elementwise.to_codes(
                  from + head * cache.head, reinterpret_cast<int8_t*>(to) + head * cache.head, cache.head);
          else if (cache.dtype == DType::bf16)
            kernels_.elementwise.to_bf16(from, reinterpret_cast<uint16_t*>(to), cache.width);
          else
            std::memcpy(to, from, static_cast<size_t>(row_bytes));
        }
      }
    });
  });
}

void CpuCommands::swiglu(View gate, View up, View out, int64_t count) {
  op("swiglu", [&] {
    spread(count, 4, [&](int64_t first, int64_t last) {
      kernels_.elementwise.swiglu(gate.f32() + first, up.f32() + first, out.f32() + first, last - first);
    });
  });
}

void CpuCommands::geglu(View gate, View up, View out, int64_t count) {
  op("geglu", [&] {
    spread(count, 4, [&](int64_t first, int64_t last) {
      kernels_.elementwise.geglu(gate.f32() + first, up.f32() + first, out.f32() + first, last - first);
    });
  });
}

void CpuCommands::residual_add(View x, View y, View out, int64_t count) {
  op("residual_add", [&] {
    spread(count, 1, [&](int64_t first, int64_t last) {
      kernels_.elementwise.residual_add(x.f32() + first, y.f32() + first, out.f32() + first, last - first);
    });
  });
}

void CpuCommands::bias_add(View x, View bias, int64_t n, int64_t width) {
  op("bias_add", [&] {
    spread(n, width, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        kernels_.elementwise.residual_add(x.f32() + i * width, bias.f32(), x.f32() + i * width, width);
    });
  });
}

void CpuCommands::scale(View x, float factor, int64_t count) {
  op("scale", [&] {
    spread(count, 1,
           [&](int64_t first, int64_t last) { kernels_.elementwise.scale(x.f32() + first, factor, last - first); });
  });
}

void CpuCommands::soft_cap(View x, float cap, int64_t count) {
  op("soft_cap", [&] {
    spread(count, 4,
           [&](int64_t first, int64_t last) { kernels_.elementwise.soft_cap(x.f32() + first, cap, last - first); });
  });
}

void CpuCommands::silu(View x, float factor, int64_t count) {
  op("silu", [&] {
    spread(count, 4, [&](int64_t first, int64_t last) { kernels_.hyper.silu(x.f32() + first, factor, last - first); });
  });
}

// ---- Residual streams ----------------------------------------------------------------------------------------------

void CpuCommands::hyper_norm(View x, View weight, View out, int64_t n, int64_t streams, int64_t width, float eps) {
  op("hyper_norm", [&] {
    spread(n * streams, width, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        kernels_.elementwise.rms_norm(x.f32() + i * width, weight.f32() + i % streams * width, out.f32() + i * width,
                                      width, eps, 1.0f);
    });
  });
}

void CpuCommands::hyper_mix(const HyperMixArgs& args, int64_t n) {
  op("hyper_mix", [&] {
    const int64_t row_numbers = args.streams * args.width;
    // The columns of all rows are divided together, so that one long row is divided too.
    spread(n * args.width, 5 * args.streams, [&](int64_t first, int64_t last) {
      for (int64_t end = first; first < last; first = end) {
        const int64_t row = first / args.width;
        end = std::min(last, (row + 1) * args.width);
        kernels_.hyper.hyper_mix(row_of(args.normed, row * row_numbers), row_of(args.gates, row * row_numbers),
                                 args.out.f32() + row * args.width, args.streams, args.width, first - row * args.width,
                                 end - row * args.width);
      }
    });
  });
}

void CpuCommands::hyper_add(const HyperAddArgs& args, int64_t n) {
  op("hyper_add", [&] {
    const auto share = static_cast<float>(args.streams);
    spread(n * args.streams, args.width, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        kernels_.hyper.hyper_add(args.x.f32() + i * args.width, row_of(args.y, i / args.streams * args.width),
                                 args.gates.f32()[i] / share, args.width);
    });
  });
}

void CpuCommands::ngram_gate(const NgramGateArgs& args, int64_t n) {
  op("ngram_gate", [&] {
    spread(n * args.streams, 2 * args.width, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        kernels_.hyper.ngram_gate(row_of(args.key, i * args.width), row_of(args.query, i * args.width),
                                  row_of(args.value, i / args.streams * args.width), args.out.f32() + i * args.width,
                                  args.width);
    });
  });
}

// ---- Gates and sums ------------------------------------------------------------------------------------------------

void CpuCommands::sigmoid_gate(const Heads& x, const Heads& gate, int64_t n) {
  op("sigmoid_gate", [&] {
    for_heads(x, n, 4 * x.dim, [&](int64_t row, int64_t head) {
      kernels_.elementwise.sigmoid_gate(head_of(x, row, head), head_of(gate, row, head), x.dim);
    });
  });
}

void CpuCommands::combine(const CombineArgs& args, int64_t n) {
  op("combine", [&] {
    const int64_t hidden = args.hidden;
    // The numbers of all rows are divided together, so that one long row is divided too.
    spread(n * hidden, args.k + 2, [&](int64_t first, int64_t last) {
      while (first < last) {
        const int64_t row = first / hidden;
        const int64_t column = first % hidden;
        const int64_t end = std::min(hidden, column + last - first);
        kernels_.elementwise.combine(args.residual ? row_of(args.residual, row * hidden) : nullptr,
                                     row_of(args.outputs, row * args.k * hidden), row_of(args.weights, row * args.k),
                                     args.k, hidden, args.shared ? row_of(args.shared, row * hidden) : nullptr,
                                     args.shared_gate ? row_of(args.shared_gate, row) : nullptr,
                                     args.out.f32() + row * hidden, column, end);
        first += end - column;
      }
    });
  });
}

void CpuCommands::copy(View from, View to, int64_t bytes) {
  op("copy", [&] {
    spread(bytes, 1, [&](int64_t first, int64_t last) {
      std::memcpy(to.bytes() + first, from.bytes() + first, static_cast<size_t>(last - first));
    });
  });
}

// ---- Attention, delta net, routing ---------------------------------------------------------------------------------

const cpu::AttentionKernels& CpuCommands::kernels_of(const cpu::AttentionTask& task) const {
  if (tiled_attention_ && cpu::fits_tiles(task)) return *tiled_attention_;
  if (code_attention_ && cpu::fits_codes(task)) return *code_attention_;
  return kernels_.attention;
}

void CpuCommands::run_attention(cpu::AttentionTask& task, const Cache& rows) {
  static_assert(cpu::cached_block == block_rows);
  task.blocks = blocks_of(rows, task.first_position + task.rows);
  task.kind = kind_of(rows);
  const cpu::AttentionKernels& kernels = kernels_of(task);
  if (kernels.scratch(task) > static_cast<int64_t>(lists_.attention.size()))
    lists_.attention.resize(static_cast<size_t>(cpu::attention_scratch_bound(task.dim)));
  task.scratch = lists_.attention.data();
  pool_.parallel(kernels.units(task), [&](int64_t unit) { kernels.run(task, unit); });
  pool_.parallel(kernels.merge_units(task), [&](int64_t unit) { kernels.merge(task, unit); });
}

void CpuCommands::attention(const AttentionArgs& args, int64_t n) {
  op("attention", [&] {
    cpu::AttentionTask task;
    task.q = args.q.view.f32();
    task.q_row_stride = args.q.row_stride;
    task.q_head_stride = args.q.head_stride;
    task.k_offset = args.k.offset;
    task.v_offset = args.v.offset;
    task.rows = n;
    task.heads = args.q.heads;
    task.kv_heads = args.kv_heads;
    task.dim = args.q.dim;
    task.first_position = args.first_position;
    task.window = args.window;
    task.scale = args.scale;
    task.sinks = args.sinks ? args.sinks.f32() : nullptr;
    task.out = args.out.f32();
    run_attention(task, args.k);
  });
}

void CpuCommands::mla_attention(const LatentAttentionArgs& args, int64_t n) {
  op("mla_attention", [&] {
    cpu::AttentionTask task;
    task.q = args.q_latent.view.f32();
    task.q_row_stride = args.q_latent.row_stride;
    task.q_head_stride = args.q_latent.head_stride;
    task.q_pe = args.q_pe.view.f32();
    task.q_pe_row_stride = args.q_pe.row_stride;
    task.q_pe_head_stride = args.q_pe.head_stride;
    task.k_offset = args.latent.offset;
    task.v_offset = task.k_offset;
    task.pe_offset = args.k_pe.offset;
    task.rows = n;
    task.heads = args.q_latent.heads;
    task.kv_heads = 1;
    task.dim = args.q_latent.dim;
    task.pe_dim = args.q_pe.dim;
    task.first_position = args.first_position;
    task.scale = args.scale;
    task.out = args.out.f32();
    run_attention(task, args.latent);
  });
}

void CpuCommands::conv1d(const ConvArgs& args, int64_t n) {
  op("conv1d", [&] {
    const cpu::ConvTask task{args.x.f32(),  args.state.f32(), args.weight.f32(), args.out.f32(), n,
                             args.channels, args.taps,        args.dilation};
    pool_.parallel(kernels_.delta.conv1d_units(task), [&](int64_t unit) { kernels_.delta.conv1d(task, unit); });
  });
}

void CpuCommands::delta_gates(const DeltaGatesArgs& args, int64_t n) {
  op("delta_gates", [&] {
    const cpu::DeltaGatesTask task{
        args.alpha.f32(), args.b.f32(), args.a_log.f32(), args.dt_bias.f32(), args.decay.f32(), args.beta.f32(), n,
        args.heads};
    pool_.parallel(kernels_.delta.delta_gates_units(task),
                   [&](int64_t unit) { kernels_.delta.delta_gates(task, unit); });
  });
}

void CpuCommands::gated_delta(const DeltaArgs& args, int64_t n) {
  op("gated_delta", [&] {
    cpu::DeltaTask task;
    task.q = args.q.view.f32();
    task.q_row_stride = args.q.row_stride;
    task.q_head_stride = args.q.head_stride;
    task.k = args.k.view.f32();
    task.k_row_stride = args.k.row_stride;
    task.k_head_stride = args.k.head_stride;
    task.v = args.v.view.f32();
    task.v_row_stride = args.v.row_stride;
    task.v_head_stride = args.v.head_stride;
    task.decay = args.decay.f32();
    task.beta = args.beta.f32();
    task.state = args.state.f32();
    task.out = args.out.f32();
    task.rows = n;
    task.key_heads = args.k.heads;
    task.value_heads = args.v.heads;
    task.neighbours = args.neighbours();
    task.key_dim = args.k.dim;
    task.value_dim = args.v.dim;
    pool_.parallel(kernels_.delta.gated_delta_units(task),
                   [&](int64_t unit) { kernels_.delta.gated_delta(task, unit); });
  });
}

namespace {

cpu::RouteTask route_task(const RouteArgs& args, int64_t n) {
  cpu::RouteTask task;
  task.logits = args.logits.f32();
  task.rows = n;
  task.experts = args.experts;
  task.k = args.k;
  task.normalize = args.normalize;
  task.scaling = args.scaling;
  task.bias = args.bias ? args.bias.f32() : nullptr;
  task.factors = args.factors ? args.factors.f32() : nullptr;
  task.groups = args.groups;
  task.groups_kept = args.groups_kept;
  task.ids = args.ids.i32();
  task.weights = args.weights.f32();
  return task;
}

}  // namespace

void CpuCommands::route_softmax(const RouteArgs& args, int64_t n) {
  op("route_softmax", [&] {
    const cpu::RouteTask task = route_task(args, n);
    spread(n, 8 * args.experts, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) kernels_.route.route_softmax(task, row);
    });
  });
}

void CpuCommands::route_grouped(const RouteArgs& args, int64_t n) {
  op("route_grouped", [&] {
    const cpu::RouteTask task = route_task(args, n);
    spread(n, 8 * args.experts, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) kernels_.route.route_grouped(task, row);
    });
  });
}

void CpuCommands::top_k(View logits, int64_t count, int64_t k, View ids, View values) {
  op("top_k", [&] {
    cpu::TopKTask task;
    task.logits = logits.f32();
    task.count = count;
    task.k = k;
    task.ids = ids.i32();
    task.values = values.f32();
    const size_t needed = static_cast<size_t>(kernels_.route.top_k_scratch(task));
    if (needed > lists_.candidates.size()) lists_.candidates.resize(needed);
    task.scratch = lists_.candidates.data();
    pool_.parallel(kernels_.route.top_k_units(task), [&](int64_t unit) { kernels_.route.top_k(task, unit); });
    kernels_.route.top_k_merge(task);
  });
}

}  // namespace moeflux
