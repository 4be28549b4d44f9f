#include "core/process.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/descriptor.hpp"

namespace crossdock {
namespace {

constinit std::atomic<uint64_t> generation = 0;

void after_fork_in_child() {
  ++generation;
}

// Registered when the library is loaded, which a fork cannot interrupt.
[[maybe_unused]] const int kRegistered = pthread_atfork(nullptr, nullptr, after_fork_in_child);

}  // namespace

uint64_t fork_generation() noexcept {
  return generation.load(std::memory_order_relaxed);
}

void leak(std::shared_ptr<const void> memory) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(memory));
}

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
