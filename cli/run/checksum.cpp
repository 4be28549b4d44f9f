#include "cli/run/checksum.hpp"

#include <cstring>
#include <vector>

namespace crossdock::cli {
namespace {

// FNV-1a.
uint64_t hash(std::span<const std::byte> bytes, uint64_t start = 0xcbf29ce484222325u) {
  for (const std::byte byte : bytes) {
    start = (start ^ static_cast<uint64_t>(byte)) * 0x100000001b3u;
  }
  return start;
}

}  // namespace

uint64_t checksum(Group& group, ConstTensorView rows) {
  std::vector<uint64_t> row_hashes;
  const auto* data = static_cast<const std::byte*>(rows.data);
  for (int64_t i = 0; i < rows.num_rows(); ++i) {
    row_hashes.push_back(
        hash({data + i * rows.row_bytes(), static_cast<size_t>(rows.row_bytes())}));
  }
  const Agreement all =
      group.agree({.operation = "checksum", .body = std::as_bytes(std::span(row_hashes))});
  return hash(all.bytes.bytes().first(static_cast<size_t>(all.offsets.back())));
}

}  // namespace crossdock::cli
