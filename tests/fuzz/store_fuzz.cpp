// The exchange of blobs: whatever arrives at rank 0's port, or as rank 0's answer, it ends with
// blobs or an Error.
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "comm/polled/control_message.hpp"
#include "comm/sockets/directory.hpp"
#include "comm/sockets/store.hpp"
#include "fuzz/input.hpp"

namespace crossdock::comm {
namespace {

using Bytes = std::vector<std::byte>;
using std::chrono::milliseconds;

constexpr uint64_t kKey = 5;
constexpr int kSize = 3;
constexpr milliseconds kDeadline{20};

void append(Bytes& bytes, const auto& value) {
  const auto more = std::as_bytes(std::span(&value, 1));
  bytes.insert(bytes.end(), more.begin(), more.end());
}

void append_some(Bytes& bytes, fuzz::Input& input, size_t count) {
  const Bytes more = input.bytes(count);
  bytes.insert(bytes.end(), more.begin(), more.end());
}

ControlMessage failure_from(fuzz::Input& input) {
  ControlMessage message{.kind = static_cast<ControlMessage::Kind>(input.integer(-1, 3)),
                         .code = static_cast<int32_t>(input.integer(-1, 11)),
                         .culprit = static_cast<int32_t>(input.integer(-2, kSize)),
                         .reporter = static_cast<int32_t>(input.integer(-2, kSize)),
                         .num_pending = static_cast<int32_t>(input.integer(-1, 17))};
  const Bytes text = input.bytes(static_cast<size_t>(input.integer(0, 1024)));
  std::memcpy(message.text.data(), text.data(), text.size());
  return message;
}

Bytes request_from(fuzz::Input& input) {
  Bytes bytes;
  StoreRequest request{.version = kSocketsVersion,
                       .key = kKey,
                       .rank = static_cast<int32_t>(input.integer(0, kSize)),
                       .size = kSize,
                       .blob_bytes = static_cast<uint32_t>(input.integer(0, 200))};
  if (input.one_in(8)) request.version = input.take<uint32_t>();
  if (input.one_in(8)) request.blob_bytes = input.take<uint32_t>();
  append(bytes, request);
  if (request.blob_bytes == 0) append(bytes, failure_from(input));
  append_some(bytes, input, std::min<size_t>(request.blob_bytes, 5000));
  if (input.one_in(4)) append(bytes, failure_from(input));
  return bytes;
}

Bytes replies_from(fuzz::Input& input) {
  Bytes bytes;
  while (!input.is_empty() && bytes.size() < 20000) {
    StoreReply reply{.kind = static_cast<StoreReply::Kind>(input.integer(0, 5))};
    Bytes payload;
    if (reply.kind == StoreReply::Kind::kFailed) {
      append(payload, failure_from(input));
    } else if (reply.kind == StoreReply::Kind::kBlobs) {
      for (int rank = 0; rank < kSize; ++rank) {
        const auto count = static_cast<uint32_t>(input.integer(0, 100));
        append(payload, count);
        append_some(payload, input, count);
      }
    } else {
      append_some(payload, input, static_cast<size_t>(input.integer(0, 64)));
    }
    reply.payload_bytes = input.one_in(16) ? input.take<uint64_t>() : payload.size();
    append(bytes, reply);
    bytes.insert(bytes.end(), payload.begin(), payload.end());
  }
  return bytes;
}

void send_all(const Socket& socket, const Bytes& bytes) {
  send(socket.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void run_rank(int rank, int port, std::atomic<bool>& is_over) {
  StoreArgs args{.host = "127.0.0.1",
                 .port = port,
                 .key = kKey,
                 .rank = rank,
                 .size = kSize,
                 .blob = Bytes(100, std::byte{1}),
                 .deadline = kDeadline,
                 .interrupt = [&] { return is_over.load(); }};
  try {
    if (exchange_blobs(args).size() != static_cast<size_t>(kSize)) std::abort();
  } catch (const Error&) {
  }
}

/// Rank 0 hears one or two requests.
void ask_store(fuzz::Input& input) {
  static int port = 20000 + static_cast<int>(getpid() % 20000);
  port = port < 60000 ? port + 1 : 20000;
  std::atomic<bool> is_over = false;
  std::jthread store([&] { run_rank(0, port, is_over); });
  std::vector<Socket> sockets;
  for (int i = 0; i < 2 && !input.is_empty(); ++i) {
    const Bytes request = request_from(input);
    for (int attempt = 0; attempt < 100; ++attempt) {
      int error = 0;
      Socket socket = start_connecting(*parse_address("127.0.0.1", port), error);
      pollfd ready{.fd = socket.descriptor(), .events = POLLOUT, .revents = 0};
      if (error == 0 && ::poll(&ready, 1, 100) == 1 && connect_error(socket) == 0) {
        send_all(socket, request);
        sockets.push_back(std::move(socket));
        break;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  std::this_thread::sleep_for(milliseconds(1));
  is_over = true;
}

/// Rank 1 hears the answer of a store that the input makes up.
void answer_client(fuzz::Input& input) {
  const Socket listener = std::move(*listen_at(*parse_address("127.0.0.1", 0)));
  const Bytes replies = replies_from(input);
  std::atomic<bool> is_over = false;
  std::jthread client([&] { run_rank(1, address_of(listener).port, is_over); });
  pollfd ready{.fd = listener.descriptor(), .events = POLLIN, .revents = 0};
  ::poll(&ready, 1, 1000);
  const auto socket = accept_from(listener);
  if (socket) send_all(*socket, replies);
  std::this_thread::sleep_for(milliseconds(1));
  is_over = true;
}

}  // namespace
}  // namespace crossdock::comm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  crossdock::fuzz::Input input(data, size);
  if (input.one_in(2)) {
    crossdock::comm::ask_store(input);
  } else {
    crossdock::comm::answer_client(input);
  }
  return 0;
}
