"""The callbacks of docs/any_model.md log the measures when they are due, and only then."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "any_model.md"


def callback(first_import):
    """The class of the block of the page that begins with an import."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    (block,) = [text for text in blocks if first_import in text]
    names = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names["TableMeasures"]


def model():
    return torch.nn.ModuleDict({"lm_head": torch.nn.Linear(4, 30)})


class Log(list):
    """A trainer, or its logger, that keeps what is logged."""

    def log(self, measures):
        self.append(measures)

    def log_metrics(self, measures, step):
        self.append(measures)


@pytest.mark.parametrize("rank_zero, logged", [(True, 2), (False, 0)])
def test_the_trainer_of_transformers(transformers, rank_zero, logged):  # noqa: F811
    log = Log()
    measures = callback("import TrainerCallback")(log, every=10)
    handler = transformers.trainer_callback.CallbackHandler([measures], model(), None, None, None)
    for step in range(1, 21):
        state = transformers.TrainerState(global_step=step, is_world_process_zero=rank_zero)
        handler.on_step_end(None, state, transformers.TrainerControl())
    assert len(log) == logged
    assert all(-1 <= one["table/mean_cosine"] <= 1 for one in log)


def test_a_callback_of_lightning(monkeypatch):
    lightning = types.ModuleType("lightning.pytorch")
    lightning.Callback = object
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", lightning)
    measures, log = callback("from lightning.pytorch")(every=10), Log()
    for step in range(1, 21):
        trainer = types.SimpleNamespace(is_global_zero=True, global_step=step, logger=log)
        measures.on_train_batch_end(trainer, model(), None, None, step)
    assert len(log) == 2 and "table/effective_rank" in log[0]
