// Blobs, and frames from a peer or a stranger: they are understood or refused, and nothing else
// happens.
#include <sys/socket.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "comm/sockets/directory.hpp"
#include "comm/sockets/endpoint.hpp"
#include "comm/sockets/store.hpp"
#include "fuzz/input.hpp"

namespace crossdock::comm {
namespace {

using Bytes = std::vector<std::byte>;

constexpr uint64_t kCommunicator = 1;

void append(Bytes& bytes, const auto& value) {
  const auto more = std::as_bytes(std::span(&value, 1));
  bytes.insert(bytes.end(), more.begin(), more.end());
}

void append_frame(Bytes& bytes, FrameHeader header, std::span<const std::byte> payload) {
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  append(bytes, header);
  bytes.insert(bytes.end(), payload.begin(), payload.end());
}

/// Rank 0 of two; rank 1 is the input.
class Listener {
 public:
  Listener() {
    Socket socket = std::move(*listen_at(*parse_address("127.0.0.1", 0)));
    address_ = address_of(socket);
    SocketsWorld world{.rank = 0, .blobs = {blob(address_), blob(address_)}, .id = 7};
    secret_ = world.blobs[0].secret;
    endpoint_ = std::make_unique<Endpoint>(std::move(socket), std::make_unique<Directory>(secret_),
                                           std::move(world), SocketsOptions{.window_bytes = 4096});
    endpoint_->open_communicator(kCommunicator);
  }

  void hear(const Bytes& bytes) {
    int error = 0;
    const Socket socket = start_connecting(address_, error);
    if (error != 0) return;
    send(socket.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    for (int i = 0; i < 3; ++i) {
      endpoint_->poll();
      while (endpoint_->take_control(kCommunicator)) {
      }
      std::array<std::byte, 100> received;
      endpoint_->read(kCommunicator, 1, received);
      endpoint_->write(kCommunicator, 1, received);
    }
    if (endpoint_->end_of(0)) std::abort();
  }

  Hello hello() const {
    return {.version = kSocketsVersion, .rank = 1, .world = 7, .secret = secret_};
  }

 private:
  static SocketsBlob blob(const SocketAddress& address) {
    SocketsBlob blob;
    blob.process = identify_this_process();
    blob.address = address;
    blob.secret = make_secret();
    blob.window_bytes = 4096;
    return blob;
  }

  SocketAddress address_;
  Secret secret_{};
  std::unique_ptr<Endpoint> endpoint_;
};

/// A stream of frames: mostly of a known kind and with the size that the kind has.
Bytes stream_from(fuzz::Input& input, const Hello& hello) {
  Bytes stream;
  if (!input.one_in(4))
    append_frame(stream, {.kind = FrameHeader::Kind::kHello}, std::as_bytes(std::span(&hello, 1)));
  while (!input.is_empty() && stream.size() < 60000) {
    FrameHeader header{.kind = static_cast<FrameHeader::Kind>(input.integer(0, 6)),
                       .comm_id = static_cast<uint64_t>(input.integer(0, 3)),
                       .position = static_cast<uint64_t>(input.integer(0, 300))};
    if (input.one_in(16)) header = input.take<FrameHeader>();
    Bytes payload;
    if (header.kind == FrameHeader::Kind::kControl) {
      ControlMessage message{.kind = static_cast<ControlMessage::Kind>(input.integer(-1, 5)),
                             .code = static_cast<int32_t>(input.integer(-1, 12)),
                             .culprit = static_cast<int32_t>(input.integer(-2, 3)),
                             .reporter = static_cast<int32_t>(input.integer(-2, 3)),
                             .num_pending = static_cast<int32_t>(input.integer(-1, 17))};
      const Bytes text = input.bytes(static_cast<size_t>(input.integer(0, 40)));
      std::memcpy(message.text.data(), text.data(), text.size());
      append(payload, message);
      if (input.one_in(8)) payload.resize(static_cast<size_t>(input.integer(0, 2000)));
    } else if (header.kind == FrameHeader::Kind::kHello) {
      append(payload, input.one_in(2) ? hello : input.take<Hello>());
    } else if (header.kind == FrameHeader::Kind::kData || input.one_in(8)) {
      payload.resize(static_cast<size_t>(input.integer(0, 5000)));
    }
    append_frame(stream, header, payload);
    if (input.one_in(8)) stream.resize(stream.size() - static_cast<size_t>(input.integer(0, 31)));
  }
  return stream;
}

}  // namespace
}  // namespace crossdock::comm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossdock;
  fuzz::Input input(data, size);
  switch (input.integer(0, 3)) {
    case 0:
      comm::decode_blob(input.bytes(size));
      break;
    case 1: {
      const int num_ranks = static_cast<int>(input.integer(1, 5));
      const auto blobs = comm::read_blobs(input.bytes(size), num_ranks);
      if (!blobs.empty() && blobs.size() != static_cast<size_t>(num_ranks)) std::abort();
      break;
    }
    default: {
      comm::Listener listener;
      listener.hear(comm::stream_from(input, listener.hello()));
    }
  }
  return 0;
}
