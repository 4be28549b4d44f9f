#pragma once

#include <string>
#include <vector>

#include "cli/options.hpp"

/// Texts made of the same descriptions as help.
namespace crossdock::cli {

/// A script that completes commands, options and their values in "bash", "zsh" or "fish".
std::string completion_text(const std::string& shell, const std::vector<CommandText>& commands);

/// The man page of the program or of one of its commands, in troff.
std::string man_page(const std::string& page, const CommandText& program,
                     const std::vector<CommandText>& commands, const std::string& version);

}  // namespace crossdock::cli
