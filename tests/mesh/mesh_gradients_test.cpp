// sum_gradients and global_grad_norm against sums over all tokens, computed on one rank. The values
// are whole numbers, so sums are exact in any order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <stdexcept>

#include "crossdock/mesh.hpp"
#include "crossdock/threads.hpp"
#include "support/message_of.hpp"

namespace crossdock {
namespace {

using testing::HasSubstr;

constexpr int64_t kDense = 6;
constexpr int64_t kReplicated = 4;
constexpr int64_t kShard = 3;  // elements of a split parameter on each tp rank
constexpr int64_t kInner = 2;  // elements of an expert on each etp rank

/// The contribution of token t to the gradient of element p of a parameter.
double term(char parameter, int64_t p, int64_t t, int pp) {
  return static_cast<double>((t * 7 + p * 3 + parameter * 2 + pp * 5) % 11 - 4);
}

/// The tokens of one pipeline stage, and the model they pass through.
struct Model {
  MeshLayout mesh;
  int64_t E;

  int64_t stage_size() const { return mesh.shape().world / mesh.shape().pp; }
  /// Rank r of a stage has 0 to 2 tokens.
  static int64_t first_token(int64_t rank_of_stage) {
    int64_t first = 0;
    for (int64_t r = 0; r < rank_of_stage; ++r) first += (r + 2) % 3;
    return first;
  }
  std::vector<int64_t> tokens_of(const std::vector<int>& ranks) const {
    std::vector<int64_t> tokens;
    for (const int rank : ranks) {
      const int64_t r = rank % stage_size();
      for (int64_t t = first_token(r); t < first_token(r + 1); ++t) tokens.push_back(t);
    }
    return tokens;
  }
  bool routes(int64_t token, int64_t expert) const {
    return token % E == expert || (token * 3 + 1) % E == expert;
  }
  int64_t first_expert(int64_t ep) const {
    return ep * (E / mesh.shape().ep) + std::min(ep, E % mesh.shape().ep);
  }
};

/// The gradients that one rank has.
struct Gradients {
  std::vector<float> dense;                // [kDense]
  std::vector<double> replicated;          // [kReplicated]
  std::vector<double> tensor_parallel;     // [kShard]
  std::vector<double> experts;             // [E_local, kInner]
  std::vector<double> experts_replicated;  // [E_local]

  struct Views {
    TensorView dense, replicated, tensor_parallel, experts, experts_replicated;
    MeshGradients lists() const {
      return {.experts = {&experts, 1},
              .experts_replicated = {&experts_replicated, 1},
              .dense = {&dense, 1},
              .replicated = {&replicated, 1},
              .tensor_parallel = {&tensor_parallel, 1}};
    }
  };
  Views views() {
    return {.dense = {dense.data(), {kDense}},
            .replicated = {replicated.data(), {2, 2}},
            .tensor_parallel = {tensor_parallel.data(), {kShard}},
            .experts = {experts.data(), {std::ssize(experts_replicated), kInner}},
            .experts_replicated = {experts_replicated.data(), {std::ssize(experts_replicated)}}};
  }
  friend bool operator==(const Gradients&, const Gradients&) = default;
};

/// The tokens that each gradient is summed over.
struct Tokens {
  std::vector<int64_t> dense;   // of this rank, or of all
  std::vector<int64_t> tp;      // of the tp group
  std::vector<int64_t> routed;  // of the group that exchanges rows
};

Gradients gradients_of(const Model& model, int rank, const Tokens& tokens) {
  const MeshCoordinates place = model.mesh.coordinates(rank);
  const MeshShape& shape = model.mesh.shape();
  const auto sum = [&](char parameter, int64_t p, const std::vector<int64_t>& over) {
    double total = 0;
    for (const int64_t t : over) total += term(parameter, p, t, place.pp);
    return total;
  };
  Gradients result;
  for (int64_t p = 0; p < kDense; ++p) {
    result.dense.push_back(static_cast<float>(sum('d', p, tokens.dense)));
  }
  for (int64_t p = 0; p < kReplicated; ++p) result.replicated.push_back(sum('r', p, tokens.tp));
  for (int64_t p = 0; p < kShard; ++p) {
    result.tensor_parallel.push_back(sum('t', place.tp * kShard + p, tokens.tp));
  }
  for (int64_t e = model.first_expert(place.ep); e < model.first_expert(place.ep + 1); ++e) {
    std::vector<int64_t> routed;
    for (const int64_t t : tokens.routed) {
      if (model.routes(t, e)) routed.push_back(t);
    }
    for (int64_t i = 0; i < kInner; ++i) {
      result.experts.push_back(sum('e', (e * shape.etp + place.etp) * kInner + i, routed));
    }
    result.experts_replicated.push_back(sum('w', e, routed));
  }
  return result;
}

/// The gradients of a rank after its backward.
Gradients own_gradients(const Model& model, int rank) {
  const auto tokens_of = [&](MeshAxis axis) {
    return model.tokens_of(model.mesh.members(axis, rank));
  };
  return gradients_of(model, rank,
                      {.dense = model.tokens_of({rank}),
                       .tp = tokens_of(MeshAxis::kTp),
                       .routed = tokens_of(MeshAxis::kEtpEp)});
}

/// The gradients summed over all tokens of the stage.
Gradients summed_gradients(const Model& model, int rank) {
  const auto all = model.tokens_of(model.mesh.members(MeshAxis::kTpCpDp, rank));
  return gradients_of(model, rank, {.dense = all, .tp = all, .routed = all});
}

/// The norm over all parameters of all stages, as computed by one rank that holds all of them.
double expected_norm(const Model& model) {
  const MeshShape& shape = model.mesh.shape();
  double squares = 0;
  const auto add = [&](char parameter, int64_t count, int pp,
                       const std::function<bool(int64_t t, int64_t p)>& takes) {
    for (int64_t p = 0; p < count; ++p) {
      double sum = 0;
      for (int64_t t = 0; t < Model::first_token(model.stage_size()); ++t) {
        if (takes(t, p)) sum += term(parameter, p, t, pp);
      }
      squares += sum * sum;
    }
  };
  const auto every = [](int64_t, int64_t) { return true; };
  for (int pp = 0; pp < shape.pp; ++pp) {
    add('d', kDense, pp, every);
    add('r', kReplicated, pp, every);
    add('t', shape.tp * kShard, pp, every);
    add('e', model.E * shape.etp * kInner, pp,
        [&](int64_t t, int64_t p) { return model.routes(t, p / (shape.etp * kInner)); });
    add('w', model.E, pp, [&](int64_t t, int64_t p) { return model.routes(t, p); });
  }
  return std::sqrt(squares);
}

ThreadOptions ample() {
  ThreadOptions options;
  options.group.arrival_deadline = std::chrono::seconds(60);
  options.group.progress_deadline = std::chrono::seconds(60);
  return options;
}

const std::vector<MeshShape> kShapes = {
    {.world = 1},
    {.world = 4, .ep = 4},
    {.world = 4, .ep = 1},
    {.tp = 2, .dp = 2, .ep = 4},
    {.tp = 2, .cp = 2, .dp = 1, .pp = 2, .ep = 2},
    {.tp = 2, .dp = 2, .etp = 2, .ep = 1},
    {.world = 12, .tp = 3, .cp = 2, .pp = 2, .etp = 2, .ep = 3},
    {.world = 12, .tp = 2, .cp = 3, .etp = 3, .ep = 2},
};

TEST(SumGradients, GivesEveryRankTheSumsOfOneRank) {
  for (const MeshShape& shape : kShapes) {
    const MeshLayout layout(shape);
    // One expert: some ranks have none; ep + 1: ranks have different numbers of experts.
    for (const int64_t E : {int64_t{1}, layout.shape().ep + 1}) {
      const Model model{layout, E};
      const double norm = expected_norm(model);
      run_ranks(
          layout.num_ranks(),
          [&](Group& world) {
            Mesh mesh(world, shape);
            Gradients gradients = own_gradients(model, world.rank());
            sum_gradients(mesh, gradients.views().lists());
            EXPECT_EQ(gradients, summed_gradients(model, world.rank())) << world.rank();
            EXPECT_EQ(global_grad_norm(mesh, gradients.views().lists()), norm);
          },
          ample());
    }
  }
}

TEST(SumGradients, TakesListsThatOnlySomeStagesHave) {
  const Model model{MeshLayout({.tp = 2, .dp = 2, .pp = 2}), 3};
  run_ranks(
      8,
      [&](Group& world) {
        Mesh mesh(world, {.tp = 2, .dp = 2, .pp = 2});
        Gradients gradients = own_gradients(model, world.rank());
        const Gradients before = gradients;
        const Gradients::Views views = gradients.views();
        MeshGradients lists;
        if (mesh.coordinates().pp == 1) lists.dense = views.lists().dense;
        sum_gradients(mesh, lists);
        const Gradients summed = summed_gradients(model, world.rank());
        EXPECT_EQ(gradients.dense, mesh.coordinates().pp == 1 ? summed.dense : before.dense);
        EXPECT_EQ(gradients.experts, before.experts);
        sum_gradients(mesh, {});
        EXPECT_EQ(global_grad_norm(mesh, {}), 0.0);
      },
      ample());
}

/// Every rank of the mesh must throw the same Error with these words, and can continue.
void expect_same_refusal(const std::function<void(Mesh&, Gradients&)>& call,
                         const std::string& words) {
  const MeshShape shape = {.tp = 2, .cp = 2, .dp = 1, .pp = 2, .ep = 2};
  const Model model{MeshLayout(shape), 3};
  std::vector<std::string> messages(8);
  run_ranks(
      8,
      [&](Group& world) {
        Mesh mesh(world, shape);
        Gradients gradients = own_gradients(model, world.rank());
        messages[static_cast<size_t>(world.rank())] = message_of([&] { call(mesh, gradients); });
        EXPECT_EQ(gradients, own_gradients(model, world.rank()));
        sum_gradients(mesh, gradients.views().lists());
        EXPECT_EQ(gradients, summed_gradients(model, world.rank()));
      },
      ample());
  for (const std::string& message : messages) {
    EXPECT_THAT(message, HasSubstr(words));
    EXPECT_EQ(message, messages[0]);
  }
}

TEST(SumGradients, RefusesListsThatDifferInAGroup) {
  expect_same_refusal(
      [](Mesh& mesh, Gradients& gradients) {
        Gradients::Views views = gradients.views();
        if (mesh.world().rank() == 6) views.experts = {gradients.experts.data(), {1}};
        sum_gradients(mesh, views.lists());
      },
      "rank 6 has 1 tensor with 1 elements in the list experts where rank 4 of its edp group has 1 "
      "tensor with 4 elements");
  expect_same_refusal(
      [](Mesh& mesh, Gradients& gradients) {
        Gradients::Views views = gradients.views();
        if (mesh.world().rank() == 3) views.replicated = {gradients.replicated.data(), {4}};
        sum_gradients(mesh, views.lists());
      },
      "in the list replicated where rank 1 of its cp_dp group has other dtypes or shapes");
}

TEST(SumGradients, RefusesWhatOneRankCannotSum) {
  for (const bool norm : {false, true}) {
    const auto call = [&](Mesh& mesh, const MeshGradients& lists) {
      if (norm) {
        static_cast<void>(global_grad_norm(mesh, lists));
      } else {
        sum_gradients(mesh, lists);
      }
    };
    expect_same_refusal(
        [&](Mesh& mesh, Gradients& gradients) {
          Gradients::Views views = gradients.views();
          if (mesh.world().rank() == 5) views.dense.dtype = DType::kI64;
          call(mesh, views.lists());
        },
        "rank 5: dense[0] must be fp64, fp32, bf16 or fp16, got int64");
    // In two lists a gradient would be summed twice.
    expect_same_refusal(
        [&](Mesh& mesh, Gradients& gradients) {
          Gradients::Views views = gradients.views();
          if (mesh.world().rank() == 2) views.replicated = views.dense;
          call(mesh, views.lists());
        },
        "rank 2: replicated[0] overlaps dense[0]");
  }
}

// The group of two ranks fails; the others learn this through the groups they share with them,
// without waiting for a deadline.
TEST(SumGradients, AFailureInOneGroupReachesTheWholeMesh) {
  const MeshShape shape = {.tp = 2, .cp = 2, .dp = 1, .pp = 2, .ep = 2};
  const Model model{MeshLayout(shape), 3};
  std::atomic<int> num_failed = 0;
  run_ranks(
      8,
      [&](Group& world) {
        Mesh mesh(world, shape);
        mesh.make_groups(std::vector{MeshAxis::kEdp, MeshAxis::kTpCpDp});
        Gradients gradients = own_gradients(model, world.rank());
        if (world.rank() == 0) {
          mesh.group(MeshAxis::kEdp).fail({ErrorCode::kCommunication, "cut"});
        }
        try {
          sum_gradients(mesh, gradients.views().lists());
          // A stage that needs nothing of the failed ranks may finish.
          EXPECT_EQ(mesh.coordinates().pp, 1);
        } catch (const Error& error) {
          EXPECT_NE(error.code(), ErrorCode::kTimeout) << error.what();
          ++num_failed;
        }
      },
      ample());
  EXPECT_GE(num_failed, 4);
}

}  // namespace
}  // namespace crossdock
