#pragma once

#include <csignal>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "crossdock/extend/communicator.hpp"

namespace crossdock {

/// A communicator of processes that kills its process instead of making a certain exchange.
class FatalCommunicator : public Communicator {
 public:
  explicit FatalCommunicator(std::unique_ptr<Communicator> inner) : inner_(std::move(inner)) {}

  /// The exchange after this many more is fatal. By default none is.
  void set_exchanges_left(int num_exchanges) { exchanges_left_ = num_exchanges; }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string_view name() const override { return inner_->name(); }
  const Topology& topology() const override { return inner_->topology(); }
  int64_t max_bytes_in_flight() const override { return inner_->max_bytes_in_flight(); }
  std::string note() const override { return inner_->note(); }
  Traffic traffic() const override { return inner_->traffic(); }
  std::unique_ptr<Communicator> subgroup(std::span<const int> members) override {
    return inner_->subgroup(members);
  }
  void abort(const Error& cause) override { inner_->abort(cause); }
  void leave(std::string_view reason) override { inner_->leave(reason); }

  void all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                    std::span<const int64_t> recv_offsets, const WaitContext& wait) override {
    count();
    inner_->all_gather_v(send, recv, recv_offsets, wait);
  }
  void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                    const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                    const WaitContext& wait) override {
    count();
    inner_->all_to_all_v(send, send_offsets, recv, recv_offsets, wait);
  }

 private:
  void count() {
    if (exchanges_left_-- == 0) std::raise(SIGKILL);
  }

  std::unique_ptr<Communicator> inner_;
  int exchanges_left_ = std::numeric_limits<int>::max();
};

}  // namespace crossdock
