#include "core/stream_copy.hpp"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace crossdock {
namespace {

// About the size of one core's caches; a larger output is evicted before it is read.
constexpr int64_t kStreamingBytes = int64_t{2} << 20;

#if defined(__SSE2__)
constexpr int64_t kLineBytes = 64;

void stream_lines(std::byte* to, const std::byte* from, int64_t num_lines) {
  auto* out = reinterpret_cast<__m128i*>(to);
  const auto* in = reinterpret_cast<const __m128i*>(from);
  for (int64_t i = 0; i < num_lines; ++i, in += 4, out += 4) {
    const __m128i a = _mm_loadu_si128(in);
    const __m128i b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2);
    const __m128i d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
}
#endif

}  // namespace

Stores stores_for(int64_t num_bytes) {
  return num_bytes >= kStreamingBytes ? Stores::kStreaming : Stores::kCached;
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t num_bytes, Stores stores) {
  if (num_bytes <= 0) return;
#if defined(__SSE2__)
  if (stores == Stores::kStreaming && num_bytes >= 2 * kLineBytes) {
    const auto misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLineBytes);
    const int64_t head = misalignment == 0 ? 0 : kLineBytes - misalignment;
    const int64_t num_lines = (num_bytes - head) / kLineBytes;
    const int64_t tail = head + num_lines * kLineBytes;
    std::memcpy(to, from, static_cast<size_t>(head));
    stream_lines(to + head, from + head, num_lines);
    std::memcpy(to + tail, from + tail, static_cast<size_t>(num_bytes - tail));
    return;
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(num_bytes));
}

void finish_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace crossdock
