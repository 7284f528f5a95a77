"""What a program's name in a README stands for, in a fork of the server of the tests.

The README tests put scripts of the programs' names first on the path, which let a fork call one of
these functions: :func:`run` runs the command at the sizes of :mod:`readme_substitutions`, and
:func:`parse` only checks its flags.
"""

import importlib
import inspect
import sys
from pathlib import Path

from tests import fork_server
from tests.examples import readme_substitutions

PARSERS = {
    "fairseq-eval-lm": "get_eval_lm_parser",
    "fairseq-generate": "get_generation_parser",
    "fairseq-preprocess": "get_preprocessing_parser",
    "fairseq-train": "get_training_parser",
    "fairseq-validate": "get_validation_parser",
}


def run(argv):
    """Become the command, at the sizes of the table of substitutions."""
    argv = readme_substitutions.substitute(argv)
    if argv[1:] and argv[1] in readme_substitutions.PARSED_ONLY:
        sys.path[0] = str(Path(argv[1]).resolve().parent)
        _parse_arguments_of(argv[1], argv[2:])
    else:
        if argv[0] != "python":
            del sys.path[0]  # the working directory; an installed program imports nothing from it
        fork_server.run_program(argv)


def _parse_arguments_of(script, argv):
    module = importlib.import_module(readme_substitutions.PARSED_ONLY[script])
    takes_corpus = "default_corpus" in inspect.signature(module.parse_arguments).parameters
    module.parse_arguments(argv, *([Path("corpus")] if takes_corpus else []))


def parse(argv):
    """Check every flag and name of a command without running it."""
    program, *arguments = readme_substitutions.with_user_dir(argv)
    if program == "spectral-fairseq":
        from spectral_fairseq.commands.main import build_parser

        build_parser().parse_args(arguments)
    elif program in PARSERS:
        from fairseq import options

        sys.argv = [program, *arguments]  # where fairseq looks for --user-dir
        parser = getattr(options, PARSERS[program])()
        if program == "fairseq-preprocess":
            parser.parse_args(arguments)
        else:
            options.parse_args_and_arch(parser, input_args=arguments)
    else:
        raise SystemExit(f"no way to check the flags of {program} without running it")
