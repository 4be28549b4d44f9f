#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/agreement/rendezvous.hpp"
#include "core/event_ring.hpp"
#include "crossdock/error.hpp"
#include "crossdock/group.hpp"

namespace crossdock::comm {

/// CROSSDOCK_REPORT, or empty.
std::string default_report_file();

/// The event recorders of the other ranks on this node, to report on a rank that can no longer do
/// so itself.
class PeerEvents {
 public:
  /// Puts the location of this rank's events into the header, if they are shared.
  static void describe(EventRecorder& recorder, RendezvousHeader& header);
  /// Opens the events that ranks on this node share. Does so once, at the first rendezvous.
  void open(std::span<const RendezvousHeader> headers, const Communicator& communicator);
  /// Null if unknown.
  detail::EventRing* of(int rank);

 private:
  std::vector<std::unique_ptr<detail::EventRing>> rings_;  // [P] after open
};

/// The events of the other ranks of a group on this node.
PeerEvents& peer_events_of(Group& group);

/// Appends one line of JSON to the group's report file, if it has one: this rank, the error and its
/// recent events, oldest first; an event in progress has no end. Also writes the culprit's line, if
/// the culprit is on this node and the line has not been written. Ranks may share the file. A file
/// that cannot be written is ignored: the error itself matters more.
void write_flight_report(Group& group, const std::string& message, const ErrorContext& context);

}  // namespace crossdock::comm
