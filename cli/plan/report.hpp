#pragma once

#include <string>

#include "cli/text/terminal.hpp"
#include "crossdock/planner.hpp"

namespace crossdock::cli {

/// The job that a plan is for.
struct PlanHeading {
  std::string model;  // empty: sizes as given
  JobDescription job;
  bool with_queue = false;  // show what schemes with queue entries per token need
};

/// Whether a rank of the fabric has enough memory; true if the amount is unknown.
bool fits(const MemoryNeed& need, const Fabric& fabric);

std::string plan_text(const PlanHeading& heading, const JobPlan& plan, const TextStyle& style);
std::string plan_json(const PlanHeading& heading, const JobPlan& plan);

}  // namespace crossdock::cli
