"""Fixtures that the tests of tools share with each other and with those of the plugin."""

import pytest

from spectral_fairseq.commands.main import main
from tests.plugin.conftest import task  # noqa: F401


@pytest.fixture
def command(capsys):
    """Run a subcommand in this process: ``command("export", PATH, OUT, rc=0)``.

    It returns what is printed, or on a failure what is said of the error.
    """

    def run(*argv, rc=0):
        capsys.readouterr()
        assert main([str(one) for one in argv]) == rc
        printed = capsys.readouterr()
        return printed.err if rc else printed.out

    return run
