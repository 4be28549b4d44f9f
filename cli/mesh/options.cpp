#include "cli/options.hpp"

#include "cli/commands.hpp"

namespace crossdock::cli {
namespace {

constexpr const char* kMeshNotes =
    R"(Two grids over the same ranks: tp x cp x dp x pp for dense parts, and
etp x ep x edp x pp for experts. The first size varies fastest with the rank, pp
slowest. An impossible mesh exits with status 1; the message names the
rule and the numbers. docs/mesh.md says what each group is for. More than 64
ranks are summarised: the first groups of each kind, no table of all ranks.

Examples:
  crossdock mesh --world 16 --tp 2 --pp 2 --cp 2 --ep 2
  crossdock mesh --world 1024 --tp 8 --ep 64 --rank 17
  crossdock mesh --dp 2 --tp 2 --ep 4 --json)";

}  // namespace

void add_options(Options& options, MeshArgs& args) {
  options.whole_number("--world", args.world, {1},
                       "Number of ranks (default: the product of the sizes given)");
  options.whole_number("--tp", args.tp, {1}, "Tensor parallelism (default: 1)");
  options.whole_number("--cp", args.cp, {1}, "Context parallelism (default: 1)");
  options.whole_number("--dp", args.dp, {1}, "Data parallelism (default: the ranks that remain)");
  options.whole_number("--pp", args.pp, {1}, "Pipeline stages (default: 1)");
  options.whole_number("--etp", args.etp, {1}, "Tensor parallelism in experts (default: 1)");
  options.whole_number(
      "--ep", args.ep, {1},
      "Expert parallelism (default: all ranks of a stage, divided by etp and edp)");
  options.whole_number("--edp", args.edp, {1},
                       "Replicas of the experts (default: the ranks that remain)");
  options.whole_number("--rank", args.rank, {0},
                       "Show only the coordinates and groups of this rank");
  options.flag("--json", args.json, "Print JSON");
  options.notes(kMeshNotes);
}

}  // namespace crossdock::cli
