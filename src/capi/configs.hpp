#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <type_traits>

#include "core/check.hpp"
#include "crossdock/crossdock.h"
#include "crossdock/crossdock.hpp"

namespace crossdock::capi {

// Structs that begin with struct_size, from callers that were compiled against another version of
// the header. Fields that the caller's struct does not have are 0, which means their default.

/// No struct of any version is larger: a larger size means uninitialised memory.
inline constexpr size_t kMostStructBytes = 16384;

/// Whether a version of the struct can have this size.
inline bool is_struct_size(size_t size) {
  return size >= sizeof(size_t) && size <= kMostStructBytes && size % sizeof(size_t) == 0;
}

/// Throws unless the pointer and its struct_size can be used.
template <typename Struct>
void check_struct(const char* name, const Struct* given, size_t least_bytes = sizeof(size_t)) {
  static_assert(std::is_trivially_copyable_v<Struct> && sizeof(Struct) <= kMostStructBytes);
  static_assert(offsetof(Struct, struct_size) == 0 && sizeof(Struct) % sizeof(size_t) == 0);
  CROSSDOCK_CHECK(given != nullptr, name, " must not be NULL");
  const size_t size = given->struct_size;
  CROSSDOCK_CHECK(is_struct_size(size) && size >= least_bytes, name,
                  ": struct_size must be a multiple of ", sizeof(size_t), " from ", least_bytes,
                  " to ", kMostStructBytes, ", got ", size,
                  "; initialise the struct with its _INIT macro");
}

/// A copy of the caller's struct. A longer struct, of a later version, is accepted if all fields
/// unknown to this library are 0.
template <typename Struct>
Struct read_struct(const char* name, const Struct* given, size_t least_bytes = sizeof(size_t)) {
  check_struct(name, given, least_bytes);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  const size_t known = std::min(given->struct_size, sizeof(Struct));
  CROSSDOCK_CHECK(std::all_of(bytes + known, bytes + given->struct_size,
                              [](unsigned char byte) { return byte == 0; }),
                  name, " has fields beyond ", sizeof(Struct),
                  " bytes that this library does not know; use a newer library or leave them 0");
  Struct copy{};
  std::memcpy(&copy, bytes, known);
  return copy;
}

/// A struct with all defaults.
template <typename Struct>
Struct default_struct() {
  Struct made{};
  made.struct_size = sizeof(Struct);
  return made;
}

/// Like read_struct; a struct with all defaults for a null pointer.
template <typename Struct>
Struct read_optional(const char* name, const Struct* given) {
  return given != nullptr ? read_struct(name, given) : default_struct<Struct>();
}

/// A field of the caller's struct; null if the struct does not have it. REQUIRES: a checked struct.
template <typename Struct, typename Field>
Field* find_field(Struct* given, Field Struct::*field) {
  Field* const found = &(given->*field);
  const auto* begin = reinterpret_cast<const unsigned char*>(given);
  const auto* end = reinterpret_cast<const unsigned char*>(found + 1);
  return static_cast<size_t>(end - begin) <= given->struct_size ? found : nullptr;
}

/// Sets the caller's struct, except for its struct_size and the fields it does not have.
template <typename Struct>
void write_struct(const char* name, Struct* out, const Struct& value) {
  check_struct(name, out);
  constexpr size_t kHeader = sizeof(size_t);
  const size_t known = std::min(out->struct_size, sizeof(Struct));
  std::memcpy(reinterpret_cast<unsigned char*>(out) + kHeader,
              reinterpret_cast<const unsigned char*>(&value) + kHeader, known - kHeader);
}

// Convert the caller's configurations to the C++ API's. If a field has an undefined value, it gets
// its default and `refusal` says why, unless it is already set: a rank that threw would leave the
// others waiting in the first collective call. Consistency is checked where the values are used.

DispatchConfig to_config(const crossdock_dispatch_config& given, int64_t num_experts,
                         std::optional<Error>& refusal);
ExpertsConfig to_config(const crossdock_experts_config& given, std::optional<Error>& refusal);
RouterConfig to_config(const crossdock_router_config& given, std::optional<Error>& refusal);

/// For the first collective call.
inline void throw_if_set(const std::optional<Error>& refusal) {
  if (refusal) throw *refusal;
}

ExpertWeights to_weights(const char* name, const crossdock_expert_weights& given);
ExpertGradients to_gradients(const char* name, const crossdock_expert_gradients& given);

PartialSums to_partial_sums(int32_t value);

/// `value`, or the default if it is 0.
template <typename Number>
Number or_default(Number value, Number if_zero) {
  return value == 0 ? if_zero : value;
}

/// An enumeration's field, checked to be one of `num_values` values, numbered from 0 as in C++.
int checked_enum(const char* name, int32_t value, int num_values);

}  // namespace crossdock::capi
