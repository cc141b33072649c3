// Variant <-> the JSON text of moeflux.Variant.to_json().
#pragma once

#include <string_view>

#include "format/json.h"
#include "models/variant.h"

namespace moeflux {

// No single width may be larger, the vocabulary aside: products of two widths, an element size and a count then stay
// within int64.
constexpr int64_t max_width = int64_t{1} << 20;
constexpr int64_t max_vocab = int64_t{1} << 24;
constexpr int64_t max_product_width = int64_t{1} << 26;  // heads * head_dim and its like
constexpr int64_t max_experts = int64_t{1} << 16;
constexpr int64_t max_layers = 4096;

// Every field must be there, of its own type, and none besides.
Variant parse_variant(std::string_view text, std::string_view where = "variant");
Variant variant_from_json(const Json& json, std::string_view where);

// An object with every field, in the order of the struct.
Json variant_to_json(const Variant& variant);

// Throws a FormatError naming the field that breaks a rule.
void check_variant(const Variant& variant);

}  // namespace moeflux
