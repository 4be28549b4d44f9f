#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace crossdock::cli {

/// The name that was probably meant: one that begins with the word, else one that contains it, else
/// one that differs from it by a typing error or two. Empty if none is close.
std::string closest_name(std::string_view word, const std::vector<std::string>& names);

/// "; did you mean \"direct\"?", or nothing if no name is close.
std::string suggestion(std::string_view word, const std::vector<std::string>& names);

/// "scenario must be one of a, b; got \"c\"; did you mean \"b\"?" A long list is replaced by
/// `list_command`, which prints it.
std::string unknown_name(const std::string& what, const std::string& word,
                         const std::vector<std::string>& names,
                         const std::string& list_command = "");

}  // namespace crossdock::cli
