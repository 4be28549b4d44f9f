#include "comm/failure.hpp"

#include <exception>
#include <mutex>
#include <new>
#include <set>

#include "comm/waiting.hpp"
#include "core/check.hpp"

namespace crossdock::comm {

Failure late_failure(const LateRank& late, const WaitContext& wait) {
  const std::string call = concat(wait.operation, " (call ", wait.sequence, ")");
  const std::string missed =
      late.has_arrived ? concat(" for data from rank ", late.culprit, " in ", call,
                                " without progress; is that rank stuck, or the link to it down?")
                       : concat(" for rank ", late.culprit, " to arrive at ", call,
                                "; is it making the same calls?");
  return {.code = ErrorCode::kTimeout,
          .culprit = late.culprit,
          .reporter = late.reporter,
          .sequence = wait.sequence,
          .operation = wait.operation,
          .text = concat("waited ", to_seconds_text(late.waited), missed)};
}

Failure left_failure(int culprit, std::string_view reason, const WaitContext& wait) {
  return {.code = ErrorCode::kPeerFailed,
          .culprit = culprit,
          .reporter = -1,
          .sequence = wait.sequence,
          .operation = wait.operation,
          .text = concat("rank ", culprit, " left the group (", reason, ") before ", wait.operation,
                         " (call ", wait.sequence, ")")};
}

Failure failure_from(const Error& cause, int rank) {
  const ErrorContext& context = cause.context();
  const bool is_about_peers =
      cause.code() == ErrorCode::kTimeout || cause.code() == ErrorCode::kCommunication;
  return {.code = is_about_peers ? cause.code() : ErrorCode::kPeerFailed,
          .culprit = context.culprit < 0 ? rank : context.culprit,
          .reporter = rank,
          .sequence = context.sequence,
          .operation = context.operation,
          .text = cause.what()};
}

Error to_error(const Failure& failure, int rank, int size) {
  std::string message = concat("rank ", rank, " of ", size, ": ");
  if (failure.reporter >= 0 && failure.reporter != rank) {
    message += concat("rank ", failure.reporter, " gave up: ");
  }
  return Error(failure.code, message + failure.text,
               {.culprit = failure.culprit,
                .sequence = failure.sequence,
                .operation = interned(failure.operation)});
}

const char* interned(std::string_view name) {
  static std::mutex mutex;
  static auto* names =
      new std::set<std::string, std::less<>>;  // never freed: pointers into it stay valid
  const std::lock_guard lock(mutex);
  auto entry = names->find(name);
  if (entry == names->end()) entry = names->emplace(name).first;
  return entry->c_str();
}

}  // namespace crossdock::comm

namespace crossdock {

Error current_error() {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kOutOfMemory, "not enough memory"};
  } catch (const std::exception& error) {
    return {ErrorCode::kInternal, error.what()};
  } catch (...) {
    return {ErrorCode::kInternal, "an exception of unknown type"};
  }
}

}  // namespace crossdock
