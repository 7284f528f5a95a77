"""Checkpoints that the fuzzer found to end in a traceback; see studies/fuzz."""

import re

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from tests.language_models import block_checkpoint


def tensor_as_setting(state):
    state["cfg"]["model"]["base_sublayers"] = torch.ones(2)


def no_tensors(state):
    state["model"] = {}


def first_entry(state, entry):
    """A copy of a factor, under all names of its table: copies that differ are refused before."""
    names = [name for name in state["model"] if name.endswith(f".{entry}")]
    copy = state["model"][names[0]].clone()
    state["model"].update({name: copy for name in names})
    return names, copy


def factor_of_three_dimensions(state):
    names, factor = first_entry(state, "V")
    state["model"].update({name: factor.unsqueeze(0) for name in names})


def scale_without_a_number(state):
    names, scale = first_entry(state, "scale")
    state["model"].update({name: scale.reshape(1)[:0] for name in names})


def scale_that_is_not_a_number(state):
    first_entry(state, "scale")[1].fill_(float("nan"))


def factor_that_is_not_a_number(state):
    first_entry(state, "U")[1].fill_(float("nan"))


def factor_too_large_for_squares(state):
    first_entry(state, "U")[1][5] = 2e37


def version_without_a_dimension(state):
    state["model"]["decoder.version"] = torch.tensor(3.0)


@pytest.mark.parametrize("change, commands, match", [
    (tensor_as_setting, ["export"], "settings from which fairseq can build"),
    (no_tensors, ["export"], "a table decoder.embed_tokens.weight"),
    (factor_of_three_dimensions, ["export", "analyze"], r"that fit together.*\(1, 16, 16\)"),
    (scale_without_a_number, ["analyze"], r"one finite number.* as the scale.*shape \(0,\)"),
    (scale_that_is_not_a_number, ["analyze"], "one finite number.* as the scale.*found nan"),
    (factor_that_is_not_a_number, ["analyze"], "finite numbers in decoder.embed_tokens"),
    (factor_too_large_for_squares, ["analyze"], "numbers in float32; found 1 of .* too long"),
    (version_without_a_dimension, ["evaluate-lm"], "that fairseq can build.*IndexError"),
])  # fmt: skip
def test_refused_in_one_line(change, commands, match, train, tiny_lm_data, command, tmp_path):
    state = load_checkpoint(block_checkpoint(train))
    change(state)
    torch.save(state, tmp_path / "changed.pt")
    more = {
        "analyze": ("--table", "embed_tokens"),
        "evaluate-lm": (tiny_lm_data, "--cpu"),
        "export": (tmp_path / "out.pt",),
    }
    for name in commands:
        assert re.search(match, command(name, tmp_path / "changed.pt", *more[name], rc=2))
