#pragma once

#include <mpi.h>

#include <functional>
#include <memory>
#include <vector>

#include "comm/control_message.hpp"

namespace crossdock::comm {

/// The control messages of one communicator, sent with MPI.
class MpiControl final : public ControlChannel {
 public:
  /// Needs exclusive use of `communicator`.
  explicit MpiControl(MPI_Comm communicator);
  ~MpiControl() override;
  MpiControl(const MpiControl&) = delete;
  MpiControl& operator=(const MpiControl&) = delete;

  void send(int peer, const ControlMessage& message) override;
  void send_to_all_others(const ControlMessage& message) override;
  void say_goodbye(const ControlMessage& message) const override;
  void poll(const std::function<void(int sender, const ControlMessage&)>& handle) override;

 private:
  struct Outgoing {
    MPI_Request request = MPI_REQUEST_NULL;
    std::shared_ptr<ControlMessage> message;
  };

  void post_receive();
  MPI_Request post_send(int peer, const ControlMessage& message) const;
  void forget_what_was_sent();

  MPI_Comm communicator_;
  std::vector<int> peers_;  // all other ranks
  MPI_Request receive_ = MPI_REQUEST_NULL;
  std::shared_ptr<ControlMessage> incoming_;
  std::vector<Outgoing> outgoing_;
};

}  // namespace crossdock::comm
