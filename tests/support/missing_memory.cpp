#include "support/missing_memory.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

namespace crossdock {
namespace {

constexpr int64_t kPageBytes = 4096;

std::atomic<size_t> missing_bytes = 0;  // 0: nothing is missing
std::atomic<int64_t> asked = 0;
std::atomic<int64_t> granted = 0;  // allocations that still succeed
thread_local bool is_small_missing = false;

}  // namespace

MissingMemory::MissingMemory(int64_t buffer_bytes, int64_t num_granted) {
  asked = 0;
  granted = num_granted;
  missing_bytes = static_cast<size_t>((buffer_bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
}

MissingMemory::~MissingMemory() {
  missing_bytes = 0;
}

int64_t MissingMemory::num_refused() {
  return std::max<int64_t>(0, asked - granted);
}

void MissingSmallMemory::begin() {
  is_small_missing = true;
}

MissingSmallMemory::~MissingSmallMemory() {
  is_small_missing = false;
}

}  // namespace crossdock

// These replace the functions of the standard library, in this program only. Inlined, they look to
// GCC like a free of memory from new.
[[gnu::noinline]] void* operator new(size_t num_bytes, const std::nothrow_t& /*tag*/) noexcept {
  return crossdock::is_small_missing ? nullptr : std::malloc(std::max<size_t>(num_bytes, 1));
}
[[gnu::noinline]] void* operator new(size_t num_bytes) {
  void* memory = operator new(num_bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t /*num_bytes*/) noexcept {
  std::free(memory);
}

// Replaces the function of the C library, in this program only.
extern "C" void* aligned_alloc(size_t alignment, size_t num_bytes) noexcept {
  const size_t missing = crossdock::missing_bytes;
  if (missing > 0 && num_bytes == missing && crossdock::asked++ >= crossdock::granted) {
    return nullptr;
  }
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, num_bytes) == 0 ? memory : nullptr;
}
