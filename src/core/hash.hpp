#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace crossdock {

inline constexpr uint64_t kHashStart = 0xcbf29ce484222325;

/// FNV-1a, 64 bits. The same for the same bytes on every machine; `start` is an earlier hash, to
/// hash several pieces as one.
inline uint64_t hash_bytes(std::span<const std::byte> bytes, uint64_t start = kHashStart) {
  uint64_t hash = start;
  for (const std::byte one : bytes) hash = (hash ^ static_cast<uint64_t>(one)) * 0x100000001b3;
  return hash;
}
inline uint64_t hash_bytes(std::string_view text, uint64_t start = kHashStart) {
  return hash_bytes(std::as_bytes(std::span(text.data(), text.size())), start);
}

}  // namespace crossdock
