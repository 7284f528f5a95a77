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


@pytest.mark.parametrize("name", ["linalg", "losses", "measures", "penalties"])
def test_every_name_of_a_subpackage_is_exported_once(name):
    exported = getattr(functional, name).__all__
    assert all(functional.__all__.count(one) == 1 for one in exported)
    for one in exported:
        assert getattr(functional, one) is getattr(getattr(functional, name), one)


@pytest.mark.slow
def test_the_functions_work_without_fairseq():
    subprocess.run([sys.executable, "-c", WITHOUT_FAIRSEQ], check=True)
