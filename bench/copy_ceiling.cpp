#include "bench/copy_ceiling.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace crossdock::bench {
namespace {

// While this object exists, the calling thread and threads it starts may use every core.
class OnAllCores {
 public:
  OnAllCores() {
    is_changed_ = sched_getaffinity(0, sizeof(before_), &before_) == 0;
    cpu_set_t all;
    CPU_ZERO(&all);
    for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &all);
    is_changed_ = is_changed_ && sched_setaffinity(0, sizeof(all), &all) == 0;
  }
  ~OnAllCores() {
    if (is_changed_) sched_setaffinity(0, sizeof(before_), &before_);
  }
  OnAllCores(const OnAllCores&) = delete;
  OnAllCores& operator=(const OnAllCores&) = delete;

 private:
  cpu_set_t before_;
  bool is_changed_;
};

// Fits in the L1 cache, so that only the loop's own traffic reaches memory.
using Chunk = std::array<uint64_t, 512>;
constexpr int64_t kChunkBytes = sizeof(Chunk);

// The buffers are used repeatedly; where it matters they are far larger than the caches.
Chunk& chunk_of(const Buffer& memory, int64_t number) {
  const int64_t num_chunks = memory.num_bytes() / kChunkBytes;
  return *reinterpret_cast<Chunk*>(memory.data() + number % num_chunks * kChunkBytes);
}

void stream_chunk(Chunk& to, const Chunk& from) {
#if defined(__SSE2__)
  const auto* in = reinterpret_cast<const __m128i*>(from.data());
  auto* out = reinterpret_cast<__m128i*>(to.data());
  for (int64_t i = 0; i < kChunkBytes / 16; ++i) _mm_stream_si128(out + i, _mm_load_si128(in + i));
#else
  to = from;
#endif
}

void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace

CopyCeiling::CopyCeiling(int64_t max_bytes)
    : from_(std::max(max_bytes / 2, kChunkBytes)), to_(std::max(max_bytes / 2, kChunkBytes)) {
  const OnAllCores on_all_cores;
  pool_ = std::make_unique<ThreadPool>();
  std::memset(from_.data(), 1, static_cast<size_t>(from_.num_bytes()));
  std::memset(to_.data(), 0, static_cast<size_t>(to_.num_bytes()));
}

CopyCeiling::~CopyCeiling() = default;

double CopyCeiling::copy_us(int64_t num_bytes) {
  return time_us(num_bytes / 2, [this](int64_t first, int64_t last) {
    std::memcpy(to_.data() + first, from_.data() + first, static_cast<size_t>(last - first));
  });
}

double CopyCeiling::traffic_us(int64_t num_read, int64_t num_written) {
  const int64_t chunks_read = std::max<int64_t>(1, num_read / kChunkBytes);
  const int64_t chunks_written = std::max<int64_t>(1, num_written / kChunkBytes);
  const double reads_per_store =
      static_cast<double>(chunks_read) / static_cast<double>(chunks_written);
  if (reads_per_store <= 1.0) {
    return time_us(chunks_written, [&](int64_t first, int64_t last) {
      store_repeatedly(first, last, reads_per_store);
    });
  }
  return time_us(chunks_read, [&](int64_t first, int64_t last) {
    sum_repeatedly(first, last, 1.0 / reads_per_store);
  });
}

void CopyCeiling::store_repeatedly(int64_t first, int64_t last, double reads_per_store) {
  for (int64_t i = first; i < last; ++i) {
    const auto read = static_cast<int64_t>(static_cast<double>(i) * reads_per_store);
    stream_chunk(chunk_of(to_, i), chunk_of(from_, read));
  }
  finish_streaming();
}

void CopyCeiling::sum_repeatedly(int64_t first, int64_t last, double stores_per_read) {
  alignas(64) Chunk sum = {};
  for (int64_t i = first; i < last; ++i) {
    const Chunk& read = chunk_of(from_, i);
    for (size_t j = 0; j < read.size(); ++j) sum[j] += read[j];
    const auto written = static_cast<int64_t>(static_cast<double>(i) * stores_per_read);
    const auto next = static_cast<int64_t>(static_cast<double>(i + 1) * stores_per_read);
    if (next == written) continue;
    stream_chunk(chunk_of(to_, written), sum);
    sum.fill(0);
  }
  finish_streaming();
}

double CopyCeiling::time_us(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  using Clock = std::chrono::steady_clock;
  const OnAllCores on_all_cores;
  const int64_t parts = pool_->num_threads();
  const auto begin = Clock::now();
  pool_->parallel_for(
      parts, [&](int64_t part) { body(count * part / parts, count * (part + 1) / parts); });
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

}  // namespace crossdock::bench
