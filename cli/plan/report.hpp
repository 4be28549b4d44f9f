#pragma once

#include <string>

#include "crossdock/planner.hpp"

namespace crossdock::cli {

/// What is shown of a job beside its plan.
struct PlanHeading {
  std::string model;  // empty: sizes as given
  JobDescription job;
};

/// Whether a rank of the fabric has the memory; true if its memory is not known.
bool fits(const MemoryNeed& need, const Fabric& fabric);

std::string plan_text(const PlanHeading& heading, const JobPlan& plan);
std::string plan_json(const PlanHeading& heading, const JobPlan& plan);

}  // namespace crossdock::cli
