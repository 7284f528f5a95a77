"""The fixtures of the package's own tests, which train tiny models through the command line."""

import logging
import signal

import pytest

from studies import running
from tests.conftest import (  # noqa: F401
    fork_server,
    made_once,
    plugin_server,
    pytest_collection,
    pytest_collection_modifyitems,
    run_cli,
    tiny_lm_data,
    tiny_translation_data,
    train,
)


@pytest.fixture
def own_process():
    """Undo what a command of the examples does to its process."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    disabled = logging.root.manager.disable
    yield
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)
    logging.disable(disabled)


@pytest.fixture
def forked_commands(fork_server, tmp_path_factory, monkeypatch):  # noqa: F811
    """The commands that the examples start run in forks of the server."""
    folder = tmp_path_factory.mktemp("programs") / "bin"
    fork_server.write_programs(folder)
    monkeypatch.setattr(running, "find_command", lambda name: str(folder / name))
    monkeypatch.setenv("PYTHONPATH", fork_server.python_path())
