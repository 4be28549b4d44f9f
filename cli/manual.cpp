#include "cli/manual.hpp"

#include <algorithm>

namespace crossdock::cli {
namespace {

std::string joined(const std::vector<std::string>& words, const char* separator) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

std::string replaced(std::string text, char letter, const std::string& by) {
  for (size_t at = 0; (at = text.find(letter, at)) != std::string::npos; at += by.size()) {
    text.replace(at, 1, by);
  }
  return text;
}

// What a shell shows beside a completion: the first sentence.
std::string short_words(const OptionText& option) {
  return option.words.substr(0, option.words.find_first_of(".;:("));
}

bool takes_file(const OptionText& option) {
  return option.placeholder == "FILE" || option.placeholder == "FOLDER" ||
         option.placeholder == "CASE";
}

std::string bash_text(const std::vector<CommandText>& commands) {
  std::vector<std::string> names;
  names.reserve(commands.size());
  for (const CommandText& command : commands) names.push_back(command.name);
  std::string text =
      "# bash completion of crossdock; made by `crossdock completion bash`\n"
      "_crossdock() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" before=\"${COMP_WORDS[COMP_CWORD-1]}\" words=\n"
      "  local prefix= list=\n"
      "  case \"$word\" in\n"  // --option=value, which most shells split at the sign
      "    =) word= ;;\n"
      "    --*=*) before=\"${word%%=*}\" prefix=\"${word%%=*}=\" word=\"${word#*=}\" ;;\n"
      "    *) if [ \"$before\" = = ]; then before=\"${COMP_WORDS[COMP_CWORD-2]}\"; fi ;;\n"
      "  esac\n"
      "  if [ \"$COMP_CWORD\" = 1 ]; then\n"
      "    words=\"" +
      joined(names, " ") +
      " --help --version\"\n"
      "  else\n"
      "    case \"${COMP_WORDS[1]} $before\" in\n";
  for (const CommandText& command : commands) {
    std::vector<std::string> options;
    for (const OptionText& option : command.options) {
      options.insert(options.end(), option.names.begin(), option.names.end());
      if (option.names.empty()) {
        options.insert(options.end(), option.choices.begin(), option.choices.end());
        continue;
      }
      std::vector<std::string> patterns;
      for (const std::string& name : option.names) {
        patterns.push_back("\"" + command.name + " " + name + "\"");
      }
      const std::string pattern = "      " + joined(patterns, "|") + ") ";
      if (!option.choices.empty()) {
        text += pattern + "words=\"" + joined(option.choices, " ") + "\"" +
                (option.placeholder == "LIST" ? " list=1" : "") + " ;;\n";
      } else if (takes_file(option)) {
        text += pattern + "COMPREPLY=($(compgen -P \"$prefix\" -f -- \"$word\")); return ;;\n";
      } else if (!option.placeholder.empty()) {
        text += pattern + "return ;;\n";
      }
    }
    text += "      \"" + command.name + " \"*) words=\"" + joined(options, " ") + "\" ;;\n";
  }
  return text +
         "    esac\n"
         "  fi\n"
         "  if [[ \"$list\" && \"$word\" = *,* ]]; then\n"
         "    prefix=\"$prefix${word%,*},\" word=\"${word##*,}\"\n"
         "  fi\n"
         "  COMPREPLY=($(compgen -P \"$prefix\" -W \"$words\" -- \"$word\"))\n"
         "  if [ ${#COMPREPLY[@]} = 0 ]; then COMPREPLY=($(compgen -P \"$prefix\" -f -- "
         "\"$word\")); fi\n"
         "}\n"
         "complete -F _crossdock crossdock\n";
}

// In single quotes, between brackets of _arguments.
std::string zsh_words(const std::string& words) {
  return replaced(replaced(replaced(words, '[', "("), ']', ")"), '\'', "'\\''");
}

std::string zsh_text(const std::vector<CommandText>& commands) {
  std::string text =
      "#compdef crossdock\n"
      "# zsh completion of crossdock; made by `crossdock completion zsh`\n"
      "_crossdock() {\n"
      "  local -a commands=(\n";
  for (const CommandText& command : commands) {
    text += "    '" + command.name + ":" + zsh_words(command.words) + "'\n";
  }
  text +=
      "  )\n"
      "  if (( CURRENT == 2 )); then _describe command commands; return; fi\n"
      "  local command=$words[2]\n"
      "  shift words; (( CURRENT-- ))\n"
      "  case $command in\n";
  for (const CommandText& command : commands) {
    text += "    " + command.name + ") _arguments";
    for (const OptionText& option : command.options) {
      const std::string action = !option.choices.empty() ? ":(" + joined(option.choices, " ") + ")"
                                 : takes_file(option)    ? ":_files"
                                                         : ": ";
      const std::string value =
          option.placeholder.empty() ? "" : ":" + zsh_words(option.placeholder) + action;
      if (option.names.empty()) text += " \\\n      '1" + value + "'";
      const std::string what = "[" + zsh_words(short_words(option)) + "]" + value + "'";
      for (const std::string& name : option.names) {
        text.append(" \\\n      '").append(name).append(what);
      }
    }
    text += " ;;\n";
  }
  return text +
         "  esac\n"
         "}\n"
         "if [ \"$funcstack[1]\" = _crossdock ]; then _crossdock \"$@\"; else compdef _crossdock "
         "crossdock; fi\n";
}

std::string fish_text(const std::vector<CommandText>& commands) {
  const auto quoted = [](const std::string& words) {
    return "'" + replaced(words, '\'', "\\'") + "'";
  };
  std::string text = "# fish completion of crossdock; made by `crossdock completion fish`\n";
  for (const CommandText& command : commands) {
    text += "complete -c crossdock -f -n __fish_use_subcommand -a " + command.name + " -d " +
            quoted(command.words) + "\n";
    for (const OptionText& option : command.options) {
      text += "complete -c crossdock -n '__fish_seen_subcommand_from " + command.name + "'";
      for (const std::string& name : option.names) {
        text += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      if (!option.choices.empty()) {
        text += std::string(option.names.empty() ? " -f -a " : " -x -a ") +
                quoted(joined(option.choices, " "));
      } else if (takes_file(option)) {
        text += option.names.empty() ? " -F" : " -r -F";
      } else if (!option.placeholder.empty()) {
        text += " -x";
      }
      text += " -d " + quoted(short_words(option)) + "\n";
    }
  }
  return text;
}

// Text in troff, in which a line must not begin with a dot or a quote.
std::string troff(const std::string& words) {
  std::string text = replaced(replaced(words, '\\', "\\e"), '-', "\\-");
  if (text.starts_with('.') || text.starts_with('\'')) text.insert(0, "\\&");
  return text;
}

std::string troff_lines(const std::string& words) {
  std::string text;
  for (size_t begin = 0; begin < words.size();) {
    const size_t end = std::min(words.find('\n', begin), words.size());
    text += troff(words.substr(begin, end - begin)) + "\n";
    begin = end + 1;
  }
  return text;
}

}  // namespace

std::string completion_text(const std::string& shell, const std::vector<CommandText>& commands) {
  return shell == "bash"  ? bash_text(commands)
         : shell == "zsh" ? zsh_text(commands)
                          : fish_text(commands);
}

std::string man_page(const std::string& page, const CommandText& program,
                     const std::vector<CommandText>& commands, const std::string& version) {
  const bool is_program = page == program.name;
  const CommandText& text =
      is_program ? program : *std::ranges::find(commands, page, &CommandText::name);
  const std::string name = is_program ? page : program.name + "-" + page;
  std::string man = ".TH " + name + " 1 \"\" \"" + version + "\" \"" + program.name +
                    "\"\n.SH NAME\n" + troff(name) + " \\- " + troff(text.words) +
                    "\n.SH SYNOPSIS\n.B " + program.name + "\n" +
                    (is_program ? "COMMAND [OPTIONS]" : page + " [OPTIONS]");
  for (const OptionText& option : text.options) {
    if (option.names.empty()) man += " " + option.placeholder;
  }
  man += "\n";
  if (is_program) {
    man += ".SH COMMANDS\n";
    for (const CommandText& command : commands) {
      man += ".TP\n.B " + command.name + "\n" + troff(command.words) + "\n";
    }
  }
  man += ".SH OPTIONS\n";
  for (const OptionText& option : text.options) {
    const std::string names =
        option.names.empty() ? option.placeholder : joined(option.names, ", ");
    const std::string value = option.names.empty() ? "" : option.placeholder;
    man += ".TP\n\\fB" + troff(names) + "\\fR " + troff(value) + "\n" + troff_lines(option.words);
  }
  if (!text.notes.empty()) man += ".SH NOTES\n.nf\n" + troff_lines(text.notes) + ".fi\n";
  return man;
}

}  // namespace crossdock::cli
