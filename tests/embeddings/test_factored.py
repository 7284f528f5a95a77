"""What all factored tables do alike with a plain table of a checkpoint."""

import pytest
import torch

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.embeddings.weight_norm import WeightNormEmbedding
from spectral_fairseq.errors import CheckpointError, ConfigurationError

PAD, FILLERS = 1, (35, 36)


@pytest.fixture(params=[SVDEmbedding, WeightNormEmbedding])
def table(request):
    return request.param(37, 5, PAD, FILLERS)


def test_another_shape_is_refused(table):
    with pytest.raises(ConfigurationError, match="shape"):
        table.upgrade_state_dict_named({"t.weight": torch.zeros(3, 5)}, "t")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(table, bad):
    weight = torch.zeros(37, 5)
    weight[7, 3] = bad
    with pytest.raises(CheckpointError, match="t.weight.*infinity or NaN in 1 rows.*earlier"):
        table.upgrade_state_dict_named({"t.weight": weight}, "t")
