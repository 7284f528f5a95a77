import subprocess
import sys

import pytest

from spectral_fairseq import functional

WITHOUT_FAIRSEQ = """
import sys
sys.modules["fairseq"] = None  # importing it raises
import torch
from spectral_fairseq.functional import blockwise_cross_entropy, cosine_penalty
from spectral_fairseq.lm import AWDLSTM, TransformerXL
table = torch.randn(7, 3, requires_grad=True)
loss, _ = blockwise_cross_entropy(torch.randn(5, 3), torch.arange(5), table)
(loss + cosine_penalty(table)).backward()
assert table.grad.norm() > 0
"""


def test_the_public_names_are_listed_once_and_are_there():
    assert len(functional.__all__) == len(set(functional.__all__))
    for name in functional.__all__:
        value = getattr(functional, name)
        assert getattr(value, "__module__", "spectral_fairseq.functional").startswith(
            "spectral_fairseq.functional"
        )


@pytest.mark.slow
def test_the_functions_work_without_fairseq():
    subprocess.run([sys.executable, "-c", WITHOUT_FAIRSEQ], check=True)
