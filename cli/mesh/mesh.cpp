#include "crossdock/mesh.hpp"

#include <algorithm>
#include <iostream>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.hpp"
#include "cli/json.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"

namespace crossdock::cli {
namespace {

constexpr int kMostShown = 64;  // ranks of a mesh whose every rank is shown

using NamedNumbers = std::vector<std::pair<std::string, int64_t>>;

NamedNumbers sizes_of(const MeshShape& shape) {
  return {{"world", shape.world}, {"tp", shape.tp},   {"cp", shape.cp}, {"dp", shape.dp},
          {"pp", shape.pp},       {"etp", shape.etp}, {"ep", shape.ep}, {"edp", shape.edp}};
}

NamedNumbers numbers_of(int rank, const MeshCoordinates& place) {
  return {{"rank", rank},   {"tp", place.tp},   {"cp", place.cp}, {"dp", place.dp},
          {"pp", place.pp}, {"etp", place.etp}, {"ep", place.ep}, {"edp", place.edp}};
}

Json json_of(const NamedNumbers& numbers) {
  Json object = Json::object();
  for (const auto& [name, number] : numbers) object[name] = number;
  return object;
}

// The group of this kind that has the rank.
std::vector<int> group_of(const MeshLayout& mesh, MeshAxis axis, int rank) {
  for (std::vector<int>& group : mesh.groups(axis)) {
    if (std::ranges::find(group, rank) != group.end()) return std::move(group);
  }
  return {};
}

std::string rank_json(const MeshLayout& mesh, int rank) {
  Json groups = Json::object();
  for (const MeshAxis axis : kMeshAxes)
    groups[std::string(name_of(axis))] = group_of(mesh, axis, rank);
  return json_text({{"shape", json_of(sizes_of(mesh.shape()))},
                    {"groups", groups},
                    {"rank", json_of(numbers_of(rank, mesh.coordinates(rank)))}});
}

std::string mesh_json(const MeshLayout& mesh) {
  Json groups = Json::object();
  for (const MeshAxis axis : kMeshAxes) groups[std::string(name_of(axis))] = mesh.groups(axis);
  Json ranks = Json::array();
  for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
    ranks.push_back(json_of(numbers_of(rank, mesh.coordinates(rank))));
  }
  return json_text(
      {{"shape", json_of(sizes_of(mesh.shape()))}, {"groups", groups}, {"ranks", ranks}});
}

// "0,1,2,3", or "0,2,4 ... 62" for a large group.
std::string members_text(const std::vector<int>& ranks) {
  constexpr size_t kMostMembers = 8;
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks.size() > kMostMembers && i == 3) return text + " ... " + std::to_string(ranks.back());
    text += (i > 0 ? "," : "") + std::to_string(ranks[i]);
  }
  return text;
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

// The first two groups of many.
std::string first_groups_text(const std::vector<std::vector<int>>& groups) {
  std::string text;
  for (size_t i = 0; i < std::min<size_t>(groups.size(), 2); ++i) {
    text += (i > 0 ? "; " : "") + members_text(groups[i]);
  }
  return text + (groups.size() > 2 ? "; ..." : "");
}

// "tp 2 x cp 1 x dp 2 x pp 1"
std::string grid_text(const NamedNumbers& sizes) {
  std::string text;
  for (const auto& [name, size] : sizes) {
    text.append(text.empty() ? "" : " x ").append(name + " " + std::to_string(size));
  }
  return text;
}

std::string title_of(const MeshShape& shape) {
  return counted(shape.world, "rank") + ": dense " +
         grid_text({{"tp", shape.tp}, {"cp", shape.cp}, {"dp", shape.dp}, {"pp", shape.pp}}) +
         "; experts " +
         grid_text({{"etp", shape.etp}, {"ep", shape.ep}, {"edp", shape.edp}, {"pp", shape.pp}});
}

// Coordinates, a line per rank.
std::string ranks_text(const MeshLayout& mesh, const std::vector<int>& shown,
                       const TextStyle& style) {
  std::vector<Column> columns;
  for (const auto& [name, number] : numbers_of(0, {})) columns.push_back({name});
  Table ranks(style, columns);
  for (const int rank : shown) {
    std::vector<Cell> cells;
    for (const auto& [name, number] : numbers_of(rank, mesh.coordinates(rank))) {
      cells.emplace_back(std::to_string(number));
    }
    ranks.add_row(std::move(cells));
  }
  return ranks.text();
}

// One rank: its coordinates and the members of its groups.
std::string rank_text(const MeshLayout& mesh, int rank, const TextStyle& style) {
  Table groups(style, {{"group", Align::kLeft}, {"size"}, {"ranks", Align::kLeft}});
  for (const MeshAxis axis : kMeshAxes) {
    groups.add_row({std::string(name_of(axis)), std::to_string(mesh.group_size(axis)),
                    members_text(group_of(mesh, axis, rank))});
  }
  return wrap(title_of(mesh.shape()), style.width, 2) + "\n\n" + ranks_text(mesh, {rank}, style) +
         "\n" + groups.text();
}

std::string mesh_text(const MeshLayout& mesh, const TextStyle& style) {
  const bool is_whole = mesh.num_ranks() <= kMostShown;
  Table groups(style, {{"group", Align::kLeft}, {"size"}, {"number"}, {"ranks", Align::kLeft}});
  for (const MeshAxis axis : kMeshAxes) {
    const auto all = mesh.groups(axis);
    groups.add_row({std::string(name_of(axis)), std::to_string(mesh.group_size(axis)),
                    std::to_string(all.size()),
                    is_whole ? groups_text(all) : first_groups_text(all)});
  }
  std::vector<int> every_rank(static_cast<size_t>(mesh.num_ranks()));
  std::iota(every_rank.begin(), every_rank.end(), 0);
  return wrap(title_of(mesh.shape()), style.width, 2) + "\n\n" + groups.text() + "\n" +
         (is_whole ? ranks_text(mesh, every_rank, style)
                   : wrap("--rank N shows the coordinates and groups of one rank, --json those of "
                          "all.\n",
                          style.width));
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
  if (args.rank && *args.rank >= mesh.num_ranks()) {
    throw ArgumentError("--rank must be below the number of ranks, " +
                        std::to_string(mesh.num_ranks()) + ", got " + std::to_string(*args.rank));
  }
  if (args.json) {
    std::cout << (args.rank ? rank_json(mesh, *args.rank) : mesh_json(mesh)) << "\n";
  } else if (args.rank) {
    std::cout << rank_text(mesh, *args.rank, output_style());
  } else {
    std::cout << mesh_text(mesh, output_style());
  }
  return 0;
}

}  // namespace crossdock::cli
