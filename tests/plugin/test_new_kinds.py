"""A new kind of table or head needs a file of its own and a line in the list of its package."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_everything_follows_from_the_declaration():
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugin.new_kinds"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
