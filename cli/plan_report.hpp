#pragma once

#include <string>

#include "crossdock/planner.hpp"

namespace crossdock::cli {

/// What is shown of a job beside its plan.
struct PlanHeading {
  std::string model;  // empty: sizes as given
  JobDescription job;
};

std::string plan_text(const PlanHeading& heading, const JobPlan& plan);
std::string plan_json(const PlanHeading& heading, const JobPlan& plan);

}  // namespace crossdock::cli
