// The order in which the MPI communicator posts its sends and receives. This file intercepts its
// calls.
#include <gtest/gtest.h>
#include <mpi.h>

#include <string>
#include <vector>

#include "crossdock/group.hpp"
#include "crossdock/mpi.hpp"

namespace {

constexpr int kLongBytes = 1 << 20;
std::string posted;  // long messages: s for a send, r for a receive

}  // namespace

extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int peer, int tag,
                         MPI_Comm communicator, MPI_Request* request) {
  if (count >= kLongBytes) posted += 's';
  return PMPI_Isend(data, count, type, peer, tag, communicator, request);
}

extern "C" int MPI_Irecv(void* data, int count, MPI_Datatype type, int peer, int tag,
                         MPI_Comm communicator, MPI_Request* request) {
  if (count >= kLongBytes) posted += 'r';
  return PMPI_Irecv(data, count, type, peer, tag, communicator, request);
}

namespace crossdock {
namespace {

// A receive whose message has been announced answers immediately, and the data follow. Sends
// announced after that answer would wait for the data: the directions of a link would take turns.
TEST(MpiOrder, SendsAreAnnouncedBeforeReceivesAreAnswered) {
  Group group(make_mpi_communicator({.chunk_bytes = kLongBytes}));
  const Buffer send(int64_t{3} * kLongBytes * group.size());
  const Buffer recv(send.num_bytes());
  std::vector<int64_t> offsets = {0};
  for (int r = 0; r < group.size(); ++r) offsets.push_back(offsets.back() + 3 * kLongBytes);
  posted.clear();
  group.all_to_all_v({send.data(), send.num_bytes(), send.owner()}, offsets,
                     {recv.data(), recv.num_bytes(), recv.owner()}, offsets,
                     group.wait_context("exchange", 0));
  const size_t num_messages = size_t{3} * static_cast<size_t>(group.size() - 1);
  EXPECT_EQ(posted, std::string(num_messages, 's') + std::string(num_messages, 'r'));
}

}  // namespace
}  // namespace crossdock
