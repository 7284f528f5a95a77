"""Commands one after the other in one new process, which takes seconds to import torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import spectral_fairseq

HOME = str(Path(spectral_fairseq.__file__).resolve().parents[1])
RUN = """
import contextlib, io, json, sys
from spectral_fairseq.commands.main import main

ended = []
for argv in json.loads(sys.argv[1]):
    streams = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        status = main(argv)
    ended.append([status, *(stream.getvalue() for stream in streams)])
print(json.dumps(ended))
"""


def without(*packages):
    """Python that lets no import of these packages succeed in a process that runs it first."""
    return f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_commands(commands, cwd, before="", *folders):
    """What each command of ``spectral-fairseq`` returned and printed.

    Args:
        commands: their arguments.
        cwd: working directory.
        before: Python that the process runs first.
        folders: the start of its path.
    """
    done = subprocess.run(
        [sys.executable, "-c", before + RUN, json.dumps(commands, default=str)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), HOME])},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [
        SimpleNamespace(returncode=status, stdout=stdout, stderr=stderr)
        for status, stdout, stderr in json.loads(done.stdout)
    ]
