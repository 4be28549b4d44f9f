#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cli/text/numbers.hpp"

namespace crossdock::cli {

/// JSON whose keys keep their order.
using Json = nlohmann::ordered_json;

/// The text of a document. Numbers have the fewest digits that identify the double; values that
/// JSON cannot represent become "NaN", "Infinity" or "-Infinity"; bytes that are not UTF-8 become
/// U+FFFD. Entries of the outermost `indented_depth` levels are on lines of their own, except in
/// arrays of numbers.
std::string json_text(const Json& json, int indented_depth = 2);

/// {"error": message}, which a command prints instead of its results if it fails.
std::string error_json(std::string_view message);

/// Parses what ranks have printed and passes it to `read`. Throws Error(kInternal) if either fails.
void read_output(const std::string& text, const std::function<void(const Json&)>& read);

/// A struct that is written and read has one description, a function found by its arguments:
///
///     void describe(auto& fields, Reply& reply) {
///       fields("count", reply.count);
///       fields("note", reply.note, std::string());  // left out if equal
///       fields.derived("rate", reply.rate());       // written, not read
///     }
class JsonFields;
class JsonReader;

/// The inverse of what json_text writes, also for "NaN".
double read_number(const Json& json);

template <typename T>
concept Described = requires(JsonFields& fields, T& value) {
  describe(fields, value);
};

template <typename T>
Json json_of(const T& value);
template <typename T>
void read_json(const Json& json, T& value);

/// Writes the fields of a struct.
class JsonFields {
 public:
  template <typename T>
  void operator()(const char* key, const T& value) {
    object_[key] = json_of(value);
  }
  template <typename T>
  void operator()(const char* key, const T& value, const T& absent) {
    if (value != absent) (*this)(key, value);
  }
  template <typename T>
  void derived(const char* key, const T& value) {
    (*this)(key, value);
  }
  /// A number as text: in decimal digits, or as 16 hexadecimal digits.
  void text(const char* key, uint64_t value, int base) {
    object_[key] = base == 16 ? hex(value) : std::to_string(value);
  }
  Json take() { return std::move(object_); }

 private:
  Json object_ = Json::object();
};

/// Reads them. Throws a nlohmann exception if one is missing or has another type.
class JsonReader {
 public:
  explicit JsonReader(const Json& object) : object_(object) {}
  template <typename T>
  void operator()(const char* key, T& value) {
    read_json(object_.at(key), value);
  }
  template <typename T>
  void operator()(const char* key, T& value, const T& absent) {
    if (object_.contains(key)) {
      (*this)(key, value);
    } else {
      value = absent;
    }
  }
  template <typename T>
  void derived(const char* /*key*/, const T& /*value*/) {}
  void text(const char* key, uint64_t& value, int base) {
    value = std::stoull(object_.at(key).get<std::string>(), nullptr, base);
  }

 private:
  const Json& object_;
};

template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};

template <typename T>
Json json_of(const T& value) {
  if constexpr (Described<T>) {
    JsonFields fields;
    describe(fields, const_cast<T&>(value));  // the same description reads
    return fields.take();
  } else if constexpr (IsVector<T>::value) {
    Json array = Json::array();
    for (const auto& entry : value) array.push_back(json_of(entry));
    return array;
  } else {
    return Json(value);
  }
}

template <typename T>
void read_json(const Json& json, T& value) {
  if constexpr (Described<T>) {
    JsonReader fields(json);
    describe(fields, value);
  } else if constexpr (IsVector<T>::value) {
    for (const Json& entry : json) read_json(entry, value.emplace_back());
  } else if constexpr (std::is_same_v<T, double>) {
    value = read_number(json);
  } else {
    json.get_to(value);
  }
}

}  // namespace crossdock::cli
