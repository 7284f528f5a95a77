"""The fixtures of the package's own tests, which train tiny models through the command line."""

from tests.conftest import (  # noqa: F401
    fork_server,
    made_once,
    pytest_collection_modifyitems,
    run_cli,
    tiny_lm_data,
    tiny_translation_data,
    train,
)
from tests.examples.conftest import forked_commands, own_process  # noqa: F401
