// The MPI communicator in a build without MPI.
#include <gtest/gtest.h>

#include "crossdock/mpi.hpp"

namespace crossdock {
namespace {

TEST(MpiAbsent, IsSaidWithItsReason) {
  EXPECT_FALSE(mpi_is_built());
  try {
    make_mpi_communicator();
    FAIL() << "should have thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_EQ(std::string(error.what()).rfind("this build of Crossdock has no MPI: ", 0), 0u);
  }
}

}  // namespace
}  // namespace crossdock
