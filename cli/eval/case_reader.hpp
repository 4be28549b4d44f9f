#pragma once

#include <functional>
#include <initializer_list>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "cli/json.hpp"
#include "crossdock/error.hpp"
#include "crossdock/plan.hpp"

/// Reads the JSON of cases. All functions throw Error(kInvalidArgument), which says what must hold
/// and what was given.
namespace crossdock::cli {

constexpr int64_t kMaxCaseRanks = 1024;

template <typename... Parts>
[[noreturn]] void reject(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(ErrorCode::kInvalidArgument, message.str());
}

/// A short form of a value for messages.
std::string shown(const Json& value);

/// A repeated key is an error, since one of its values would be lost.
Json parse_json(const std::string& text);

/// An object of the case, with its name for messages and the keys it may have. The JSON must
/// outlive it.
class Object {
 public:
  Object(const Json& json, std::string name, std::initializer_list<std::string_view> keys);

  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }
  const Json& at(const char* key) const;
  std::string text(const char* key) const;
  std::string text(const char* key, const char* fallback) const;
  /// One of `names`.
  std::string name(const char* key, const char* fallback,
                   std::initializer_list<std::string_view> names) const;
  int64_t integer(const char* key, int64_t least, int64_t most) const;
  bool truth(const char* key, bool fallback) const;

 private:
  const Json& json_;
  std::string name_;
};

/// The name of an entry, only built if a message needs it.
using Name = std::function<std::string()>;

/// A number that is representable in the dtype after rounding, or one of the strings for values
/// that JSON cannot represent.
double rounded(DType dtype, const Json& value, const Name& name);

/// An array of `size` entries; `what` says what they are.
const Json& array(const Json& value, const std::string& name, int64_t size, const char* what);

/// Names of a matrix and its parts, for messages: "rank 1, token 2: x", "expert 0: w1[3]".
struct MatrixNames {
  std::string whole;         // "rank 1: x"
  std::string row_prefix;    // "rank 1, token "
  std::string row_suffix;    // ": x"
  const char* height = "";   // name of the number of rows
  const char* width = "";    // name of the number of columns
  const char* column = "[";  // between a row's name and the column's number
  const char* column_end = "]";

  std::string row(int64_t i) const { return row_prefix + std::to_string(i) + row_suffix; }
  std::string entry(int64_t i, int64_t j) const {
    return row(i) + column + std::to_string(j) + column_end;
  }
};

template <typename Read>
auto matrix(const Json& value, const MatrixNames& names, int64_t height, int64_t width,
            const Read& read) {
  std::vector<decltype(read(value, Name{}))> values;
  array(value, names.whole, height, names.height);
  for (int64_t i = 0; i < height; ++i) {
    const Json& row = array(value[static_cast<size_t>(i)], names.row(i), width, names.width);
    for (int64_t j = 0; j < width; ++j) {
      values.push_back(read(row[static_cast<size_t>(j)], [&] { return names.entry(i, j); }));
    }
  }
  return values;
}

/// An expert id.
int64_t read_id(const Json& value, const Name& name);

/// Names of a rank's array with an entry per token.
MatrixNames token_matrix(int rank, const char* key, const char* width);
/// Names of a rank's array with an entry per slot, as in messages of the library.
MatrixNames slot_matrix(int rank, const char* key, const char* width = "top_k");

/// The key "mask" of a rank; empty if there is none.
std::vector<uint8_t> read_mask(const Object& object, int rank, int64_t T);

/// The dispatcher's options, whose keys every kind of case has.
DispatchConfig read_config(const Object& object);

/// Refuses a case that would need too much memory: even a short text can ask for any amount, as
/// counts are [ranks, experts] on every rank, and alignment and pad_to_capacity add rows. Dense
/// maps are [tokens, experts].
void check_size(const DispatchConfig& config, const std::vector<size_t>& tokens_per_rank,
                bool has_dense_maps = false);

}  // namespace crossdock::cli
