#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/process_watch.hpp"
#include "comm/secret.hpp"
#include "comm/sockets/socket.hpp"

namespace crossdock::comm {

/// Version of blobs, frames and shared memory: ranks with different versions refuse each other.
inline constexpr uint32_t kSocketsVersion = 3;

/// Everything that other processes must know about a process to connect to it.
struct SocketsBlob {
  uint32_t version = kSocketsVersion;
  ProcessIdentity process;
  uint64_t machine = 0;        // identify_this_machine()
  SocketAddress address;       // where it listens
  int32_t directory = -1;      // descriptor of its directory (directory.hpp), in its process
  Secret secret{};             // needed to connect to it
  int64_t window_bytes = 0;    // SocketsOptions, compared by join
  int32_t ranks_per_node = 0;  // SocketsOptions, compared by join
};

std::vector<std::byte> encode(const SocketsBlob& blob);

/// A blob, or why the bytes are not one. A blob of another version is decoded only up to its
/// version.
struct DecodedBlob {
  std::optional<SocketsBlob> blob;
  std::string flaw;  // completes "the blob of rank 3 "; empty if there is a blob
  bool is_foreign_version = false;
};
DecodedBlob decode_blob(std::span<const std::byte> bytes);

}  // namespace crossdock::comm
