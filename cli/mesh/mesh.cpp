#include "crossdock/mesh.hpp"

#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.hpp"
#include "cli/json_writer.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"

namespace crossdock::cli {
namespace {

using NamedNumbers = std::vector<std::pair<std::string, int64_t>>;

NamedNumbers sizes_of(const MeshShape& shape) {
  return {{"world", shape.world}, {"tp", shape.tp},   {"cp", shape.cp}, {"dp", shape.dp},
          {"pp", shape.pp},       {"etp", shape.etp}, {"ep", shape.ep}, {"edp", shape.edp}};
}

NamedNumbers numbers_of(int rank, const MeshCoordinates& place) {
  return {{"rank", rank},   {"tp", place.tp},   {"cp", place.cp}, {"dp", place.dp},
          {"pp", place.pp}, {"etp", place.etp}, {"ep", place.ep}, {"edp", place.edp}};
}

void write_object(JsonWriter& writer, const NamedNumbers& numbers) {
  writer.begin_object();
  for (const auto& [name, number] : numbers) writer.field(name, number);
  writer.end_object();
}

std::string mesh_json(const MeshLayout& mesh) {
  JsonWriter writer(2);
  writer.begin_object();
  writer.key("shape");
  write_object(writer, sizes_of(mesh.shape()));
  writer.key("groups");
  writer.begin_object();
  for (const MeshAxis axis : kMeshAxes) {
    writer.key(name_of(axis));
    writer.begin_array();
    for (const std::vector<int>& group : mesh.groups(axis)) writer.list(group);
    writer.end_array();
  }
  writer.end_object();
  writer.key("ranks");
  writer.begin_array();
  for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
    write_object(writer, numbers_of(rank, mesh.coordinates(rank)));
  }
  writer.end_array();
  writer.end_object();
  return writer.text();
}

// "0,2 1,3": the ranks of each group.
std::string groups_text(const std::vector<std::vector<int>>& groups) {
  std::string text;
  for (const std::vector<int>& group : groups) {
    for (size_t i = 0; i < group.size(); ++i) {
      text.append(i > 0 ? "," : text.empty() ? "" : " ").append(std::to_string(group[i]));
    }
  }
  return text;
}

// "tp 2 x cp 1 x dp 2 x pp 1"
std::string grid_text(const NamedNumbers& sizes) {
  std::string text;
  for (const auto& [name, size] : sizes) {
    text.append(text.empty() ? "" : " x ").append(name + " " + std::to_string(size));
  }
  return text;
}

std::string mesh_text(const MeshLayout& mesh, const TextStyle& style) {
  const MeshShape& shape = mesh.shape();
  const std::string title =
      counted(shape.world, "rank") + ": dense " +
      grid_text({{"tp", shape.tp}, {"cp", shape.cp}, {"dp", shape.dp}, {"pp", shape.pp}}) +
      "; experts " +
      grid_text({{"etp", shape.etp}, {"ep", shape.ep}, {"edp", shape.edp}, {"pp", shape.pp}});
  Table groups(style, {{"group", Align::kLeft}, {"size"}, {"number"}, {"ranks", Align::kLeft}});
  for (const MeshAxis axis : kMeshAxes) {
    const auto all = mesh.groups(axis);
    groups.add_row({std::string(name_of(axis)), std::to_string(mesh.group_size(axis)),
                    std::to_string(all.size()), groups_text(all)});
  }
  std::vector<Column> columns;
  for (const auto& [name, number] : numbers_of(0, {})) columns.push_back({name});
  Table ranks(style, columns);
  for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
    std::vector<Cell> cells;
    for (const auto& [name, number] : numbers_of(rank, mesh.coordinates(rank))) {
      cells.emplace_back(std::to_string(number));
    }
    ranks.add_row(std::move(cells));
  }
  return wrap(title, style.width, 2) + "\n\n" + groups.text() + "\n" + ranks.text();
}

}  // namespace

int run_mesh(const MeshArgs& args) {
  const MeshLayout mesh({.world = args.world.value_or(0),
                         .tp = args.tp.value_or(0),
                         .cp = args.cp.value_or(0),
                         .dp = args.dp.value_or(0),
                         .pp = args.pp.value_or(0),
                         .etp = args.etp.value_or(0),
                         .ep = args.ep.value_or(0),
                         .edp = args.edp.value_or(0)});
  if (args.json) {
    std::cout << mesh_json(mesh) << "\n";
  } else {
    std::cout << mesh_text(mesh, output_style());
  }
  return 0;
}

}  // namespace crossdock::cli
