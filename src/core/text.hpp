#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "core/check.hpp"

namespace crossdock {

/// Length in bytes of the UTF-8 character at the start of `text`; 0 if it is not valid UTF-8.
/// REQUIRES: text is not empty.
size_t utf8_length(std::string_view text);

/// The index of the item called `name`. name_of returns the name of an item. Throws
/// Error(kInvalidArgument), listing the valid names of a `what`, if there is none.
template <typename Item, size_t kNumItems, typename NameOf = std::identity>
size_t index_of_name(std::string_view what, std::string_view name,
                     const std::array<Item, kNumItems>& items, const NameOf& name_of = {}) {
  std::string known;
  for (size_t i = 0; i < kNumItems; ++i) {
    const std::string_view name_of_item = std::invoke(name_of, items[i]);
    if (name_of_item == name) return i;
    known.append(i == 0 ? "" : ", ").append(name_of_item);
  }
  throw Error(ErrorCode::kInvalidArgument,
              concat(what, " must be one of ", known, "; got \"", name, "\""));
}

}  // namespace crossdock
