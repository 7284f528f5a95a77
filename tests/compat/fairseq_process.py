"""Two processes that have imported fairseq: one as installed, one patched.

A test sends the same self-contained function to both, so that it shows the defect in the first and
its absence in the second. Each process imports fairseq once for the whole test session.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Callable, Dict, List

import spectral_fairseq

# Where this process found the package, so that an installed wheel is tested as such.
HOME = Path(spectral_fairseq.__file__).resolve().parents[1]

_SERVER = """
import json, os, sys, traceback
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import fairseq
if sys.argv[1] == "patched":
    from spectral_fairseq.compat import patch_fairseq
    patch_fairseq()
for line in sys.stdin:
    request = json.loads(line)
    space = {}
    try:
        exec("from __future__ import annotations\\n" + request["source"], space)
        reply = {"value": space[request["name"]](**request["arguments"])}
    except BaseException as error:
        traceback.print_exc()
        kinds = [kind.__name__ for kind in type(error).__mro__]
        reply = {"kinds": kinds, "message": str(error)}
    print(json.dumps(reply), file=replies, flush=True)
"""


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


def environment() -> Dict[str, str]:
    """Environment of a child process: one thread, and the package importable."""
    paths = [str(HOME)] + [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


class FairseqProcess:
    """A process that has imported fairseq.

    Args:
        kind: 'bare' or 'patched'.
        folder: working directory; what the process prints goes to a log file there.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self._log = open(folder / f"{kind}.log", "w")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=folder,
            env=environment(),
            text=True,
        )

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Run a self-contained function in the process; arguments and result are JSON."""
        source = textwrap.dedent(inspect.getsource(function))
        request = {"source": source, "name": function.__name__, "arguments": arguments}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, f"the process died; see {self._log.name}"
        reply = json.loads(line)
        if "kinds" in reply:
            raise Failure(reply["kinds"], reply["message"])
        return reply["value"]

    def cli(self, module: str, *arguments: Any) -> None:
        """Run a fairseq command, such as fairseq_cli.train, inside the process."""
        self.call(run_command, module=module, arguments=[str(a) for a in arguments])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()


def run_command(module: str, arguments: List[str]) -> None:
    import importlib
    import sys

    from fairseq import checkpoint_utils

    # fairseq keeps the best score of a run on this function; runs here share one process.
    for name in list(vars(checkpoint_utils.save_checkpoint)):
        delattr(checkpoint_utils.save_checkpoint, name)
    sys.argv = [module] + arguments
    importlib.import_module(module).cli_main()
