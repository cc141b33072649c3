// Products of warpgroups: each thread computes its own sums, as late as it may, of what shared memory has then.
#include <algorithm>

#include "execution.h"

namespace emulator {

constexpr int garbage = 0x55555555;  // nobody may use sums that are not there

// Lane 4 g + t has rows g and g + 8, and columns 2 t and 2 t + 1 of each fragment.
static void multiply(const Product& product, uint32_t lane) {
  for (uint32_t f = 0; f < product.fragments; ++f)
    for (uint32_t i = 0; i < 4; ++i) {
      const auto* column =
          reinterpret_cast<const int8_t*>(product.columns) + f * product.apart + (lane % 4 * 2 + i % 2) * 16;
      const uint8_t* row = product.rows[i / 2];
      int sum = 0;
      for (uint32_t k = 0; k < 16; ++k) sum += row[k] * column[k] + row[16 + k] * column[128 + k];
      product.sums[f][i] = product.more ? product.sums[f][i] + sum : sum;
    }
}

// Eight lanes read the same columns. Each says so of an eighth.
static void check(Execution& execution, const Product& product, uint32_t lane, const void* site) {
  const uint32_t g = lane / 4, t = lane % 4, place = g / 4 * 128 + (t * 2 + g / 2 % 2) * 16 + g % 2 * 8;
  for (uint32_t f = 0; f < product.fragments; ++f)
    execution.checker.access(execution, {reinterpret_cast<uintptr_t>(product.columns) + f * product.apart + place, 8,
                                         false, false, false, site, true});
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void msl_begin_products() { of_this_fiber().of_running().has_begun_products = true; }

void msl_end_products() {
  Later& later = of_this_fiber().of_running();
  later.has_begun_products = false;
  ++later.product_groups;
}

// The lanes have just met, each with its sixteen bytes of a. A place is in the lower 48 bits of `columns`, and in the
// upper ones by how many times sixteen bytes eight columns are apart.
void msl_multiply_later(int (*sums)[4], uint32_t fragments, bool more, uint64_t columns) {
  Execution& execution = of_this_fiber();
  const Thread& thread = *execution.running;
  Later& later = execution.of_running();
  const Snapshot& met = execution.snapshots[thread.simdgroup];
  const void* site = __builtin_return_address(0);
  if (met.mask != ~0u) execution.problem(__LINE__, site, "a product of a warp with inactive lanes");
  if (!later.has_begun_products) execution.problem(__LINE__, site, "a product that begin_products does not precede");
  if (columns % 16) execution.problem(__LINE__, site, "columns that are not aligned to sixteen bytes");
  Product product = {.sums = sums,
                     .columns = reinterpret_cast<const uint8_t*>(columns << 16 >> 16),
                     .apart = static_cast<uint32_t>(columns >> 48 << 4),
                     .fragments = fragments,
                     .group = later.product_groups,
                     .more = more};
  for (uint32_t t = 0; t < 4; ++t)
    for (uint32_t word = 0; word < 4; ++word)
      std::copy_n(met.value[thread.lane / 4 * 4 + t] + word * 4, 4, product.rows[word % 2] + word / 2 * 16 + t * 4);
  later.products.push_back(product);
  if (!more)
    for (uint32_t f = 0; f < fragments; ++f) std::fill_n(sums[f], 4, garbage);
}

// Until no more than `still` groups of products are under way.
void msl_await_products(uint32_t still) {
  Execution& execution = of_this_fiber();
  Later& later = execution.of_running();
  const uint32_t lane = execution.running->lane;
  while (!later.products.empty() && later.products.front().group + still < later.product_groups) {
    if (execution.options.check) check(execution, later.products.front(), lane, __builtin_return_address(0));
    multiply(later.products.front(), lane);
    later.products.pop_front();
  }
}

// What the thread has written before is for products, too.
void msl_show_copies() { ++of_this_fiber().running->clock.shown; }

void msl_may_be_anything(const void* place, uint32_t bytes) {
  Execution& execution = of_this_fiber();
  if (execution.options.check) execution.checker.forgive(place, bytes);
}

}  // extern "C"
