#include "comm/sockets/directory.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/check.hpp"
#include "core/hash.hpp"

namespace crossdock::comm {
namespace {

constexpr uint32_t kMagic = 0x53424443;  // "CDBS": Crossdock blob of sockets

// The bytes of a blob, in the byte order of the machine, which must be the same on all machines of
// a job. A different byte order is visible in the magic number.
struct PackedBlob {
  uint32_t magic = kMagic;
  uint32_t version = kSocketsVersion;  // these two stay first in every version
  uint32_t num_bytes = sizeof(PackedBlob);
  int32_t directory = -1;
  uint64_t pid_space = 0;
  uint64_t start_ticks = 0;
  uint64_t machine = 0;
  int32_t pid = 0;
  int32_t family = 0;
  int32_t port = 0;
  int32_t ranks_per_node = 0;
  uint8_t address[16] = {};
  std::byte secret[16] = {};
  int64_t window_bytes = 0;
  uint64_t checksum = 0;  // of all bytes before it
};
static_assert(std::is_trivially_copyable_v<PackedBlob>);
static_assert(sizeof(PackedBlob) == 104 && offsetof(PackedBlob, checksum) == 96);

uint64_t checksum_of(const PackedBlob& packed) {
  const auto bytes = std::as_bytes(std::span(&packed, 1));
  return hash_bytes(bytes.first(offsetof(PackedBlob, checksum)));
}

std::string flaw_in(const PackedBlob& packed) {
  if (packed.num_bytes != sizeof packed) return concat("claims ", packed.num_bytes, " bytes");
  if (packed.checksum != checksum_of(packed)) return "is damaged: its checksum is wrong";
  if (packed.family != 4 && packed.family != 6) return "has no IP address";
  if (packed.port < 1 || packed.port > 65535) return concat("has the port ", packed.port);
  if (packed.pid <= 0) return concat("has the process id ", packed.pid);
  if (packed.window_bytes <= 0) return concat("has a window of ", packed.window_bytes, " bytes");
  if (packed.ranks_per_node < 0) return concat("has ", packed.ranks_per_node, " ranks per node");
  return "";
}

}  // namespace

std::vector<std::byte> encode(const SocketsBlob& blob) {
  PackedBlob packed;
  packed.version = blob.version;
  packed.directory = blob.directory;
  packed.pid_space = blob.process.pid_space;
  packed.start_ticks = blob.process.start_ticks;
  packed.machine = blob.machine;
  packed.pid = blob.process.pid;
  packed.family = blob.address.family;
  packed.port = blob.address.port;
  packed.ranks_per_node = blob.ranks_per_node;
  std::memcpy(packed.address, blob.address.address.data(), sizeof packed.address);
  std::memcpy(packed.secret, blob.secret.data(), sizeof packed.secret);
  packed.window_bytes = blob.window_bytes;
  packed.checksum = checksum_of(packed);
  const auto bytes = std::as_bytes(std::span(&packed, 1));
  return {bytes.begin(), bytes.end()};
}

DecodedBlob decode_blob(std::span<const std::byte> bytes) {
  PackedBlob packed;
  const auto refuse = [](std::string flaw, bool is_foreign = false) {
    return DecodedBlob{
        .blob = std::nullopt, .flaw = std::move(flaw), .is_foreign_version = is_foreign};
  };
  std::array<uint32_t, 2> magic_and_version{};
  if (bytes.size() < sizeof magic_and_version) {
    return refuse(concat("has ", bytes.size(), " bytes"));
  }
  std::memcpy(&magic_and_version, bytes.data(), sizeof magic_and_version);
  if (magic_and_version[0] != kMagic) return refuse("is not a Crossdock blob");
  if (magic_and_version[1] != kSocketsVersion) {
    return refuse(concat("has version ", magic_and_version[1], " where this build has version ",
                         kSocketsVersion),
                  true);
  }
  if (bytes.size() != sizeof packed) {
    return refuse(concat("has ", bytes.size(), " bytes, must have ", sizeof packed));
  }
  std::memcpy(&packed, bytes.data(), sizeof packed);
  if (std::string flaw = flaw_in(packed); !flaw.empty()) return refuse(std::move(flaw));
  SocketsBlob blob;
  blob.process = {.pid_space = packed.pid_space,
                  .start_ticks = packed.start_ticks,
                  .pid = packed.pid,
                  .reserved = 0};
  blob.machine = packed.machine;
  blob.address.family = packed.family;
  blob.address.port = packed.port;
  std::memcpy(blob.address.address.data(), packed.address, sizeof packed.address);
  blob.directory = packed.directory;
  std::memcpy(blob.secret.data(), packed.secret, sizeof packed.secret);
  blob.window_bytes = packed.window_bytes;
  blob.ranks_per_node = packed.ranks_per_node;
  return {.blob = blob, .flaw = {}, .is_foreign_version = false};
}

namespace {

constexpr int64_t kFileBytes = (sizeof(DirectoryPage) + 4095) / 4096 * 4096;

// Memory files begin as zeros, which is a valid state of these types.
DirectoryPage& page_in(const SharedFile& file) {
  return *reinterpret_cast<DirectoryPage*>(file.data());
}

}  // namespace

Directory::Directory(const Secret& secret)
    : file_(SharedFile::create("crossdock-directory", kFileBytes)) {
  page().version = kSocketsVersion;
  page().secret = secret;
  page().magic = DirectoryPage::kMagic;
}

Directory::~Directory() {
  if (generation_ == fork_generation()) page().is_closed = 1;
}

DirectoryPage& Directory::page() const {
  return page_in(*file_);
}

void Directory::publish(uint64_t comm_id, int descriptor) {
  const std::lock_guard lock(mutex_);
  auto& entries = page().entries;
  const auto free = std::find_if(entries.begin(), entries.end(), [](const auto& entry) {
    return entry.comm_id.load(std::memory_order_relaxed) == 0;
  });
  if (free == entries.end()) {
    throw Error(ErrorCode::kCapacity,
                concat("a process can take part in at most ", entries.size(),
                       " groups with ranks of its node; destroy those that are not needed"));
  }
  free->descriptor.store(descriptor, std::memory_order_relaxed);
  free->comm_id.store(comm_id, std::memory_order_release);
}

void Directory::withdraw(uint64_t comm_id) {
  const std::lock_guard lock(mutex_);
  for (auto& entry : page().entries) {
    if (entry.comm_id.load(std::memory_order_relaxed) == comm_id) entry.comm_id.store(0);
  }
}

void Directory::refuse(uint64_t comm_id, const ControlMessage& message) {
  const std::lock_guard lock(mutex_);
  auto& refusal = page().refusals[num_refusals_++ % DirectoryPage::kNumRefusals];
  refusal.comm_id.store(0);
  refusal.message = message;
  refusal.comm_id.store(comm_id);
}

std::unique_ptr<PeerDirectory> PeerDirectory::open(const SocketsBlob& blob, std::string& why) {
  auto file = SharedFile::open(blob.process.pid, blob.directory, kFileBytes, why);
  if (!file) return nullptr;
  const DirectoryPage& page = page_in(*file);
  if (page.magic != DirectoryPage::kMagic || page.version != kSocketsVersion ||
      !is_equal(page.secret, blob.secret)) {
    why = concat("the memory file of process ", blob.process.pid, " is not the one in its blob");
    return nullptr;
  }
  return std::unique_ptr<PeerDirectory>(new PeerDirectory(std::move(file)));
}

std::optional<int> PeerDirectory::find(uint64_t comm_id) const {
  for (const auto& entry : page_in(*file_).entries) {
    if (entry.comm_id.load(std::memory_order_acquire) == comm_id) return entry.descriptor.load();
  }
  return std::nullopt;
}

std::optional<ControlMessage> PeerDirectory::refusal_of(uint64_t comm_id) const {
  for (const auto& refusal : page_in(*file_).refusals) {
    if (refusal.comm_id.load() != comm_id) continue;
    const ControlMessage message = refusal.message;
    if (refusal.comm_id.load() == comm_id) return message;  // not overwritten in the meantime
  }
  return std::nullopt;
}

bool PeerDirectory::is_closed() const {
  return page_in(*file_).is_closed != 0;
}

}  // namespace crossdock::comm
