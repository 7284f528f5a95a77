"""What a program's name in a README stands for, in a fork of the server of the tests.

The README tests put a script of every program's name first on the path: :func:`client` writes it.
It sends its command line and its standard streams to the server, a fork of which runs the command
at the sizes of :mod:`readme_substitutions`, or only checks its flags.
"""

import runpy
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

_CLIENT = """#!{python} -S
import json, os, socket, sys
argv = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
request = dict(call={call!r}, arguments=[argv], cwd=os.getcwd(), env=dict(os.environ))
message = json.dumps(request).encode() + b"\\n"
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
server.sendall(message[socket.send_fds(server, [message], [0, 1, 2]):])
answer = server.makefile().readline()
sys.exit(int(answer) if answer else {no_answer})
"""


def client(address, function):
    """A script that becomes the program it is named after, through ``run`` or ``parse``."""
    return _CLIENT.format(
        python=sys.executable,
        call=f"{__name__}:{function}",
        address=address,
        no_answer=fork_server.NO_ANSWER,
    )


def run(argv):
    """Become the command, at the sizes of the table of substitutions."""
    argv = readme_substitutions.substitute(argv)
    if argv[0] != "python":
        del sys.path[0]  # the working directory, from which an installed program imports nothing
        fork_server.run_program(argv)
    elif argv[1] == "-m":
        sys.argv = argv[2:]
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv[1:]
        sys.path[0] = str(Path(argv[1]).resolve().parent)
        if argv[1] in readme_substitutions.PARSED_ONLY:
            runpy.run_path(argv[1], run_name="parsed")["parse_arguments"](argv[2:])
        else:
            runpy.run_path(argv[1], run_name="__main__")


def parse(argv):
    """Check every flag and name of a command without running it."""
    program, *arguments = readme_substitutions.with_user_dir(argv)
    if program == "spectral-fairseq":
        from spectral_fairseq.cli.main import build_parser

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
