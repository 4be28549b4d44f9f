#include "support/missing_threads.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <limits>

namespace crossdock {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::atomic<int64_t> started = 0;
std::atomic<int64_t> limit = kNoLimit;  // of `started`

}  // namespace

MissingThreads::MissingThreads(int64_t num_granted) {
  limit = started + num_granted;
}

MissingThreads::~MissingThreads() {
  limit = kNoLimit;
}

int64_t num_threads_started() {
  return started;
}

}  // namespace crossdock

// Replaces the function of the C library, in this program only.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto kCreate = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (crossdock::started >= crossdock::limit) return EAGAIN;
  ++crossdock::started;
  return kCreate(thread, attributes, body, argument);
}
