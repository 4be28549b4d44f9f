#pragma once

#include <string>

namespace crossdock {

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
