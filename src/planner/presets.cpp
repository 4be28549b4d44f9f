#include "core/text.hpp"
#include "crossdock/planner.hpp"

namespace crossdock {

const Fabric& find_fabric(std::string_view name) {
  return kFabricPresets[index_of_name("fabric", name, kFabricPresets, &Fabric::name)];
}

const ModelPreset& find_model(std::string_view name) {
  return kModelPresets[index_of_name("model", name, kModelPresets, &ModelPreset::name)];
}

}  // namespace crossdock
