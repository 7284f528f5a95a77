"""fairseq as installed and fairseq after the patches, each in forks of the tests' server.

A test sends the same self-contained function to both, so that it shows the defect in the first and
its absence in the second. Forks import this module, which therefore imports nothing of the package.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

from tests.fork_server import ForkServer


class Failure(Exception):
    """What the function raised in the other process.

    Args:
        kinds: names of the exception's class and of its bases.
        message: its text.
    """

    def __init__(self, kinds: List[str], message: str) -> None:
        super().__init__(f"{kinds[0]}: {message}")
        self.kinds = kinds
        self.message = message


class Fails(NamedTuple):
    """An exception that is expected in the other process.

    Args:
        match: pattern of its text.
        kind: name of its class or of a base.
    """

    match: str = ""
    kind: str = "BaseException"


class FairseqProcess:
    """Calls functions in processes that have imported fairseq.

    Args:
        server: starts a process for each call.
        folder: working directory of the processes.
    """

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server, self.folder = server, folder

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Run a self-contained function in a process; arguments and result are JSON."""
        source = textwrap.dedent(inspect.getsource(function))
        request = {"source": source, "name": function.__name__, "arguments": arguments}
        with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as printed:
            reply = self.folder / "reply.json"
            running = self._server.start(
                f"{__name__}:_answer",
                *(request, str(reply)),
                streams=[nothing.fileno(), printed.fileno(), printed.fileno()],
                cwd=self.folder,
            )
            status = running.wait()
            printed.seek(0)
            assert status == 0, printed.read()[-6000:]
        answer = json.loads(reply.read_text("utf-8"))
        reply.unlink()
        if "kinds" in answer:
            raise Failure(answer["kinds"], answer["message"])
        return answer["value"]

    def gives(self, expected: Any, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call a function and compare its result; of :class:`Fails` the exception is returned."""
        try:
            found = self.call(function, **arguments)
        except Failure as failure:
            if not isinstance(expected, Fails):
                raise
            assert re.search(expected.match, str(failure)), failure
            assert expected.kind in failure.kinds, failure
            return failure
        assert found == expected
        return None

    def cli(self, module: str, *arguments: Any) -> None:
        """Run a fairseq command, such as fairseq_cli.train, in a process."""
        self.call(run_command, module=module, arguments=[str(a) for a in arguments])


def patch() -> None:
    """In the process: patch fairseq."""
    importlib.import_module("spectral_fairseq.compat").patch_fairseq()


def _answer(request: Dict[str, Any], reply: str) -> None:
    """In the process: call the function, and write what it returns or raises into ``reply``."""
    space: Dict[str, Any] = {}
    answer: Dict[str, Any]
    try:
        exec("from __future__ import annotations\n" + request["source"], space)
        answer = {"value": space[request["name"]](**request["arguments"])}
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        answer = {"kinds": kinds, "message": str(error)}
    Path(reply).write_text(json.dumps(answer), "utf-8")


def run_command(module: str, arguments: List[str]) -> None:
    import importlib
    import sys

    sys.argv = [module] + arguments
    importlib.import_module(module).cli_main()
