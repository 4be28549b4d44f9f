#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

namespace crossdock {

/// The value of an environment variable. An empty one counts as not set, whatever the variable.
inline std::string environment_variable(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : "";
}

/// Number of forks between the process that loaded the library and this one. It differs between the
/// process that made an object and a forked child, whose copy of the object must do nothing: its
/// threads do not exist there, and its peers and shared memory belong to the parent.
uint64_t fork_generation() noexcept;

/// A T for each process. A forked child gets a new one instead of a copy: the copy may have been
/// made in the middle of a change, and its mutex may be locked by a thread that the child does not
/// have. Never freed, so it can be used while the process exits. Declare it constinit.
template <typename T>
class PerProcess {
 public:
  /// May be called by several threads at once.
  T& get() {
    const uint64_t generation = fork_generation();
    Instance* current = current_.load(std::memory_order_acquire);
    if (current != nullptr && current->generation == generation) return current->value;
    auto fresh = std::make_unique<Instance>(generation, current);
    if (current_.compare_exchange_strong(current, fresh.get())) return fresh.release()->value;
    return current->value;  // another thread was faster
  }

 private:
  struct Instance {
    Instance(uint64_t of_generation, const Instance* of_parent)
        : generation(of_generation), parent(of_parent) {}
    const uint64_t generation;
    const Instance* const parent;  // never used; leak checkers see that it is still referenced
    T value{};
  };

  std::atomic<Instance*> current_ = nullptr;
};

/// Keeps memory until the process ends, because something outside our control may still be using
/// it.
void leak(std::shared_ptr<const void> memory);

/// A shared library that is opened at run time. It stays loaded until the process ends.
class OpenedLibrary {
 public:
  /// Whether libraries that are loaded later may use its symbols and those of its dependencies.
  enum class Symbols { kPrivate, kGlobal };

  /// `file` is a path, or a name for the dynamic linker to find; if the process has already loaded
  /// a library of that name, it is used. Throws Error(kUnsupported) with the linker's message.
  explicit OpenedLibrary(std::string file, Symbols symbols = Symbols::kPrivate);

  const std::string& file() const { return file_; }

  /// Sets a function pointer to the library's function `name`. Throws Error(kUnsupported) if there
  /// is none.
  template <typename Function>
  void find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(address_of(name));
  }

 private:
  void* address_of(const char* name) const;

  std::string file_;
  void* handle_ = nullptr;
};

}  // namespace crossdock
