#include "comm/served_connection.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/agreed_failure.hpp"
#include "core/check.hpp"
#include "core/process_state.hpp"
#include "core/threading.hpp"

namespace crossdock::comm {
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
