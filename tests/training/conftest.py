"""Models of transformers whose own losses tell how their targets lie."""

from typing import Any

import pytest


@pytest.fixture()
def transformers(transformers: Any) -> Any:  # noqa: F811
    """The package of this name, or a skipped test where it is older than ``compute_loss_func``."""
    if not hasattr(transformers.PreTrainedModel, "loss_function"):
        pytest.skip("this version of transformers has no compute_loss_func")
    return transformers
