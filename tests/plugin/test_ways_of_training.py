"""Ways of training that would train something else, or nothing, are refused."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.plugin.hooks.ways_of_training import check_ways
from tests.plugin.conftest import build_criterion, build_model


def check(cfg, model, criterion):
    check_ways(SimpleNamespace(cfg=cfg, get_model=lambda: model, get_criterion=lambda: criterion))


def configuration(**changes):
    return OmegaConf.create(
        {
            "distributed_training": {"ddp_backend": changes.pop("ddp_backend", "pytorch_ddp")},
            "common": {"memory_efficient_fp16": False, "memory_efficient_bf16": False, **changes},
        }
    )


@pytest.mark.parametrize("name", ["mle_cosreg", "weight_norm"])
def test_sharded_parameters_with_a_criterion_of_ours(task, name):
    sharded, criterion = configuration(ddp_backend="fully_sharded"), build_criterion(task, name)
    model = build_model(task, "transformer_sc", embedding_type="plain")
    with pytest.raises(UnsupportedError, match="pytorch_ddp"):
        check(sharded, model, criterion)
    check(sharded, model, build_criterion(task, "label_smoothed_cross_entropy"))
    check(configuration(), model, criterion)


@pytest.mark.parametrize("precision, dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_factored_tables_without_float32_copies(task, precision, dtype):
    criterion = build_criterion(task, "spectrum_control")
    efficient = configuration(**{f"memory_efficient_{precision}": True})
    model = build_model(task)
    for kind in ("svd", "weight-norm"):
        with pytest.raises(UnsupportedError, match=f"--{precision} or --amp"):
            check(efficient, build_model(task, embedding_type=kind), criterion)
    check(efficient, build_model(task, embedding_type="plain"), criterion)
    # The reason: a step of Adam leaves the diagonal of the stored V where it is.
    diagonal = model.decoder.output_projection.table.V.detach().diagonal().to(dtype)
    assert torch.equal(diagonal - 5e-4, diagonal)
