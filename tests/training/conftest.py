"""Models of transformers whose own losses tell how their targets lie, and what trains them."""

from typing import Any

import pytest

from tests.training.models import data


@pytest.fixture()
def transformers(transformers: Any) -> Any:  # noqa: F811
    """The package of this name, or a skipped test where it is older than ``compute_loss_func``."""
    if not hasattr(transformers.PreTrainedModel, "loss_function"):
        pytest.skip("this version of transformers has no compute_loss_func")
    return transformers


@pytest.fixture()
def trainer(transformers, tmp_path):
    """Build a Trainer, each with a folder of its own unless one is given."""
    pytest.importorskip("accelerate")
    made = []

    def make(model, loss=None, folder=None, **options):
        made.append(model)
        settings = {
            "per_device_train_batch_size": 4,
            "max_steps": 6,
            "learning_rate": 0.02,
            "save_strategy": "no",
            "report_to": [],
            "seed": 3,
            "disable_tqdm": True,
            "use_cpu": True,
            "logging_strategy": "no",
            "max_grad_norm": 0.0,
            "dataloader_pin_memory": False,
        }
        arguments = transformers.TrainingArguments(
            str(folder or tmp_path / str(len(made))), **{**settings, **options}
        )
        datasets = {"train_dataset": data(), "eval_dataset": data()}
        return transformers.Trainer(model, arguments, compute_loss_func=loss, **datasets)

    return make
