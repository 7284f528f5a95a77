"""A damaged state of an optimiser is refused where it would be read."""

import types

import pytest
import torch

from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.lm.averaged_sgd import AveragedSGD, saved_groups
from spectral_fairseq.lm.coupled_adam import CoupledAdam


def parameters():
    return [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize("damage, name", [
    ({"param_groups": None}, "param_groups"),
    ({"param_groups": {}}, "param_groups"),
    ({"param_groups": [True]}, "param_groups"),
    ({"param_groups": [{}]}, "param_groups"),
    ({"state": None}, "state"),
    ({"state": []}, "state"),
])  # fmt: skip
@pytest.mark.parametrize("optimizer", [AveragedSGD, CoupledAdam])
def test_a_state_without_its_parts_is_refused(optimizer, damage, name):
    one = optimizer(parameters(), lr=0.1)
    state = one.state_dict()
    assert saved_groups(state) == state["param_groups"]
    with pytest.raises(CheckpointError, match=f"with {name} as torch saves them"):
        one.load_state_dict({**state, **damage})
    del state[name]
    with pytest.raises(CheckpointError, match=f"found no such {name}"):
        one.load_state_dict(types.MappingProxyType(state))
