"""State dicts of models on the virtual device."""

import pytest
import torch

from spectral_fairseq.training import factor_, plain_state_dict, weight_norm_
from tests.training.models import Straight

virtual = pytest.importorskip(
    "tests.cuda.virtual_cuda", reason="needs torch 2.2", exc_type=ImportError
)


@pytest.mark.parametrize("change", [weight_norm_, factor_, lambda model: None])
def test_plain_entries_of_a_model_on_the_device_are_in_memory(change):
    model = Straight(tied=True)
    expected = model.lm_head.weight.detach().clone()
    with virtual.virtual_cuda():
        change(model)
        found = plain_state_dict(model.cuda())
        names = [name for name, one in found.items() if one.shape == expected.shape]
        assert len(names) == 2 and found[names[0]] is found[names[1]]
        assert not any(virtual.on_gpu(one) for one in found.values())
    torch.testing.assert_close(found[names[0]], expected)
