#include "cli/options.hpp"

#include "cli/commands.hpp"

namespace crossdock::cli {
namespace {

constexpr const char* kEvalNotes =
    R"(Prints one JSON object. If anything is wrong with the case, it is
{"error": message}, and the exit status is 1. See docs/case_format.md.

Examples:
  crossdock eval examples/cases/demo.json
  crossdock eval --check examples/cases/demo.json > result.json)";

}  // namespace

void add_options(Options& options, EvalArgs& args) {
  options.argument("CASE", args.path, "JSON file with the case; - for standard input");
  options.choice("--communicator", args.communicator, {"threads", "sockets", "mpi"},
                 "How ranks communicate; sockets and mpi start processes", "the case's");
  options.flag("--check", args.check,
               "Compare with the fp64 reference and report on standard error; a difference exits "
               "with status 1");
  options.flag("--json", args.json, "Print JSON, as without this option");
  options.hidden_flag("--as-rank", args.as_rank);
  options.notes(kEvalNotes);
}

}  // namespace crossdock::cli
