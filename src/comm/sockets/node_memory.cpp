#include "comm/sockets/node_memory.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
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

void Posts::publish(uint64_t exchange, std::span<const std::byte> bytes) {
  ++number_;
  Post& post = memory_.head(memory_.self()).posts[number_ % 2];
  post.exchange = exchange;
  post.num_bytes = bytes.size();
  if (!bytes.empty()) std::memcpy(post.bytes.data(), bytes.data(), bytes.size());
  post.number.store(number_, std::memory_order_release);
  memory_.wake_for_post();
}

const Post* Posts::find(int member) const {
  return find_number(member, number_);
}

const Post* Posts::find_next(int member) const {
  return find_number(member, number_ + 1);
}

const Post* Posts::find_number(int member, uint64_t number) const {
  const Post& post = memory_.head(member).posts[number % 2];
  return post.number.load(std::memory_order_acquire) == number ? &post : nullptr;
}

size_t NodeStreams::write(int member, std::span<const std::byte> bytes) {
  StreamHead& box = memory_.stream(member, memory_.self());
  std::byte* ring = memory_.ring(member, memory_.self());
  const size_t ring_bytes = memory_.ring_bytes();
  const uint64_t written = box.bytes_written.load(std::memory_order_relaxed);
  const uint64_t read = box.bytes_read.load(std::memory_order_acquire);
  const size_t num_bytes = std::min<size_t>(bytes.size(), ring_bytes - (written - read));
  if (num_bytes == 0) return 0;
  const size_t begin = written % ring_bytes;
  const size_t before_wrap = std::min(num_bytes, ring_bytes - begin);
  std::memcpy(ring + begin, bytes.data(), before_wrap);
  std::memcpy(ring, bytes.data() + before_wrap, num_bytes - before_wrap);
  box.bytes_written.store(written + num_bytes, std::memory_order_release);
  memory_.wake(member);
  return num_bytes;
}

size_t NodeStreams::read(int member, std::span<std::byte> bytes) {
  StreamHead& box = memory_.stream(memory_.self(), member);
  const std::byte* ring = memory_.ring(memory_.self(), member);
  const size_t ring_bytes = memory_.ring_bytes();
  const uint64_t read = box.bytes_read.load(std::memory_order_relaxed);
  const uint64_t written = box.bytes_written.load(std::memory_order_acquire);
  const size_t num_bytes = std::min<size_t>(bytes.size(), written - read);
  if (num_bytes == 0) return 0;
  const size_t begin = read % ring_bytes;
  const size_t before_wrap = std::min(num_bytes, ring_bytes - begin);
  std::memcpy(bytes.data(), ring + begin, before_wrap);
  std::memcpy(bytes.data() + before_wrap, ring, num_bytes - before_wrap);
  box.bytes_read.store(read + num_bytes, std::memory_order_release);
  // The sender waits for room only after it has filled the ring. The fence orders the store before
  // the load: either this rank sees the full ring or the sender sees the room.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (box.bytes_written.load(std::memory_order_relaxed) - read == ring_bytes) memory_.wake(member);
  return num_bytes;
}

bool NodeStreams::peek(int member, std::span<std::byte> bytes) const {
  const StreamHead& box = memory_.stream(memory_.self(), member);
  const std::byte* ring = memory_.ring(memory_.self(), member);
  const uint64_t read = box.bytes_read.load(std::memory_order_relaxed);
  if (box.bytes_written.load(std::memory_order_acquire) - read < bytes.size()) return false;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = ring[(read + i) % memory_.ring_bytes()];
  return true;
}

void NodeStreams::send_control(int member, const ControlMessage& message) {
  constexpr uint64_t kReserved = 2;  // for an abort and a goodbye, each sent at most once
  const std::lock_guard lock(control_mutex_);
  StreamHead& box = memory_.stream(member, memory_.self());
  const uint64_t written = box.messages_written.load(std::memory_order_relaxed);
  const uint64_t unread = written - box.messages_read.load(std::memory_order_acquire);
  const bool is_last_word =
      message.kind == ControlMessage::Kind::kAbort || message.kind == ControlMessage::Kind::kLeft;
  if (unread >= StreamHead::kNumMessages - (is_last_word ? 0 : kReserved)) return;
  box.messages[written % StreamHead::kNumMessages] = message;
  box.messages_written.store(written + 1, std::memory_order_release);
  memory_.head(member).messages_to_me.fetch_add(1, std::memory_order_release);
  memory_.wake(member);
}

bool NodeStreams::has_new_control() {
  const uint64_t sent = memory_.head(memory_.self()).messages_to_me.load(std::memory_order_acquire);
  if (sent == messages_seen_) return false;
  messages_seen_ = sent;
  return true;
}

std::optional<ControlMessage> NodeStreams::take_control(int member) {
  StreamHead& box = memory_.stream(memory_.self(), member);
  const uint64_t read = box.messages_read.load(std::memory_order_relaxed);
  if (read == box.messages_written.load(std::memory_order_acquire)) return std::nullopt;
  const ControlMessage message = box.messages[read % StreamHead::kNumMessages];
  box.messages_read.store(read + 1, std::memory_order_release);
  return message;
}

}  // namespace crossdock::comm
