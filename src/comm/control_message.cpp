#include "comm/control_message.hpp"

#include <algorithm>

namespace crossdock::comm {
namespace {

template <size_t N>
void set_text(std::array<char, N>& target, std::string_view text) {
  const size_t length = std::min(text.size(), N - 1);
  std::copy_n(text.begin(), length, target.begin());
  target[length] = '\0';
}

template <size_t N>
bool has_end(const std::array<char, N>& text) {
  return std::find(text.begin(), text.end(), '\0') != text.end();
}

}  // namespace

ControlMessage abort_message(const Failure& failure) {
  ControlMessage message;
  message.kind = ControlMessage::Kind::kAbort;
  message.code = static_cast<int32_t>(failure.code);
  message.culprit = failure.culprit;
  message.reporter = failure.reporter;
  message.sequence = failure.sequence;
  set_text(message.operation, failure.operation);
  set_text(message.text, failure.text);
  return message;
}

Failure failure_from(const ControlMessage& abort_message) {
  return {.code = static_cast<ErrorCode>(abort_message.code),
          .culprit = abort_message.culprit,
          .reporter = abort_message.reporter,
          .sequence = abort_message.sequence,
          .operation = abort_message.operation.data(),
          .text = abort_message.text.data()};
}

ControlMessage left_message(std::string_view reason, uint64_t exchange, uint64_t num_begun) {
  ControlMessage message;
  message.kind = ControlMessage::Kind::kLeft;
  message.exchange = exchange;
  message.num_begun = num_begun;
  set_text(message.text, reason);
  return message;
}

bool is_valid(const ControlMessage& message, int size) {
  const auto is_rank = [size](int32_t rank) { return rank >= -1 && rank < size; };
  const auto kind = static_cast<int32_t>(message.kind);
  if (kind < 0 || kind > static_cast<int32_t>(ControlMessage::Kind::kWaiting)) return false;
  if (message.code < 0 || message.code > static_cast<int32_t>(ErrorCode::kOutOfMemory))
    return false;
  if (!is_rank(message.culprit) || !is_rank(message.reporter)) return false;
  if (message.num_pending < 0 ||
      message.num_pending > static_cast<int32_t>(ControlMessage::kMaxPending)) {
    return false;
  }
  const auto pending = message.pending_ranks();
  return std::all_of(pending.begin(), pending.end(),
                     [size](int32_t rank) { return rank >= 0 && rank < size; }) &&
         has_end(message.operation) && has_end(message.text);
}

}  // namespace crossdock::comm
