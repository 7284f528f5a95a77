"""Runs many commands of fairseq's and ours in processes of their own, importing fairseq once.

``python command_server.py SOCKET`` imports what takes seconds and listens. A client sends a request
and its own stdin, stdout and stderr; a fork of the server becomes the command. The client, one for
every program's name, is :data:`CLIENT`.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent))

import readme_substitutions  # noqa: E402

ENTRIES = {
    "fairseq-eval-lm": ("fairseq_cli.eval_lm", "cli_main"),
    "fairseq-generate": ("fairseq_cli.generate", "cli_main"),
    "fairseq-hydra-train": ("fairseq_cli.hydra_train", "cli_main"),
    "fairseq-interactive": ("fairseq_cli.interactive", "cli_main"),
    "fairseq-preprocess": ("fairseq_cli.preprocess", "cli_main"),
    "fairseq-score": ("fairseq_cli.score", "cli_main"),
    "fairseq-train": ("fairseq_cli.train", "cli_main"),
    "fairseq-validate": ("fairseq_cli.validate", "cli_main"),
    "spectral-fairseq": ("spectral_fairseq.cli.main", "main"),
}
PARSERS = {
    "fairseq-eval-lm": "get_eval_lm_parser",
    "fairseq-generate": "get_generation_parser",
    "fairseq-preprocess": "get_preprocessing_parser",
    "fairseq-train": "get_training_parser",
    "fairseq-validate": "get_validation_parser",
}

CLIENT = """#!{python} -S
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = dict(argv=[os.path.basename(sys.argv[0]), *sys.argv[1:]], cwd=os.getcwd(), do={do!r},
               env=dict(os.environ))
socket.send_fds(server, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
answer = server.makefile().readline()
sys.exit(int(answer) if answer else 134)
"""


def run(argv):
    """Become the command, at the sizes of the table of substitutions."""
    argv = readme_substitutions.substitute(argv)
    if argv[0] == "python":
        return run_script(argv[1:])
    module, function = ENTRIES[argv[0]]
    sys.argv = argv
    return getattr(importlib.import_module(module), function)()


def run_script(argv):
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return 0
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    if argv[0] in readme_substitutions.PARSED_ONLY:
        runpy.run_path(argv[0], run_name="parsed")["parse_arguments"](argv[1:])
        return 0
    runpy.run_path(argv[0], run_name="__main__")
    return 0


def parse(argv):
    """Check every flag and name of a command without running it."""
    program, *arguments = readme_substitutions.with_user_dir(argv)
    if program == "spectral-fairseq":
        from spectral_fairseq.cli.main import build_parser

        build_parser().parse_args(arguments)
    elif program in PARSERS:
        from fairseq import options

        parser = getattr(options, PARSERS[program])()
        if program == "fairseq-preprocess":
            parser.parse_args(arguments)
        else:
            options.parse_args_and_arch(parser, input_args=arguments)
    else:
        raise SystemExit(f"no way to check the flags of {program} without running it")
    return 0


def serve_one(connection):
    """In the fork: take the client's streams, run, answer with the exit status."""
    message, streams = b"", []
    while not message.endswith(b"\n"):
        part, received, _, _ = socket.recv_fds(connection, 65536, 3)
        message, streams = message + part, streams or list(received)
    request = json.loads(message)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    # Of a new process the streams would be, too: these remember that they wrote to a file.
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        status = {"run": run, "parse": parse}[request["do"]](request["argv"])
        status = status if isinstance(status, int) else 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError):  # a reader such as head may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    connection.sendall(f"{status}\n".encode())
    os._exit(0)


def warm_up():
    """Do once what every command would do again: imports put off by torch, parsing of options."""
    for module in ("torch._dynamo", "matplotlib.pyplot", "sacrebleu"):  # of optimisers, reports
        importlib.import_module(module)
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_training_parser()
    convert_namespace_to_omegaconf(
        options.parse_args_and_arch(parser, ["data", "--arch", "transformer_sc"])
    )


def main(address):
    for module, _ in ENTRIES.values():
        importlib.import_module(module)
    from fairseq.utils import import_user_module

    import_user_module(SimpleNamespace(user_dir=readme_substitutions.USER_DIR))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen()
    os.rename(address + ".new", address)  # clients may come now
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            serve_one(connection)
        connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
