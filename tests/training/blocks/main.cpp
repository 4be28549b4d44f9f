// Trains a small MoE language model on any mesh of ranks, and shows that the mesh does not matter.
//
//   train_blocks --world 4 --tp 2 --ep 2 --check                # 4 threads
//   mpirun -np 4 train_blocks --communicator mpi --cp 2 --etp 2 --check
//   tests/training/blocks/processes.sh 4 train_blocks --tp 2 --cp 2 --check  # 4 processes, sockets
//
// The model predicts the next byte of packed sequences: a table of bytes and positions, blocks of
// norm and MoE layer with a residual, and a head. There is no attention, so that a token's path
// through the model is short enough to read. The ranks form two grids (crossdock/mesh.hpp):
//
//   tp x cp x dp    hold the tokens: sequences are divided among the dp ranks; the tokens of each
//                   part are cut among cp ranks (zigzag) and tp ranks (contiguous)
//   etp x ep x edp  hold the experts: divided among ep ranks, each expert cut among etp ranks,
//                   everything copied edp times
//
// A step (trainer.cpp): take this rank's tokens, forward, backward, sum each gradient over the
// ranks that must still sum it (sum_gradients), update. Apart from the order of sums, losses and
// gradients are those of a single rank (--check), even if a rank has no tokens, which happens every
// fourth step, or an expert never gets any (--idle-experts). Mistakes that are easy to make here
// can be made on purpose (--mistake, mistakes.hpp): the check finds each of them.
//
// Where to read: tokens.cpp (which tokens a rank has), model.cpp (forward and backward),
// trainer.cpp (a step), whole_gradients.cpp (from a mesh back to whole tensors).
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "crossdock/crossdock.hpp"
#include "options.hpp"

namespace train {
namespace {

void print_mesh(const crossdock::MeshShape& mesh) {
  std::printf("%d ranks: tp %d x cp %d x dp %d, etp %d x ep %d x edp %d\n",
              static_cast<int>(mesh.world), static_cast<int>(mesh.tp), static_cast<int>(mesh.cp),
              static_cast<int>(mesh.dp), static_cast<int>(mesh.etp), static_cast<int>(mesh.ep),
              static_cast<int>(mesh.edp));
}

void print_step(const StepReport& report) {
  std::printf("step %3d  loss %.6f  router %.6f  gradient norm %.4f  tokens %3d  imbalance %.2f\n",
              static_cast<int>(report.step + 1), report.text_loss, report.router_loss,
              report.grad_norm, static_cast<int>(report.num_tokens), report.imbalance);
}

// Rank 0 prints. The result is identical on every rank.
TrainResult train_and_print(crossdock::Group& world, const TrainConfig& config) {
  const bool prints = world.rank() == 0;
  crossdock::MeshShape shape = config.mesh;
  if (shape.world == 0) shape.world = world.size();
  shape = crossdock::resolve_mesh(shape);
  if (prints) print_mesh(shape);
  return train(world, config, [&](const StepReport& report) {
    if (prints) print_step(report);
  });
}

// The result of a training run, and this process's rank in it: 0 if all ranks were its threads.
struct Outcome {
  TrainResult result;
  int rank = 0;
};

Outcome run(const CommandOptions& options) {
  Outcome outcome;
  const TrainConfig& config = options.training;
  if (options.communicator == CommunicatorKind::kThreads) {
    const auto ranks = static_cast<int>(crossdock::resolve_mesh(config.mesh).world);
    crossdock::run_ranks(ranks,
                         [&](crossdock::Group& world) {
                           TrainResult result = train_and_print(world, config);
                           if (world.rank() == 0) outcome.result = std::move(result);
                         },
                         {.ranks_per_node = options.ranks_per_node});
    return outcome;
  }
  crossdock::Group world(options.communicator == CommunicatorKind::kMpi
                             ? crossdock::make_mpi_communicator(
                                   crossdock::MpiOptions{.ranks_per_node = options.ranks_per_node})
                             : crossdock::make_sockets_communicator(crossdock::SocketsOptions{
                                   .ranks_per_node = options.ranks_per_node}));
  outcome.rank = world.rank();
  outcome.result = train_and_print(world, config);
  return outcome;
}

int run_command(const CommandOptions& options) {
  const Outcome outcome = run(options);
  if (!options.check || outcome.rank != 0) return 0;
  const Difference difference = compare(outcome.result, train_on_one_rank(options.training));
  const bool is_same = is_small(difference, options.training.dtype);
  std::printf("%s one rank: %s\n", is_same ? "the same as on" : "DIFFERS from",
              describe(difference).c_str());
  return is_same ? 0 : 1;
}

}  // namespace
}  // namespace train

int main(int argc, char** argv) {
  try {
    const train::CommandOptions options =
        train::parse_options(std::vector<std::string>(argv + 1, argv + argc));
    if (options.help) {
      std::printf("%s", train::help_text().c_str());
      return 0;
    }
    return train::run_command(options);
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
}
