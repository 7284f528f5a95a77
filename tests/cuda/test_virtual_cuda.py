"""On a CUDA device that exists in the books only: nothing mixes devices, few steps wait for it."""

import pytest
import torch

from tests.capabilities import HALF_LAYERS_ON_CPU
from tests.cuda.matrix import (
    CRITERIONS,
    MODELS,
    PRECISIONS,
    Training,
    covering,
    criterion_for,
)
from tests.cuda.parity import BOUNDS, compare

virtual = pytest.importorskip(
    "tests.cuda.virtual_cuda", reason="needs torch 2.2", exc_type=ImportError
)


FROM_BLOCKS = {"adversarial", "blockwise", "blockwise smoothed", "R-Drop"}


def waits_allowed(model, criterion):
    """How often the host may wait in a step. Lower it with the code, never raise it."""
    if criterion == "singular values" and model.table != "svd":
        # Whether W'W is finite, and its eigenvalues.
        return 2 + waits_allowed(model, "likelihood")
    if model.own_loss and criterion == "adversarial":
        return 4  # a mixture with label smoothing makes a second pass for the logs
    return 2 if model.own_loss or criterion in FROM_BLOCKS else 0


@pytest.mark.slow
@pytest.mark.parametrize("model, criterion, precision", [
    pytest.param(*one, marks=HALF_LAYERS_ON_CPU if one[2] in ("fp16", "amp") else ())
    for one in covering()
])  # fmt: skip
def test_a_training_step_stays_on_its_device(model, criterion, precision):
    made = MODELS[model]
    with virtual.virtual_cuda() as log:
        module = made.make()
        trained_with = criterion_for(criterion, module)
        training = Training(module, trained_with, made.data, precision, "cuda")
        first = training.step()  # what is copied once lies on the device from now on
        log.events.clear()
        second = training.step()
        waits = log.waits()
        assert all(virtual.on_gpu(p.grad) for p in module.parameters())
        assert virtual.on_gpu(training.evaluate())
    assert first > 0 and second > 0
    assert sum(waits.values()) <= waits_allowed(made, criterion), dict(waits)


def test_the_covering_part_has_every_model_criterion_and_precision():
    models, criterions, precisions = zip(*covering())
    assert set(models) == set(MODELS)
    assert set(criterions) == set(CRITERIONS) and set(precisions) == set(PRECISIONS)


def test_the_books_refuse_what_cuda_refuses():
    with virtual.virtual_cuda():
        on_device = torch.ones(3).cuda()
        with pytest.raises(virtual.DeviceMixed):
            on_device + torch.ones(3)


def test_the_books_see_the_backward_pass():
    with virtual.virtual_cuda() as log:
        leaf = torch.ones(3).cuda().requires_grad_()
        kept = leaf[torch.tensor([True, False, True]).cuda()].sum()
        log.events.clear()
        kept.backward()
        assert log.waits() == {"autograd or test: index_put: boolean mask": 1}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("amp", marks=HALF_LAYERS_ON_CPU)])
def test_parity_as_on_a_real_device(precision):
    """The comparison of ``pytest -m gpu``; here both devices round alike in float32."""
    with virtual.virtual_cuda():
        found = compare("transformer_sc svd mos", "spectrum control", precision, "cuda")
    assert found.loss <= BOUNDS[precision] and found.gradient <= 2 * BOUNDS[precision], found
    assert found.loss > 0 or precision == "fp32"
