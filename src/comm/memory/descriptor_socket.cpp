#include "comm/memory/descriptor_socket.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/process.hpp"
#include "core/threading.hpp"

namespace crossdock::comm {

Secret make_secret() {
  Secret secret;
  size_t done = 0;
  while (done < secret.size()) {
    const ssize_t got = getrandom(secret.data() + done, secret.size() - done, 0);
    if (got < 0 && errno != EINTR) {
      throw Error(ErrorCode::kUnsupported,
                  concat("cannot get random bytes: ", std::strerror(errno)));
    }
    if (got > 0) done += static_cast<size_t>(got);
  }
  return secret;
}

bool is_equal(const Secret& a, const Secret& b) {
  std::byte difference{0};
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

namespace {

constexpr size_t kMostWaiting = 256;  // connections beyond this are dropped

struct UnixAddress {
  sockaddr_un storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// In the abstract namespace, which begins with a zero.
UnixAddress to_unix_address(const Secret& name) {
  std::string text = "crossdock-";
  for (const std::byte one : name) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[std::to_integer<int>(one) / 16];
    text += kDigits[std::to_integer<int>(one) % 16];
  }
  UnixAddress native;
  native.storage.sun_family = AF_UNIX;
  std::memcpy(native.storage.sun_path + 1, text.data(), text.size());
  native.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return native;
}

Descriptor open_unix_socket() {
  return Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

[[noreturn]] void throw_last_error(ErrorCode code, const char* what) {
  throw Error(code, concat(what, ": ", std::strerror(errno)));
}

bool may_succeed_later(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

// Whether the process at the other end runs as the same user.
bool is_own_user(const Descriptor& socket) {
  ucred other{};
  socklen_t length = sizeof other;
  return getsockopt(socket.number(), SOL_SOCKET, SO_PEERCRED, &other, &length) == 0 &&
         other.uid == geteuid();
}

// A message of one plain struct, with room for one descriptor.
struct Message {
  alignas(cmsghdr) std::byte control[CMSG_SPACE(sizeof(int))] = {};
  iovec payload{};
  msghdr header{};

  template <typename Body>
  explicit Message(Body& body) : payload{&body, sizeof body} {
    header.msg_iov = &payload;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
};

// The descriptor in a message that has been received, if any.
Descriptor descriptor_in(msghdr& header) {
  const cmsghdr* part = CMSG_FIRSTHDR(&header);
  if (part == nullptr || part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS ||
      part->cmsg_len != CMSG_LEN(sizeof(int))) {
    return {};
  }
  int number = -1;
  std::memcpy(&number, CMSG_DATA(part), sizeof number);
  return Descriptor(number);
}

DescriptorConnection::Sending outcome_of(ssize_t num_sent) {
  using Sending = DescriptorConnection::Sending;
  if (num_sent >= 0) return Sending::kDone;
  const bool is_full = may_succeed_later(errno) || errno == ENOBUFS || errno == ETOOMANYREFS;
  return is_full ? Sending::kLater : Sending::kGone;
}

}  // namespace

DescriptorReceipt DescriptorReceipt::of_failure(int64_t index, std::string_view reason) {
  if (reason.empty()) reason = "unknown reason";
  DescriptorReceipt receipt{.index = index};
  reason.copy(receipt.failure.data(), receipt.failure.size() - 1);
  return receipt;
}

DescriptorConnection::DescriptorConnection(const DescriptorAddress& address)
    : socket_(open_unix_socket()) {
  const UnixAddress native = to_unix_address(address.name);
  if (!socket_.is_open() || ::connect(socket_.number(), native.get(), native.length) != 0) {
    throw_last_error(ErrorCode::kCommunication, "cannot connect to a process on this node");
  }
  const Secret& secret = address.secret;
  if (::send(socket_.number(), secret.data(), secret.size(), MSG_NOSIGNAL) < 0) {
    throw_last_error(ErrorCode::kCommunication, "cannot write to a process on this node");
  }
}

DescriptorConnection::Sending DescriptorConnection::send(const Descriptor& descriptor,
                                                         DescriptorLabel label) const {
  Message message(label);
  cmsghdr* part = CMSG_FIRSTHDR(&message.header);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof(int));
  const int sent = descriptor.number();
  std::memcpy(CMSG_DATA(part), &sent, sizeof sent);
  return outcome_of(::sendmsg(socket_.number(), &message.header, MSG_NOSIGNAL));
}

DescriptorConnection::Sending DescriptorConnection::send_receipt(
    const DescriptorReceipt& receipt) const {
  return outcome_of(::send(socket_.number(), &receipt, sizeof receipt, MSG_NOSIGNAL));
}

std::optional<DescriptorReceipt> DescriptorConnection::receive_receipt() const {
  DescriptorReceipt receipt;
  const ssize_t num_bytes = ::recv(socket_.number(), &receipt, sizeof receipt, 0);
  if (num_bytes != sizeof receipt) return std::nullopt;
  receipt.failure.back() = 0;
  return receipt;
}

bool DescriptorConnection::is_closed() const {
  pollfd wanted{.fd = socket_.number(), .events = 0, .revents = 0};
  return ::poll(&wanted, 1, 0) > 0 && (wanted.revents & (POLLHUP | POLLERR)) != 0;
}

std::optional<DescriptorConnection::Received> DescriptorConnection::receive() const {
  Received received;
  Message message(received.label);
  const auto read = [&] { return ::recvmsg(socket_.number(), &message.header, MSG_CMSG_CLOEXEC); };
  ssize_t num_bytes = read();
  // Reported once, before what was sent, if the sender closed the connection with receipts unread.
  if (num_bytes < 0 && errno == ECONNRESET) num_bytes = read();
  if (num_bytes < 0 && may_succeed_later(errno)) return std::nullopt;
  if (num_bytes < 0) {
    throw_last_error(ErrorCode::kCommunication, "cannot receive a file descriptor");
  }
  received.passed = descriptor_in(message.header);
  if (num_bytes != sizeof received.label) {
    throw Error(ErrorCode::kCommunication, "a process on this node has closed its connection");
  }
  return received;
}

const Descriptor& DescriptorConnection::Received::descriptor() const {
  if (!passed.is_open()) {
    throw Error(ErrorCode::kCommunication,
                "a file descriptor was not passed; is that forbidden, or the limit on open files "
                "(ulimit -n) reached?");
  }
  return passed;
}

DescriptorListener::DescriptorListener()
    : address_{.name = make_secret(), .secret = make_secret()}, socket_(open_unix_socket()) {
  const UnixAddress native = to_unix_address(address_.name);
  if (!socket_.is_open() || ::bind(socket_.number(), native.get(), native.length) != 0 ||
      ::listen(socket_.number(), SOMAXCONN) != 0) {
    throw_last_error(ErrorCode::kUnsupported, "cannot listen on a Unix domain socket");
  }
}

std::vector<DescriptorConnection> DescriptorListener::accept() {
  while (true) {
    Descriptor connected(
        ::accept4(socket_.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!connected.is_open()) break;
    if (is_own_user(connected)) waiting_.emplace_back(std::move(connected));
  }
  if (waiting_.size() > kMostWaiting) {
    waiting_.erase(waiting_.begin(), waiting_.end() - static_cast<int64_t>(kMostWaiting));
  }
  std::vector<DescriptorConnection> accepted;
  std::erase_if(waiting_, [&](DescriptorConnection& connection) {
    Secret secret{};
    const ssize_t num_bytes =
        ::recv(connection.socket_.number(), secret.data(), secret.size(), MSG_DONTWAIT);
    if (num_bytes < 0 && may_succeed_later(errno)) return false;
    const bool is_known = num_bytes == std::ssize(secret) && is_equal(secret, address_.secret);
    if (is_known) accepted.push_back(std::move(connection));
    return true;
  });
  return accepted;
}

namespace {

// While this object exists, its thread and threads started by it block all signals.
class AllSignalsBlock {
 public:
  AllSignalsBlock() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_mask_);
  }
  ~AllSignalsBlock() { pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr); }
  AllSignalsBlock(const AllSignalsBlock&) = delete;
  AllSignalsBlock& operator=(const AllSignalsBlock&) = delete;

 private:
  sigset_t old_mask_{};
};

}  // namespace

// The service thread of a process and the connections that it serves.
class DescriptorService {
 public:
  void add(ServedConnection& connection);
  void remove(ServedConnection& connection);
  void stop_at_exit();

 private:
  void start();
  void run();
  void serve(std::unique_lock<std::mutex>& lock, ServedConnection* connection);
  void wake() const { eventfd_write(wake_.number(), 1); }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ServedConnection*> connections_;
  const ServedConnection* busy_ = nullptr;  // whose handlers are running
  Descriptor wake_;                         // an eventfd: tells the thread to check its state
  bool is_running_ = false;
  bool is_stopping_ = false;
};

namespace {

constinit PerProcess<DescriptorService> descriptor_service;

}  // namespace

void DescriptorService::add(ServedConnection& connection) {
  const std::lock_guard lock(mutex_);
  if (!is_running_ && !is_stopping_) start();
  connections_.push_back(&connection);
  wake();
}

void DescriptorService::remove(ServedConnection& connection) {
  std::unique_lock lock(mutex_);
  std::erase(connections_, &connection);
  wake();
  changed_.wait(lock, [&] { return busy_ != &connection; });
}

void DescriptorService::start() {
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.is_open()) {
    throw Error(ErrorCode::kUnsupported,
                "cannot open an eventfd; is the limit on open files (ulimit -n) reached?");
  }
  // Handlers run in the reverse order of registration: this one before those of libraries that the
  // handlers of connections use, such as CUDA.
  static std::once_flag once;
  std::call_once(once, [] { std::atexit([] { descriptor_service.get().stop_at_exit(); }); });
  const AllSignalsBlock blocked;
  start_thread("memory of other processes", [this] { run(); }).detach();
  is_running_ = true;
}

// Waits only briefly for the thread: a handler may need a lock that the exiting thread holds.
void DescriptorService::stop_at_exit() {
  constexpr std::chrono::seconds kLongestWait{1};
  std::unique_lock lock(mutex_);
  if (!is_running_) return;
  is_stopping_ = true;
  wake();
  changed_.wait_for(lock, kLongestWait, [this] { return !is_running_; });
}

void DescriptorService::run() {
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    const std::vector<ServedConnection*> polled = connections_;
    std::vector<pollfd> events{{.fd = wake_.number(), .events = POLLIN, .revents = 0}};
    for (const ServedConnection* one : polled) {
      events.push_back({.fd = one->polled_socket(), .events = one->awaited_events(), .revents = 0});
    }
    lock.unlock();
    ::poll(events.data(), events.size(), /*timeout=*/-1);
    lock.lock();
    eventfd_t num_wakes = 0;
    eventfd_read(wake_.number(), &num_wakes);
    for (size_t i = 0; i < polled.size() && !is_stopping_; ++i) {
      if (events[i + 1].revents != 0) serve(lock, polled[i]);
    }
  }
  is_running_ = false;
  changed_.notify_all();
}

void DescriptorService::serve(std::unique_lock<std::mutex>& lock, ServedConnection* connection) {
  if (std::ranges::find(connections_, connection) == connections_.end()) return;  // removed
  busy_ = connection;
  lock.unlock();
  connection->serve();
  lock.lock();
  busy_ = nullptr;
  changed_.notify_all();
}

ServedConnection::ServedConnection(DescriptorConnection connection, Handlers handlers)
    : connection_(std::move(connection)), handlers_(std::move(handlers)) {
  descriptor_service.get().add(*this);
}

ServedConnection::~ServedConnection() {
  descriptor_service.get().remove(*this);
}

short ServedConnection::awaited_events() const {
  return unsent_ ? POLLOUT : POLLIN;
}

void ServedConnection::serve() {
  if (unsent_) answer();
  if (unsent_) return;
  std::optional<DescriptorConnection::Received> received;
  try {
    received = connection_.receive();
  } catch (const Error&) {
    is_over_ = true;
    handlers_.closed();
    return;
  }
  if (!received) return;
  unsent_ = take(*received);
  answer();
}

DescriptorReceipt ServedConnection::take(const DescriptorConnection::Received& received) {
  try {
    handlers_.take(received);
    return {.index = received.label.index};
  } catch (...) {
    return DescriptorReceipt::of_failure(received.label.index, current_error().what());
  }
}

void ServedConnection::answer() {
  if (connection_.send_receipt(*unsent_) == DescriptorConnection::Sending::kLater) return;
  unsent_.reset();
}

}  // namespace crossdock::comm
