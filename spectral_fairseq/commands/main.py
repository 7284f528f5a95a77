"""The command ``spectral-fairseq``: reads the command line and runs one subcommand."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import textwrap
from typing import Any, Dict, List, Optional, Sequence

import spectral_fairseq
from spectral_fairseq.commands.arguments import NO_VERIFY, Rare
from spectral_fairseq.commands.shared import print_anywhere
from spectral_fairseq.errors import SpectralFairseqError, arguments_as_flags, printable

SUBCOMMANDS: Dict[str, str] = {
    "analyze": "measure and draw the embedding space of models",
    "compare": "put the embedding spaces of several checkpoints side by side",
    "export": "turn a checkpoint into plain fairseq's, transformers' or CTranslate2's",
    "average": "average checkpoints, tables rather than factors",
    "evaluate-lm": "perplexity of a language model with a state; cache, dynamic evaluation",
    "next-words": "the most probable next words of language models, side by side",
    "flags": "list every flag that this package adds to fairseq-train",
    "user-dir": "print the installed package's folder, for fairseq's --user-dir",
    "doctor": "show versions, how fairseq is patched, and what is not supported",
    "completion": "print what completes this command in bash or zsh",
}
"""Name -> its line in the help. Its code is in ``commands/<name>.py``: ``DESCRIPTION``,
``add_arguments(parser)``, and ``run(arguments) -> exit status``."""

_HELP_ALL = "--help-all"
_DEBUG_HELP = "show the traceback of an error as well"


class _Paragraphs(argparse.HelpFormatter):
    """Fills the paragraphs of a description; indented lines and the example stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: List[str] = []
        for block in re.split(r"\n(?=\n|[ ]|Example:)|(?<=\n)\n", text.rstrip("\n")):
            as_it_is = not block.strip("\n") or block[0] == " " or block.startswith("Example:")
            lines += [block] if as_it_is else textwrap.wrap(block, width, break_on_hyphens=False)
        return textwrap.indent("\n".join(lines), indent)

    def _get_help_string(self, action: argparse.Action) -> Optional[str]:
        """The help with the default, where there is one to say and it does not say it itself."""
        text, default = action.help, action.default
        is_said = text is None or "(default:" in text or action.required
        nothing = isinstance(default, bool) or default in (None, "", (), argparse.SUPPRESS)
        return text if is_said or nothing else f"{text} (default: {default})"


def _in_usage(action: argparse.Action) -> str:
    """What the line of usage says of an argument: nothing of an option that may be left out."""
    if action.option_strings:
        return f"{action.option_strings[0]} {action.metavar}" if action.required else ""
    if action.nargs == "?":
        return f"[{action.metavar}]"
    return f"{action.metavar} ..." if action.nargs in ("+", "*") else str(action.metavar)


class _Subcommand(argparse.ArgumentParser):
    """Parser of one subcommand, whose module is imported only if the command line names it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Paragraphs, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        name = self.prog.split()[-1].replace("-", "_")
        module = importlib.import_module(f"spectral_fairseq.commands.{name}")
        self.description = module.DESCRIPTION
        with_rare = _HELP_ALL in (args or ())
        module.add_arguments(self)
        for action in () if with_rare else self._actions:
            if isinstance(action.help, Rare):
                action.help = argparse.SUPPRESS
        # Without a default, so that one given before the subcommand stays.
        debug_help = _DEBUG_HELP if with_rare else argparse.SUPPRESS
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=debug_help
        )
        self.add_argument(_HELP_ALL, action="help", help="show every option and exit")
        self.set_defaults(module=module)
        words = map(_in_usage, sorted(self._actions, key=lambda one: not one.option_strings))
        self.usage = " ".join(["%(prog)s [options]", *filter(None, words)])  # a list follows
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:  # here, where the error names the subcommand and shows its usage
            self.error(printable(f"unrecognized arguments: {' '.join(unknown)}"))
        return namespace, unknown


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; it sets ``module`` to the subcommand's."""
    parser = argparse.ArgumentParser(
        prog="spectral-fairseq",
        description="Measure and compare the word-vector tables of any model; average, export and "
        "evaluate checkpoints of fairseq, plain or of this package.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {spectral_fairseq.__version__}"
    )
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    subparsers = parser.add_subparsers(
        dest="subcommand", metavar="SUBCOMMAND", required=True, parser_class=_Subcommand
    )
    for name, line in SUBCOMMANDS.items():
        subparsers.add_parser(name, help=line)
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one subcommand.

    Returns:
        Exit status: the subcommand's own; 2 for an error that the user can correct, which is
        printed on stderr; as in a shell, 130 after Ctrl-C and 141 if the reader of the output has
        closed it.
    """
    args = argparse.Namespace(subcommand="", debug=False)
    print_anywhere()
    try:
        build_parser().parse_args(argv, args)
        with arguments_as_flags(verify=NO_VERIFY):
            status = int(args.module.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a closed pipe can still be handled
        return status
    except SpectralFairseqError as error:
        if args.debug:
            raise
        print(f"spectral-fairseq {args.subcommand}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if args.debug:
            raise
        print(f"\nspectral-fairseq {args.subcommand}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # of the output: what is read and written elsewhere has its own
        if args.debug:
            raise
        # Python flushes stdout once more at exit; give it a file that accepts everything.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"spectral-fairseq {args.subcommand}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
