"""The programs of README.md and two other pages that need more than torch run as they stand."""

import re
from pathlib import Path

import pytest
import torch

from tests.training.models import WORDS, build

ROOT = Path(__file__).parents[2]
MARK = "<!-- not run: tests/training/test_documents.py runs it -->\n"
BLOCK = re.compile(re.escape(MARK) + r"```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (name, index, text)
    for name in ("README.md", "docs/library.md", "docs/any_model.md")
    if (ROOT / name).exists()
    for index, text in enumerate(BLOCK.findall((ROOT / name).read_text("utf-8")))
]


@pytest.mark.slow
@pytest.mark.parametrize("name, index, text", BLOCKS, ids=lambda one: str(one)[:20])
def test_a_program_runs_as_it_stands(
    name, index, text, transformers, trainer, tmp_path, monkeypatch
):
    for package in ("accelerate", *(["lightning"] if "lightning" in text else [])):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", "counts": range(1, 1 + WORDS)}
    own = None
    if " = Trainer(" not in text:  # lines for the script of a user, who has a trainer
        own = names["trainer"] = trainer(build(transformers), max_steps=4)
    exec(compile(text, f"{name}, block {index}", "exec"), names)
    if own is None:
        return
    if "trainer.train()" not in text:
        own.train()
    assert own.state.global_step == 4
    if "weight_norm_(" in text:
        model = own.model
        assert type(model.get_input_embeddings()) is torch.nn.Embedding
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    else:
        (mine,) = (one for one in own.callback_handler.callbacks if hasattr(one, "control"))
        assert "SpectrumControl(" not in text or mine.control.updates == 4


def test_both_frameworks_are_there():
    if not BLOCKS:
        pytest.skip("the documents are not beside these tests")
    for framework in ("from transformers import", "from lightning"):
        assert any(framework in text for _, _, text in BLOCKS)
