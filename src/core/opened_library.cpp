#include "core/opened_library.hpp"

#include <dlfcn.h>

#include <utility>

#include "core/check.hpp"
#include "core/descriptor.hpp"

namespace crossdock {

OpenedLibrary::OpenedLibrary(std::string file, Symbols symbols) : file_(std::move(file)) {
  const StandardDescriptorGuard guard;
  handle_ =
      dlopen(file_.c_str(), RTLD_NOW | (symbols == Symbols::kGlobal ? RTLD_GLOBAL : RTLD_LOCAL));
  if (handle_ != nullptr) return;
  const char* reason = dlerror();
  throw Error(ErrorCode::kUnsupported, concat("cannot open ", file_, " (",
                                              reason != nullptr ? reason : "no reason given", ")"));
}

void* OpenedLibrary::address_of(const char* name) const {
  void* const address = dlsym(handle_, name);
  if (address == nullptr) {
    throw Error(ErrorCode::kUnsupported, concat(file_, " has no function ", name));
  }
  return address;
}

}  // namespace crossdock
