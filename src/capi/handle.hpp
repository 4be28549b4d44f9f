#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "core/check.hpp"
#include "core/fork_generation.hpp"

namespace crossdock::capi {

/// Base of the objects behind the C API's handles. Recognises pointers to other objects and objects
/// of a parent process: callers in untyped languages confuse handles, and forked children destroy
/// handles they inherited.
template <typename Object>
class Handle {
 public:
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  bool is_of_this_kind() const { return kind_ == &kind_of_object; }
  bool is_of_parent() const { return generation_ != fork_generation(); }

 protected:
  Handle() = default;
  ~Handle() { kind_ = nullptr; }

 private:
  inline static char kind_of_object = 0;  // its address identifies the type

  const void* volatile kind_ = &kind_of_object;  // volatile: the destructor's store is not removed
  const uint64_t generation_ = fork_generation();
};

template <typename Object>
concept HandleObject =
    std::derived_from<std::remove_const_t<Object>, Handle<std::remove_const_t<Object>>>;

/// The object behind a handle. Throws if there is none that this process can use.
template <HandleObject Object>
Object& handle(const char* name, Object* given) {
  CROSSDOCK_CHECK(given != nullptr, name, " must not be NULL");
  CROSSDOCK_CHECK(given->is_of_this_kind(), name,
                  " must be a handle of its own type that has not been destroyed");
  if (given->is_of_parent()) {
    throw Error(ErrorCode::kUnsupported,
                concat(name, " belongs to the parent process; a forked child cannot use it"));
  }
  return *given;
}

template <HandleObject Object>
bool is_usable(const Object* given) {
  return given != nullptr && given->is_of_this_kind() && !given->is_of_parent();
}

/// Destroys the object behind a handle, unless this process must not touch it.
template <HandleObject Object>
void destroy(Object* given) noexcept {
  if (is_usable(given)) delete given;
}

/// The object behind a pointer that must not be null.
template <typename Value>
Value& pointee(const char* name, Value* given) {
  CROSSDOCK_CHECK(given != nullptr, name, " must not be NULL");
  return *given;
}

}  // namespace crossdock::capi
