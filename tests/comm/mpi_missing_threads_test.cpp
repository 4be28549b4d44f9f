// If no thread can be started, no MPI communicator is made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"
#include "crossdock/mpi.hpp"
#include "support/missing_threads.hpp"

namespace crossdock {
namespace {

TEST(MpiMissingThreads, ACommunicatorWithoutAThreadIsAnError) {
  Group group(make_mpi_communicator());
  std::optional<MissingThreads> missing(std::in_place);
  EXPECT_THAT([] { make_mpi_communicator(); },
              testing::ThrowsMessage<Error>(
                  testing::AllOf(testing::HasSubstr("cannot start a thread"),
                                 testing::HasSubstr("all processes to make a communicator"))));
  missing.reset();
  Group again(make_mpi_communicator());
  again.agree({.operation = "meet"});
  group.agree({.operation = "meet"});
}

}  // namespace
}  // namespace crossdock
