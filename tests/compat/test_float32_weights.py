"""A training in half precision is saved and restored with its float32 weights."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch

from spectral_fairseq.compat.float32_weights import (
    float32_copies,
    restoring_float32,
    saving_float32,
    view_for,
)
from tests.capabilities import HALF_LAYERS_ON_CPU, LOAD_ANYTHING
from tests.compat.conftest import train_arguments
from tests.plugin.trainers import flattened_fp16, same_states


@HALF_LAYERS_ON_CPU
def test_half_precision_goes_on_with_the_float32_weights(
    which, process, data, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # or the bare one cannot resume

    def trained(folder, *epochs):
        for epoch in epochs:
            more = ("--fp16", "--fp16-no-flatten-grads", "--max-epoch", epoch)
            process.cli("fairseq_cli.train", *train_arguments(data, tmp_path / folder, *more))
        return torch.load(tmp_path / folder / "checkpoint2.pt", **LOAD_ANYTHING)["model"]

    through, resumed = trained("through", "2"), trained("resumed", "1", "2")
    assert same_states(through, resumed) == (which == "patched")
    table = through["encoder.embed_tokens.weight"]
    assert table.dtype == torch.float32
    assert torch.equal(table.half().float(), table) == (which == "bare")


RESET = ("--reset-optimizer", "--reset-dataloader", "--reset-meters", "--reset-lr-scheduler")


@pytest.mark.parametrize("flags", [("--finetune-from-model",), (*RESET, "--restore-file")])
def test_fine_tuning_begins_with_the_weights_of_the_file(
    flags, patched, data, checkpoint, tmp_path
):
    more = (*flags, checkpoint, "--lr", "0", "--max-epoch", "2", "--max-update", "1", "--bf16")
    patched.cli("fairseq_cli.train", *train_arguments(data, tmp_path, *more))
    before, after = (
        torch.load(path, **LOAD_ANYTHING)["model"]
        for path in (checkpoint, tmp_path / "checkpoint_last.pt")
    )
    assert same_states(before, after)


def a_trainer(optimizer, model, **given):
    flags = ("fp16", "bf16", "memory_efficient_fp16", "memory_efficient_bf16")
    common = SimpleNamespace(**{flag: given.get(flag, False) for flag in flags})
    cfg = SimpleNamespace(common=common)
    return SimpleNamespace(optimizer=optimizer, get_model=lambda: model, cfg=cfg)


@pytest.mark.parametrize("flags", [{}, {"fp16": True, "memory_efficient_fp16": True}])
def test_without_copies_the_loaded_weights_are_not_kept(flags):
    """fairseq drops them before it makes the optimiser, to save memory."""
    model = torch.nn.Linear(3, 4)

    def load(*_):
        state = {name: part.clone() for name, part in model.state_dict().items()}
        kept = [weakref.ref(part) for part in state.values()]
        model.load_state_dict(state)
        del state
        assert not any(one() is not None for one in kept)
        return True

    assert restoring_float32(load)(a_trainer(None, model, **flags), "checkpoint.pt")


def test_a_copy_of_its_own_may_lie_transposed():
    half = torch.nn.Parameter(torch.randn(3, 4).t().bfloat16())
    own = torch.nn.Parameter(half.data.float())
    optimizer = SimpleNamespace(fp16_params=[half], fp32_params=[own])
    assert view_for(float32_copies(optimizer)[id(half)], half).data_ptr() == own.data_ptr()


def test_the_moving_average_of_a_file_is_not_taken_for_its_weights():
    """--store-ema copies the model while a checkpoint is loaded, and loads the averages into it."""
    model = torch.nn.Linear(3, 4).bfloat16()
    weights = {name: torch.randn(part.shape) for name, part in model.state_dict().items()}
    copies = [part.detach().float() for part in model.parameters()]
    optimizer = SimpleNamespace(fp16_params=list(model.parameters()), fp32_params=copies)
    trainer = a_trainer(optimizer, model, bf16=True)

    def load(*_):
        model.load_state_dict(weights)
        averages = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        copy.deepcopy(model).load_state_dict(averages)

    restoring_float32(load)(trainer, "checkpoint.pt")
    assert all(map(torch.equal, copies, weights.values()))


def test_copies_that_are_flattened_are_saved_and_restored():
    optimizer, params, flat = flattened_fp16()
    model = torch.nn.ParameterList(params)
    trainer = a_trainer(optimizer, model, fp16=True)
    saved = saving_float32(lambda _: {"model": model.state_dict()})(trainer)["model"]
    assert torch.equal(torch.cat([one.view(-1) for one in saved.values()]), flat.detach())

    def load(*_):
        model.load_state_dict(saved)
        with torch.no_grad():
            params[1].zero_()  # the file's weight is not what the model goes on with

    with torch.no_grad():
        flat.zero_()
    restoring_float32(load)(trainer, "checkpoint.pt")
    restored = [view_for(held, p) for p, held in zip(params, float32_copies(optimizer).values())]
    assert torch.equal(restored[0], saved["0"]) and torch.equal(restored[2], saved["2"])
    assert not restored[1].any()
