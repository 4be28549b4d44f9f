#include "comm/sockets/directory.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"

namespace crossdock::comm {
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

void Directory::publish(uint64_t channel, int descriptor) {
  const std::lock_guard lock(mutex_);
  auto& entries = page().entries;
  const auto free = std::find_if(entries.begin(), entries.end(), [](const auto& entry) {
    return entry.channel.load(std::memory_order_relaxed) == 0;
  });
  if (free == entries.end()) {
    throw Error(ErrorCode::kCapacity,
                concat("a process can take part in at most ", entries.size(),
                       " groups with ranks of its node; destroy those that are not needed"));
  }
  free->descriptor.store(descriptor, std::memory_order_relaxed);
  free->channel.store(channel, std::memory_order_release);
}

void Directory::withdraw(uint64_t channel) {
  const std::lock_guard lock(mutex_);
  for (auto& entry : page().entries) {
    if (entry.channel.load(std::memory_order_relaxed) == channel) entry.channel.store(0);
  }
}

void Directory::refuse(uint64_t channel, const ControlMessage& message) {
  const std::lock_guard lock(mutex_);
  auto& refusal = page().refusals[num_refusals_++ % DirectoryPage::kNumRefusals];
  refusal.channel.store(0);
  refusal.message = message;
  refusal.channel.store(channel);
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

std::optional<int> PeerDirectory::find(uint64_t channel) const {
  for (const auto& entry : page_in(*file_).entries) {
    if (entry.channel.load(std::memory_order_acquire) == channel) return entry.descriptor.load();
  }
  return std::nullopt;
}

std::optional<ControlMessage> PeerDirectory::refusal_of(uint64_t channel) const {
  for (const auto& refusal : page_in(*file_).refusals) {
    if (refusal.channel.load() != channel) continue;
    const ControlMessage message = refusal.message;
    if (refusal.channel.load() == channel) return message;  // not overwritten in the meantime
  }
  return std::nullopt;
}

bool PeerDirectory::is_closed() const {
  return page_in(*file_).is_closed != 0;
}

}  // namespace crossdock::comm
