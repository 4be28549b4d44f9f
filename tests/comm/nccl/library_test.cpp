// Opening libnccl. No GPU is needed.

#include "comm/nccl/library.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(NcclLibrary, HasAllFunctionsWhereItIsInstalled) {
  cuda::NcclLibrary library;
  try {
    library = cuda::open_nccl("libnccl.so.2");
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  EXPECT_STREQ(library.get_error_string(ncclSuccess), "no error");
  EXPECT_THAT(message_of([&] { cuda::check_nccl(library, ncclSystemError, "ncclSend"); },
                         ErrorCode::kCommunication),
              HasSubstr("ncclSend: unhandled system error"));
}

TEST(NcclLibrary, AMissingOneSaysWhatToDo) {
  EXPECT_THAT(message_of([] { cuda::open_nccl("/nowhere/libnccl.so.2"); }, ErrorCode::kUnsupported),
              AllOf(HasSubstr("cannot open /nowhere/libnccl.so.2"), HasSubstr("install it"),
                    HasSubstr("CROSSDOCK_NCCL_LIBRARY")));
}

TEST(NcclLibrary, AnotherLibraryIsRefused) {
  EXPECT_EQ(message_of([] { cuda::open_nccl("libm.so.6"); }, ErrorCode::kUnsupported),
            "libm.so.6 has no function ncclGetVersion");
}

}  // namespace
}  // namespace crossdock
