// Options that are one of a few words: as values in C++, as words on command lines, in Python and in messages.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/text.h"

namespace moeflux {

// How precise the activations are in products with quantised matrices, and in attention over bf16 rows. Automatic:
// activations have 16 bits, and each group of columns that shares a scale has a unit of its own, if the CPU has
// instructions for that. In attention, queries and weights are each a sum of two bf16 numbers if the CPU has AMX.
// Elsewhere they are f32. Exact: f32 everywhere.
enum class Precision { automatic, exact };

// How experts are read: past the page cache, or through it. Automatic: as `chosen_reads` says.
enum class Reads { automatic, direct, buffered };

// Which expert goes when a slot is needed: the one unused for longest, the one used least often, or every one as soon
// as nobody holds it.
enum class CachePolicy { lru, lfu, none };

// Reading what the next layer may need while this one computes. Automatic: while it pays.
enum class LookAhead { automatic, on, off };

// Experts that lie in the host's memory, beside a device with memory of its own: whether the CPU computes them there.
// Automatic: where it has one done before it could be moved, as many as it has done by the time that the others are.
enum class CpuExperts { off, automatic, all };

// Drafts: likely next tokens that are evaluated together with the one before them. Lookup: what followed the last
// tokens where they stood before in the text. Mtp: what the model's own layer for that says (multi-token prediction).
// Automatic: that, or lookup for a model without it, while tokens come faster with drafts.
enum class Speculate { off, automatic, lookup, mtp };

template <typename Choice>
struct Named {
  std::string_view name;
  Choice choice;
};

inline constexpr Named<Precision> precision_names[] = {{"auto", Precision::automatic}, {"exact", Precision::exact}};
inline constexpr Named<Reads> reads_names[] = {
    {"auto", Reads::automatic}, {"direct", Reads::direct}, {"buffered", Reads::buffered}};
inline constexpr Named<CachePolicy> cache_policy_names[] = {
    {"lru", CachePolicy::lru}, {"lfu", CachePolicy::lfu}, {"none", CachePolicy::none}};
inline constexpr Named<LookAhead> look_ahead_names[] = {
    {"auto", LookAhead::automatic}, {"on", LookAhead::on}, {"off", LookAhead::off}};
inline constexpr Named<CpuExperts> cpu_experts_names[] = {
    {"off", CpuExperts::off}, {"auto", CpuExperts::automatic}, {"all", CpuExperts::all}};
inline constexpr Named<Speculate> speculate_names[] = {
    {"off", Speculate::off}, {"auto", Speculate::automatic}, {"lookup", Speculate::lookup}, {"mtp", Speculate::mtp}};

constexpr std::span<const Named<Precision>> names_of(Precision) { return precision_names; }
constexpr std::span<const Named<Reads>> names_of(Reads) { return reads_names; }
constexpr std::span<const Named<CachePolicy>> names_of(CachePolicy) { return cache_policy_names; }
constexpr std::span<const Named<LookAhead>> names_of(LookAhead) { return look_ahead_names; }
constexpr std::span<const Named<CpuExperts>> names_of(CpuExperts) { return cpu_experts_names; }
constexpr std::span<const Named<Speculate>> names_of(Speculate) { return speculate_names; }

template <typename Choice>
std::string_view name_of(Choice choice) {
  for (const auto& [name, value] : names_of(choice))
    if (value == choice) return name;
  return "";
}

// The choice of that word. If there is none, the ArgumentError names `what` and the words that there are.
template <typename Choice>
Choice choice_of(std::string_view what, std::string_view word) {
  std::string expected;
  for (const auto& [name, choice] : names_of(Choice{})) {
    if (name == word) return choice;
    expected += concat(expected.empty() ? "" : ", ", name);
  }
  throw ArgumentError(concat(what, ": expected one of ", expected, ", found ", in_quotes(word)));
}

}  // namespace moeflux
