#include <atomic>
#include <thread>
#include <utility>

#include "comm/failure.hpp"
#include "core/check.hpp"
#include "core/threading.hpp"
#include "crossdock/threads.hpp"

namespace crossdock {
namespace {

/// The result of the body on each rank.
struct Outcomes {
  std::vector<std::exception_ptr> errors;  // [P]
  std::atomic<int> first_to_fail{-1};
};

void run_rank(Group& group, const std::function<void(Group&)>& body, Outcomes& outcomes) {
  const auto failed_with = [&](std::string_view reason) {
    int nobody = -1;
    outcomes.first_to_fail.compare_exchange_strong(nobody, group.rank());
    outcomes.errors[static_cast<size_t>(group.rank())] = std::current_exception();
    group.leave(concat("it threw: ", reason));
  };
  try {
    body(group);
    group.leave(comm::kReturned);
  } catch (const std::exception& error) {
    failed_with(error.what());
  } catch (...) {
    failed_with("a non-standard exception");
  }
}

void run_all(int size, const std::function<void(Group&)>& body, const ThreadOptions& options,
             Outcomes& outcomes) {
  std::vector<std::unique_ptr<Group>> groups;
  for (auto& communicator : make_thread_communicators(size, options)) {
    groups.push_back(std::make_unique<Group>(std::move(communicator), options.group));
  }
  outcomes.errors.resize(groups.size());
  const detail::PoolWait waiting;  // until the threads are joined
  std::vector<std::jthread>
      threads;  // joined before the groups are destroyed, even if one cannot start
  try {
    for (auto& group : groups) {
      threads.emplace_back([&] { run_rank(*group, body, outcomes); });
    }
  } catch (const std::exception& error) {
    for (size_t rank = threads.size(); rank < groups.size(); ++rank) {
      groups[rank]->leave("its thread could not be started");
    }
    throw Error(ErrorCode::kUnsupported, concat("cannot start ", size, " threads: ", error.what()));
  }
}

}  // namespace

std::vector<std::exception_ptr> try_ranks(int size, const std::function<void(Group&)>& body,
                                          const ThreadOptions& options) {
  Outcomes outcomes;
  run_all(size, body, options, outcomes);
  return std::move(outcomes.errors);
}

void run_ranks(int size, const std::function<void(Group&)>& body, const ThreadOptions& options) {
  Outcomes outcomes;
  run_all(size, body, options, outcomes);
  const int first = outcomes.first_to_fail;
  if (first >= 0) std::rethrow_exception(outcomes.errors[static_cast<size_t>(first)]);
}

}  // namespace crossdock
