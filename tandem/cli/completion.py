"""Print the completion script of a shell: commands, options, recipes and the keys of recipes.

examples:
  eval "$(tandem completion bash)"                                          in ~/.bashrc
  eval "$(tandem completion zsh)"                                           in ~/.zshrc, after compinit
  tandem completion fish > ~/.config/fish/completions/tandem.fish
"""

import argparse
import dataclasses
from collections.abc import Iterator

from tandem.config.bundled import bundled_recipes
from tandem.config.document import sections
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe

BASH = """\
_tandem() {
    local word="${COMP_WORDS[COMP_CWORD]}" words
    # Readline splits words at equals signs and colons: only what is after them is completed, as a file.
    case "$word" in =*|:*) COMPREPLY=(); return ;; esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="@TOP@"
    else
        case "${COMP_WORDS[1]}" in
@CASES@
        esac
        case "$word" in
            -*) ;;
            *) if [ "$COMP_CWORD" -eq 2 ]; then words="$(printf '%s\\n' $words | grep -v '^-')"; else words=""; fi ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case "${COMPREPLY[0]}" in *=) compopt -o nospace ;; esac
}
complete -o default -F _tandem tandem
"""
BASH_CASE = '            {command}) words="{words}" ;;'
ZSH = """\
_tandem() {
    local -a words_of
    if (( CURRENT == 2 )); then
        compadd -- @TOP@
        return
    fi
    case "${words[2]}" in
@CASES@
    esac
    if [[ "${words[CURRENT]}" == -* ]]; then
        compadd -S '' -- ${(M)words_of:#*=}
        compadd -- ${${(M)words_of:#-*}:#*=}
    else
        (( CURRENT == 3 )) && compadd -- ${words_of:#-*}
        _files
    fi
}
compdef _tandem tandem
"""
ZSH_CASE = "        {command}) words_of=({words}) ;;"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace) -> int:
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](), end="")
    return 0


def words_of_commands() -> dict[str, list[str]]:
    """Returns what may follow each command: its options, and its positional arguments that have choices. Keys of recipes end with ``=``."""
    from tandem.cli.main import FORMS, parser

    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    words = dict[str, list[str]]()
    for name, command in commands.choices.items():
        options = [text for action in command._actions if action.help != argparse.SUPPRESS for text in action.option_strings if text.startswith("--")]
        choices = [str(choice) for action in command._actions if not action.option_strings for choice in action.choices or ()]
        if name in ("train", "recipes"):
            choices += bundled_recipes()
        keys = sorted(_keys()) if command.get_default("takes_overrides") else []
        first, _, second = name.partition(" ")
        words[first] = list(dict.fromkeys([*words.get(first, ()), *choices, *([] if second else FORMS.get(first, ())), *options, *keys]))
    return words


def _keys() -> set[str]:
    return {f"--{key}=" for recipe in (Recipe, PretrainRecipe) for key in _keys_of(recipe)}


def _keys_of(recipe: type) -> Iterator[str]:
    for section in sections(recipe):
        for field in dataclasses.fields(section.kind):
            if field.init and field.name not in section.refused:
                yield f"{section.name}.{field.name}"


def _bash() -> str:
    return _filled(BASH, BASH_CASE)


def _zsh() -> str:
    return _filled(ZSH, ZSH_CASE)


def _filled(script: str, case: str) -> str:
    words = words_of_commands()
    cases = "\n".join(case.format(command=command, words=" ".join(given)) for command, given in words.items())
    return script.replace("@TOP@", " ".join([*words, "--help", "--version"])).replace("@CASES@", cases)


def _fish() -> str:
    from tandem.cli.main import COMMANDS

    lines = []
    for command, text in COMMANDS.items():
        lines.append(f"complete -c tandem -n __fish_use_subcommand -f -a {command} -d {_quoted(text)}")
    for command, words in words_of_commands().items():
        given = f"complete -c tandem -n '__fish_seen_subcommand_from {command}'"
        plain = [word for word in words if not word.startswith("-") or word.endswith("=")]
        lines += [f"{given} -l {word[2:]}" for word in words if word.startswith("--") and not word.endswith("=")]
        if plain:
            lines.append(f"{given} -a {_quoted(' '.join(plain))}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
