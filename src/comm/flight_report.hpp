#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/rendezvous.hpp"
#include "core/event_ring.hpp"
#include "crossdock/error.hpp"
#include "crossdock/group.hpp"

namespace crossdock::comm {

/// CROSSDOCK_REPORT, or empty.
std::string default_report_file();

/// The recorders of the other ranks of a node, for a report on one that cannot write it any more.
class PeerEvents {
 public:
  /// Puts into the header where the peers find the events of this rank, if they are shared.
  static void describe(EventRecorder& recorder, RendezvousHeader& header);
  /// At the first rendezvous: opens what the ranks of this node share.
  void open(std::span<const RendezvousHeader> headers, const Communicator& communicator);
  /// Null if they are not known.
  detail::EventRing* of(int rank);

 private:
  std::vector<std::unique_ptr<detail::EventRing>> rings_;  // [P] after open
};

/// Appends one line of JSON to the group's report file, if it has one: this rank, what went wrong,
/// and its last events, oldest first; an event under way has no end. The line of the culprit is
/// written too, if it is of this node and nobody has written it. Ranks that share the file do not
/// mix their lines. A file that cannot be written is passed over: the error itself matters more.
void write_flight_report(Group& group, const std::string& message, const ErrorContext& context);

}  // namespace crossdock::comm
