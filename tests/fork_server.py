"""Run commands of fairseq and of this package in forks of one process that has imported fairseq.

Importing fairseq takes four to seven seconds, and a fork of a process that has done it takes a few
milliseconds. Every request names a function and its arguments; a fork calls the function in the
working directory, with the environment and on the standard streams that the client hands over, and
answers with the exit status. The server itself never imports this package, so a fork starts without
its patches and its registrations, as a new process would. A server after :func:`import_plugin` has
done what ``--user-dir`` takes half of a short command for.

``python -m tests.fork_server SOCKET`` is the server; :meth:`ForkServer.started` starts it. It ends
with the process that started it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import logging
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from argparse import Namespace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence
from unittest import mock

MODULES = {
    "fairseq-preprocess": "fairseq_cli.preprocess",
    "fairseq-train": "fairseq_cli.train",
    "fairseq-hydra-train": "fairseq_cli.hydra_train",
    "fairseq-generate": "fairseq_cli.generate",
    "fairseq-interactive": "fairseq_cli.interactive",
    "fairseq-validate": "fairseq_cli.validate",
    "fairseq-eval-lm": "fairseq_cli.eval_lm",
    "fairseq-score": "fairseq_cli.score",
    "spectral-fairseq": "spectral_fairseq.commands.main",
}
# These programs set up logging before they import fairseq, whose import otherwise does.
SET_UP_LOGGING_FIRST = (
    "fairseq-preprocess",
    "fairseq-train",
    "fairseq-interactive",
    "fairseq-validate",
    "fairseq-eval-lm",
)
# torch and fairseq import these only when they first need them.
IMPORTED_LATE = ("torch._dynamo", "matplotlib.pyplot", "sacrebleu", "sklearn.metrics")

# After import_plugin: with what a program sets it up.
LOGGING: Dict[str, Dict[str, Any]] = {}

ROOT = Path(__file__).resolve().parents[1]
NO_ANSWER = 134  # as a shell reports a process that was aborted


def run_python(argv: Sequence[str]) -> None:
    """Become ``python -c PROGRAM``, ``python -m MODULE`` or ``python SCRIPT``, and arguments."""
    for module in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[module]  # a copy of the repository has its own
    sys.path[1:1] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if argv[1] == "-c":
        sys.argv = ["-c", *argv[3:]]
        exec(argv[2], {"__name__": "__main__"})
    elif argv[1] == "-m":
        sys.argv = list(argv[2:])
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv[1:])
        sys.path[0] = str(Path(argv[1]).resolve().parent)
        runpy.run_path(argv[1], run_name="__main__")


def run_program(argv: Sequence[str]) -> None:
    """Become ``argv[0]``: its console script after :func:`import_plugin`, else ``python -m``.

    ``python`` itself is :func:`run_python`.
    """
    if argv[0] == "python":
        return run_python(argv)
    if argv[0] in SET_UP_LOGGING_FIRST:
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
    sys.argv = list(argv)
    module = sys.modules.get(MODULES[argv[0]])
    if module is None:
        runpy.run_module(MODULES[argv[0]], run_name="__main__", alter_sys=True)
    else:
        if argv[0] in LOGGING:
            logging.basicConfig(**LOGGING[argv[0]])
        module.cli_main()


def run_without_plugin(argv: Sequence[str]) -> None:
    """The same for a program that must never import this package."""
    run_program(argv)
    assert not [name for name in sys.modules if name.startswith("spectral_fairseq")]


def _become(request: Dict[str, Any], streams: Sequence[int]) -> None:
    """Take over everything in which a new process would differ from the server."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    random.seed()  # fairseq draws a port number
    gc.enable()


def _call(call: str, *arguments: Any) -> None:
    module, function = call.split(":")
    getattr(importlib.import_module(module), function)(*arguments)


def _exit_status(request: Dict[str, Any]) -> int:
    """Call the function that is asked for; what Python makes of how it ends."""
    try:
        _call(request["call"], *request["arguments"])
        return 0
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _serve_one(connection: socket.socket) -> None:
    message = b""
    streams: List[int] = []
    while not message.endswith(b"\n"):
        part, received, _, _ = socket.recv_fds(connection, 65536, 3)
        if not part:
            return
        message, streams = message + part, streams + received
    request = json.loads(message)
    _become(request, streams)
    status = _exit_status(request)
    with contextlib.suppress(OSError):  # the reader may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        connection.sendall(f"{status}\n".encode())


def _import_everything() -> None:
    """Import what the programs import, and forget the programs, which a fork runs as ``__main__``.

    Their modules set up logging when they are imported, which is left to the forks.
    """
    importlib.import_module("fairseq")
    with mock.patch("logging.basicConfig"):
        for module in MODULES.values():
            if module.startswith("fairseq_cli"):
                importlib.import_module(module)
    for module in [name for name in sys.modules if name.startswith("fairseq_cli.")]:
        del sys.modules[module]
    for module in IMPORTED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def _keep_what_is_parsed() -> None:
    """Let Hydra's parser, which takes a third of a short command, read each setting only once."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parse, known = OverridesParser.parse_rule, {}

    def parse_rule(self: OverridesParser, s: str, rule_name: str) -> Any:
        if (s, rule_name) not in known:
            known[s, rule_name] = parse(self, s, rule_name)
        return known[s, rule_name]

    OverridesParser.parse_rule = parse_rule


def _copy_settings_once() -> None:
    """Let Hydra copy those settings of its store that it reads, and look for its caller only once.

    It copies the whole store before, and reads the sources of all callers: a quarter of a command.
    """
    from hydra.core.config_store import ConfigStore

    ConfigStore.__deepcopy__ = lambda store, memo: store
    find = "detect_calling_file_or_module_from_stack_frame"
    for module in map(sys.modules.get, ("hydra.initialize", "hydra.experimental.initialize")):
        if hasattr(module, find):
            setattr(module, find, functools.lru_cache(maxsize=None)(getattr(module, find)))


def _compose_settings_once() -> None:
    """Let Hydra compose the settings of all groups once: a command puts in those that it chooses.

    It reads a dozen files of settings and merges them, which takes a third of a short command.
    """
    from fairseq.dataclass import utils
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.config_store import ConfigStore
    from hydra.core.object_type import ObjectType
    from hydra.core.override_parser.overrides_parser import OverridesParser

    compose, stored, composed = utils.compose, ConfigStore.instance(), {}

    def compose_at_once(name: str, overrides: List[str], **options: Any) -> Any:
        if name not in composed:
            composed[name] = compose(name, [], **options)
        settings, values = copy.deepcopy(composed[name]), []
        for override in OverridesParser.create().parse_overrides(overrides):
            group = override.key_or_group
            choice = f"{group}/{override.value()}.yaml"
            if "." in group:
                values.append(override)
            elif stored.get_type(choice) == ObjectType.CONFIG:
                settings[group] = stored.load(choice).node
            else:
                return compose(name, overrides, **options)
        ConfigLoaderImpl._apply_overrides_to_config(values, settings)
        return settings

    utils.compose = compose_at_once


def _parse_options_once(*more: str) -> None:
    """Let Hydra's parser read the names and defaults of all options.

    It warns of what it retires, once a process, which is left to the forks.
    """
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, ["data", *more])
    with warnings.catch_warnings():
        convert_namespace_to_omegaconf(args)


def import_plugin() -> None:
    """Import the programs and then the plugin, in the order of a program's console script."""
    from fairseq.utils import import_user_module

    for program, module in MODULES.items():
        if module.startswith("fairseq_cli"):
            with mock.patch("logging.basicConfig") as set_up:
                importlib.import_module(module)
            if set_up.called:
                LOGGING[program] = set_up.call_args[1]
    package = importlib.util.find_spec("spectral_fairseq")
    assert package is not None and package.origin is not None
    import_user_module(Namespace(user_dir=str(Path(package.origin).resolve().parent)))
    del sys.path[0]  # which fairseq has put before the working directory
    _parse_options_once("--arch", "transformer_sc", "--criterion", "spectrum_control")


def _listen(address: str) -> None:
    """Answer requests until the other end of the standard input is closed."""
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in every fork would copy the memory that they share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen()
    os.rename(address + ".new", address)  # clients wait for this name
    while select.select([listener, 0], [], [])[0] == [listener]:
        connection, _ = listener.accept()
        threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
        assert threads == 1, f"a fork of {threads} threads would wait for those it lacks"
        if os.fork() == 0:
            listener.close()
            try:
                _serve_one(connection)
            finally:
                os._exit(0)
        connection.close()


def serve(address: str) -> None:
    """Be the server."""
    _import_everything()
    _keep_what_is_parsed()
    _copy_settings_once()
    _compose_settings_once()
    _parse_options_once("--arch", "transformer")
    _listen(address)


def serve_after(call: str, address: str) -> None:
    """Be a server whose forks start after ``call``, in a fork of another server."""
    _call(call)
    _listen(address)


_numbers = itertools.count()


class ForkServer:
    """A running server.

    Args:
        address: name of its socket, which has to be short.
        path: folders that become the start of the forks' ``sys.path``.
        ended: says why the server has ended, if it has.
    """

    def __init__(
        self, address: str, path: Sequence[str], ended: Callable[[], Optional[str]]
    ) -> None:
        self.address, self._path, self._ended = address, path, ended

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path, path: Sequence[str]) -> Iterator[ForkServer]:
        """A new server, whose socket and log are in ``folder``."""
        log = folder / "log"

        def ended() -> Optional[str]:
            return log.read_text() if process.poll() is not None else None

        server = cls(str(folder / "socket"), path, ended)
        with open(log, "w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", server.address],
                cwd=ROOT,
                env=server.environment(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        with process:
            yield server

    @contextlib.contextmanager
    def after(self, call: str) -> Iterator[ForkServer]:
        """A server that is a fork of this one in which ``call`` was called first."""
        address = f"{self.address}-{next(_numbers)}"  # each has its own, and an old one stays
        reading, writing = os.pipe()
        with open(f"{address}.log", "w+") as log:
            running = self.start(
                f"{__name__}:serve_after",
                *(call, address),
                streams=[reading, log.fileno(), log.fileno()],
            )
            os.close(reading)

            def ended() -> Optional[str]:
                return Path(log.name).read_text() if running.has_ended() else None

            yield type(self)(address, self._path, ended)
            os.close(writing)
            running.wait()

    def environment(self) -> Dict[str, str]:
        """Environment of a command: one thread, no GPU, and the package importable."""
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": self.python_path(),
        }

    def python_path(self) -> str:
        """``PYTHONPATH`` of a command."""
        return os.pathsep.join([*self._path, *filter(None, [os.environ.get("PYTHONPATH")])])

    def wait_until_ready(self) -> None:
        """Wait for the end of the imports."""
        while not os.path.exists(self.address):
            why = self._ended()
            if why is not None:
                raise RuntimeError(why)
            time.sleep(0.05)

    def start(
        self,
        call: str,
        *arguments: Any,
        streams: Sequence[int],
        cwd: Any = None,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> Running:
        """Let a fork call a function.

        Args:
            call: ``module:function``.
            arguments: of the function; JSON values.
            streams: descriptors of its standard input, output and error.
            cwd: its working directory; that of this process unless given.
            env: additions to :meth:`environment`.
        """
        self.wait_until_ready()
        request = {
            "call": call,
            "arguments": arguments,
            "cwd": str(cwd or os.getcwd()),
            "env": {**self.environment(), **env},
        }
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        message = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(connection, [message], list(streams))
        connection.sendall(message[sent:])
        return Running(connection)

    def write_programs(
        self,
        folder: Path,
        call: str = "tests.fork_server:run_program",
        *more: str,
        with_plugin: Optional[ForkServer] = None,
    ) -> None:
        """Write scripts that let a fork call ``call`` with their command lines.

        They are named as the programs of :data:`MODULES` are, and as ``more`` says. Commands that
        have ``--user-dir`` go to the server ``with_plugin``, if there is one.
        """
        addresses = []
        for server in (self, with_plugin or self):
            server.wait_until_ready()
            addresses.append(server.address)
        text = _CLIENT.format(
            python=sys.executable, call=call, addresses=addresses, no_answer=NO_ANSWER
        )
        folder.mkdir()
        for name in (*MODULES, *more):
            (folder / name).write_text(text, "utf-8")
            (folder / name).chmod(0o755)


_CLIENT = """#!{python} -S
import json, os, socket, sys
argv = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
request = dict(call={call!r}, arguments=[argv], cwd=os.getcwd(), env=dict(os.environ))
message = json.dumps(request).encode() + b"\\n"
server = socket.socket(socket.AF_UNIX)
server.connect({addresses!r}["--user-dir" in argv])
server.sendall(message[socket.send_fds(server, [message], [0, 1, 2]):])
answer = server.makefile().readline()
sys.exit(int(answer) if answer else {no_answer})
"""


class Running:
    """A command that a fork runs."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def has_ended(self) -> bool:
        """Whether there is an exit status."""
        return bool(select.select([self._connection], [], [], 0)[0])

    def wait(self) -> int:
        """Exit status."""
        with self._connection, self._connection.makefile() as answers:
            answer = answers.readline()
        return int(answer) if answer else NO_ANSWER


if __name__ == "__main__":
    serve(sys.argv[1])
