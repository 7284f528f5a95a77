"""Checkpoints that the fuzzer found to end in a traceback; see tests/fuzz."""

import re

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.cli.main import main
from tests.language_models import block_checkpoint


def tensor_as_setting(state):
    state["cfg"]["model"]["base_sublayers"] = torch.ones(2)


def no_tensors(state):
    state["model"] = {}


def factor_of_three_dimensions(state):
    name = next(name for name in state["model"] if name.endswith(".V"))
    state["model"][name] = state["model"][name].unsqueeze(0)


@pytest.mark.parametrize("change, commands, match", [
    (tensor_as_setting, ["export"], "settings from which fairseq can build"),
    (no_tensors, ["export"], "a table decoder.embed_tokens.weight"),
    (factor_of_three_dimensions, ["export", "analyze"], r"that fit together.*\(1, 16, 16\)"),
])  # fmt: skip
def test_refused_in_one_line(change, commands, match, train, tmp_path, capsys):
    state = load_checkpoint(block_checkpoint(train))
    change(state)
    torch.save(state, tmp_path / "changed.pt")
    for command in commands:
        out = [str(tmp_path / "out.pt")] if command == "export" else ["--table", "embed_tokens"]
        assert main([command, str(tmp_path / "changed.pt"), *out]) == 2
        assert re.search(match, capsys.readouterr().err)
