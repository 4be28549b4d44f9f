#include "comm/mpi/inquiry.hpp"

#include <algorithm>
#include <span>
#include <utility>

namespace crossdock::comm {
namespace {

// A waiting rank looks for questions every millisecond; the rest is a margin for loaded machines.
constexpr std::chrono::milliseconds kAnswerTime{500};

}  // namespace

MpiInquiry::MpiInquiry(Self self, MpiControl& control)
    : self_(std::move(self)), control_(control), begin_(Clock::now()) {
  for (const int peer : self_.pending) ask(peer);
}

void MpiInquiry::ask(int peer) {
  if (peer == self_.rank || !asked_.insert(peer).second) return;
  ControlMessage question;
  question.kind = ControlMessage::Kind::kQuestion;
  control_.send(peer, question);
}

void MpiInquiry::note_answer(int peer, const ControlMessage& answer) {
  answers_[peer] = answer;
  for (const int next : answer.pending_ranks()) ask(next);
}

bool MpiInquiry::is_over() const {
  return Clock::now() - begin_ > kAnswerTime;
}

MpiInquiry::Verdict MpiInquiry::verdict() const {
  const auto behind = std::min_element(
      answers_.begin(), answers_.end(),
      [](const auto& a, const auto& b) { return a.second.exchange < b.second.exchange; });
  const bool self_is_behind = behind == answers_.end() || self_.exchange <= behind->second.exchange;
  const auto waited_for =
      self_is_behind ? std::span<const int>(self_.pending) : behind->second.pending_ranks();
  Verdict verdict;
  const auto is_silent_peer = [&](int peer) { return is_silent(peer); };
  if (!self_is_behind) verdict.first_missed_by = behind->second;
  if (const auto it = std::find_if(waited_for.begin(), waited_for.end(), is_silent_peer);
      it != waited_for.end()) {
    verdict.culprit = *it;
  } else if (const auto any = std::find_if(asked_.begin(), asked_.end(), is_silent_peer);
             any != asked_.end()) {
    verdict.culprit = *any;
  } else {
    verdict.culprit = behind->first;
    verdict.first_missed_by.reset();
  }
  return verdict;
}

}  // namespace crossdock::comm
