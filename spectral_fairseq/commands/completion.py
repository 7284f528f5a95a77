"""``spectral-fairseq completion``: subcommands and flags for the Tab key of a shell."""

from __future__ import annotations

import argparse
import importlib
from typing import List

from spectral_fairseq.commands.main import SUBCOMMANDS

DESCRIPTION = """\
Print what completes subcommands and flags of this command in bash or zsh; other words are completed
as names of files.
Example: eval "$(spectral-fairseq completion bash)"
"""

_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
_spectral_fairseq() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{subcommands}"
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
        case $word in
            -*) ;;
            *) words= ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _spectral_fairseq spectral-fairseq
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")


def run(args: argparse.Namespace) -> int:
    """Print the script; returns the exit status 0."""
    cases = "\n".join(f'            {name}) words="{_flags(name)}" ;;' for name in SUBCOMMANDS)
    script = _SCRIPT.format(subcommands=" ".join(SUBCOMMANDS), cases=cases)
    print((_ZSH if args.shell == "zsh" else "") + script, end="")
    return 0


def _flags(subcommand: str) -> str:
    """The long flags of a subcommand."""
    name = subcommand.replace("-", "_")
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(f"spectral_fairseq.commands.{name}").add_arguments(parser)
    flags: List[str] = ["--help", "--help-all", "--debug"]
    for action in parser._actions:
        flags += [flag for flag in action.option_strings if flag.startswith("--")]
    return " ".join(sorted(flags))
