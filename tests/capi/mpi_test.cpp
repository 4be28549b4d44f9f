// A group over the caller's MPI_Comm.
#include <gtest/gtest.h>
#include <mpi.h>

#include "capi/c_ranks.hpp"

namespace crossdock::capi_test {
namespace {

TEST(CApiMpi, AGroupOfAnMpiCommCarriesADispatchAndACombine) {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  crossdock_group* group = nullptr;
  EXPECT_OK(crossdock_group_from_mpi(&comm, nullptr, &group));
  auto info = made<crossdock_group_info>();
  EXPECT_OK(crossdock_group_describe(group, &info));
  EXPECT_STREQ(info.communicator, "mpi");
  reference::LayerInput layer{
      .config = {.num_experts = Case::E, .top_k = Case::K, .width = Case::D}};
  for (int rank = 0; rank < info.size; ++rank) layer.ranks.push_back(Case(rank).reference_input());
  const reference::LayerOutput wanted = reference::run_layer(layer);
  const auto r = static_cast<size_t>(info.rank);
  {
    const Case input(info.rank);
    const Planned planned(group, input);
    auto args = made<crossdock_dispatch_args>();
    args.x = tensor(input.x, input.T, Case::D);
    auto sent = made<crossdock_dispatch_result>();
    EXPECT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent));
    EXPECT_EQ(doubles(sent.rows.tensor), wanted.rows[r]);
    crossdock_output out{};
    EXPECT_OK(crossdock_combine(planned.dispatcher, planned.plan, &sent.rows.tensor, &out));
    EXPECT_EQ(doubles(out.tensor), wanted.out[r]);
    EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));
    EXPECT_OK(crossdock_output_release(&out, nullptr));
  }
  crossdock_group_destroy(group);
  MPI_Comm_free(&comm);
}

}  // namespace
}  // namespace crossdock::capi_test
