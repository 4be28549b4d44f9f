#include "comm/sockets/node_memory.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <thread>

#include "comm/memory/bell.hpp"
#include "core/check.hpp"

namespace crossdock::comm {

ReachablePeers find_reachable_peers(const SocketsWorld& world) {
  ReachablePeers peers;
  peers.directories.resize(world.blobs.size());
  peers.reaches.assign(world.blobs.size(), 0);
  peers.reaches[static_cast<size_t>(world.rank)] = 1;
  const SocketsBlob& own = world.own();
  for (int rank = 0; rank < world.size(); ++rank) {
    if (rank == world.rank) continue;
    const auto r = static_cast<size_t>(rank);
    const SocketsBlob& blob = world.blobs[r];
    std::string why = "it runs in another container";
    if (is_visible(blob.process, own.process)) {
      peers.directories[r] = PeerDirectory::open(blob, why);
    }
    peers.reaches[r] = peers.directories[r] ? 1 : 0;
    const bool is_on_this_machine = own.machine != 0 && blob.machine == own.machine;
    if (!peers.directories[r] && is_on_this_machine && peers.note.empty()) {
      peers.note = concat("tcp on one machine: rank ", world.rank,
                          " cannot share memory with rank ", rank, " (", why, ")");
    }
  }
  return peers;
}

std::vector<int> group_into_nodes(std::span<const uint8_t> rows, int size) {
  const auto share = [&](int a, int b) {
    const auto p = static_cast<size_t>(size);
    return rows[static_cast<size_t>(a) * p + static_cast<size_t>(b)] != 0 &&
           rows[static_cast<size_t>(b) * p + static_cast<size_t>(a)] != 0;
  };
  std::vector<std::vector<int>> nodes;
  std::vector<int> node_of_rank;
  for (int rank = 0; rank < size; ++rank) {
    const auto fitting = std::find_if(nodes.begin(), nodes.end(), [&](const auto& members) {
      return std::all_of(members.begin(), members.end(),
                         [&](int member) { return share(rank, member); });
    });
    node_of_rank.push_back(static_cast<int>(fitting - nodes.begin()));
    if (fitting == nodes.end()) {
      nodes.push_back({rank});
    } else {
      fitting->push_back(rank);
    }
  }
  return node_of_rank;
}

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kSmallestRing = size_t{4} << 10;
constexpr size_t kLargestRing = size_t{256} << 10;
constexpr size_t kRingsOfARank = size_t{1} << 20;  // all rings in a rank's file, approximately

constexpr size_t round_up_to_page(size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

constexpr size_t kHeadBytes = round_up_to_page(sizeof(NodeFileHead));

size_t ring_bytes_for(size_t num_members) {
  return std::clamp(std::bit_floor(kRingsOfARank / num_members), kSmallestRing, kLargestRing);
}

int64_t file_bytes(size_t num_members) {
  const size_t stream = sizeof(StreamHead) + ring_bytes_for(num_members);
  return static_cast<int64_t>(round_up_to_page(kHeadBytes + num_members * stream));
}

void ring_the_bell(NodeFileHead& head) {
  head.bell.fetch_add(1);
  futex_wake(head.bell);
}

}  // namespace

NodeMemory::NodeMemory(const Args& args, Directory& directory)
    : id_(args.comm_id),
      self_(args.self),
      ring_bytes_(ring_bytes_for(args.blobs.size())),
      directory_(directory),
      files_(args.blobs.size()) {
  auto& own = files_[static_cast<size_t>(self_)];
  own = SharedFile::create("crossdock-streams", file_bytes(files_.size()));
  head(self_).comm_id = id_;
  directory_.publish(id_, own->descriptor());
  try {
    open_members(args);
  } catch (...) {
    directory_.withdraw(id_);
    throw;
  }
}

NodeMemory::~NodeMemory() {
  directory_.withdraw(id_);
}

void NodeMemory::open_members(const Args& args) {
  // A member may do its part and leave between this check and the check whether it is still there.
  // Anything else, such as an interrupt, ends the wait even if the member is ready by now.
  const auto wait_until = [&](int member, const auto& is_ready) {
    while (!is_ready()) {
      try {
        args.while_waiting(member);
      } catch (const MemberIsMissing&) {
        if (is_ready()) return;
        throw;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  for (int member = 0; member < size(); ++member) {
    if (member == self_) continue;
    wait_until(member, [&] { return open_member(member, args); });
    head(member).has_opened[static_cast<size_t>(self_)] = 1;
  }
  for (int member = 0; member < size(); ++member) {
    if (member == self_) continue;
    wait_until(member, [&] { return head(self_).has_opened[static_cast<size_t>(member)] != 0; });
  }
}

// False if the member has not made its file yet, or has just given it up.
bool NodeMemory::open_member(int member, const Args& args) {
  const auto m = static_cast<size_t>(member);
  const auto descriptor = args.directories[m]->find(id_);
  if (!descriptor) return false;
  std::string why = "it belongs to another group";
  files_[m] =
      SharedFile::open(args.blobs[m]->process.pid, *descriptor, file_bytes(files_.size()), why);
  if (files_[m] && head(member).comm_id == id_) return true;
  files_[m].reset();
  if (!args.directories[m]->find(id_)) return false;
  args.while_waiting(member);  // throws if the process has ended
  throw Error(ErrorCode::kCommunication,
              concat("cannot reach the streams of a process on this node: ", why));
}

// Memory files begin as zeros, which is a valid state of these types.
NodeFileHead& NodeMemory::head(int owner) const {
  return *reinterpret_cast<NodeFileHead*>(files_[static_cast<size_t>(owner)]->data());
}

StreamHead& NodeMemory::stream(int owner, int sender) const {
  std::byte* first = files_[static_cast<size_t>(owner)]->data() + kHeadBytes;
  const size_t stream_bytes = sizeof(StreamHead) + ring_bytes_;
  return *reinterpret_cast<StreamHead*>(first + static_cast<size_t>(sender) * stream_bytes);
}

std::byte* NodeMemory::ring(int owner, int sender) const {
  return reinterpret_cast<std::byte*>(&stream(owner, sender)) + sizeof(StreamHead);
}

// The fences here and in prepare_to_sleep order "store, then look at the other's word" on both
// sides: either the sleeper sees what was written or the writer sees the sleeper.
void NodeMemory::wake(int member) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  NodeFileHead& other = head(member);
  if (other.sleeps.load(std::memory_order_relaxed) != NodeFileHead::kAwake) ring_the_bell(other);
}

void NodeMemory::wake_for_post() const {
  const uint32_t for_me = NodeFileHead::kForPostOf + static_cast<uint32_t>(self_);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int member = 0; member < size(); ++member) {
    if (member == self_) continue;
    NodeFileHead& other = head(member);
    const uint32_t awaited = other.sleeps.load(std::memory_order_relaxed);
    if (awaited == NodeFileHead::kForAnything || awaited == for_me) ring_the_bell(other);
  }
}

void NodeMemory::prepare_to_sleep(uint32_t awaited) {
  NodeFileHead& own = head(self_);
  bell_seen_ = own.bell.load();
  own.sleeps.store(awaited);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  prepared_for_ = awaited;
}

void NodeMemory::sleep(std::chrono::nanoseconds timeout) {
  futex_wait(head(self_).bell, bell_seen_, timeout);
  stay_awake();
}

void NodeMemory::stay_awake() {
  if (prepared_for_ == NodeFileHead::kAwake) return;
  head(self_).sleeps.store(NodeFileHead::kAwake);
  prepared_for_ = NodeFileHead::kAwake;
}

}  // namespace crossdock::comm
