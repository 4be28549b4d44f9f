#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "crossdock/testing/layer_worlds.hpp"

namespace crossdock::conformance {

/// A field of a LayerSpec, with its name in case files.
struct LayerField {
  std::string_view name;
  std::variant<int64_t*, uint64_t*, bool*, double*, DType*, Score*, GroupScore*, BalanceScope*,
               Activation*, WeightsIn*, DropPolicy*, PartialSums*, std::optional<bool>*,
               std::vector<int64_t>*, std::vector<int32_t>*>
      value;
};

/// The first fields are no options: E, K, D, F, dtype and seed.
inline constexpr size_t kNumSizes = 6;

/// All fields except `tokens`, in the order of case files.
CROSSDOCK_API std::vector<LayerField> fields_of(LayerSpec& spec);

/// A layer without options that has the tokens, dtype and seed of `spec`: in case files, fields
/// with these values are left out.
CROSSDOCK_API LayerSpec without_options(const LayerSpec& spec);

/// The names of the values of an enumeration's field, in their order; empty for other fields.
CROSSDOCK_API std::vector<std::string_view> names_of(const LayerField& field);
/// Sets an enumeration's field to the value with this number.
CROSSDOCK_API void set_number(const LayerField& field, size_t number);

/// The object "layer" of a case file, in one line.
CROSSDOCK_API std::string to_json(LayerSpec spec);

}  // namespace crossdock::conformance
