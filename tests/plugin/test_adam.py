"""fairseq's Adam in one pass."""

import copy
import inspect

import pytest
import torch
from fairseq.optim.adam import Adam
from torch.optim.adamw import adamw

from spectral_fairseq.plugin import adam


def bare_step(optimizer):
    """The step of fairseq's Adam as it comes."""
    inspect.unwrap(type(optimizer).step)(optimizer)


def adams(dtype, **options):
    """Two of fairseq's Adam for equal parameters, of which the second has float64."""
    torch.manual_seed(3)
    parameters = [torch.randn(size, dtype=dtype) for size in ((7, 5), (3,), (65, 33))]
    wide = [parameter.double().clone() for parameter in parameters]
    return Adam(parameters, **options), Adam(wide, **options)


def gradients_for(*optimizers, left_out=()):
    of = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    for index, alike in enumerate(zip(*of)):
        gradient = torch.randn_like(alike[0]) * 10.0**-index
        for parameter in alike:
            parameter.grad = None if index in left_out else gradient.to(parameter.dtype)


OPTIONS = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-4}


@pytest.mark.skipif(not adam._has_fused_adam(), reason="needs torch 2.4")
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_adam_in_one_pass_steps_as_fairseq_does(dtype, bound, decay, monkeypatch):
    fused = []

    def counted(parameters, *args, **options):
        fused.append(len(parameters))
        adamw(parameters, *args, **options)

    monkeypatch.setattr(adam, "adamw", counted)
    ours, naive = adams(dtype, weight_decay=decay, **OPTIONS)
    for update in range(12):
        gradients_for(ours, naive, left_out=[1] if update < 4 else [])
        ours.step()
        bare_step(naive)
    assert fused == [2] * 4 + [2, 1] * 8
    for mine, theirs in zip(ours.param_groups[0]["params"], naive.param_groups[0]["params"]):
        assert torch.allclose(mine.double(), theirs, rtol=bound, atol=bound)
        state, expected = ours.state[mine], naive.state[theirs]
        assert state.keys() == expected.keys() and state["step"] == expected["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            error = (state[name].double() - expected[name]).abs().max()
            assert error <= bound * expected[name].abs().max()


def test_a_step_goes_on_from_what_plain_fairseq_saved_and_the_reverse():
    ours, naive = adams(torch.float64, **OPTIONS)
    for _ in range(2):
        for _update in range(3):
            gradients_for(ours, naive)
            ours.step()
            bare_step(naive)
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, naive)]
        naive.load_state_dict(states[0])
        ours.load_state_dict(states[1])
    for mine, theirs in zip(ours.param_groups[0]["params"], naive.param_groups[0]["params"]):
        assert torch.allclose(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("turned", ["parameter", "gradient", "moments"])
def test_tensors_that_lie_in_memory_otherwise_are_stepped_alike(turned):
    """torch's fused step reads the numbers in the order of the memory, and takes no error."""

    def other_way_round(tensor):
        return tensor.t().contiguous().t()

    ours, naive = adams(torch.float64, **OPTIONS)
    matrix = ours.param_groups[0]["params"][0]
    if turned == "parameter":
        ours.param_groups[0]["params"][0] = other_way_round(matrix)
    for update in range(3):
        gradients_for(ours, naive)
        matrix = ours.param_groups[0]["params"][0]
        if turned == "gradient":
            matrix.grad = other_way_round(matrix.grad)
        elif turned == "parameter":
            matrix.grad = matrix.grad.contiguous()
        elif update:
            for name in ("exp_avg", "exp_avg_sq"):
                ours.state[matrix][name] = other_way_round(ours.state[matrix][name])
        ours.step()
        bare_step(naive)
    for mine, theirs in zip(ours.param_groups[0]["params"], naive.param_groups[0]["params"]):
        assert torch.allclose(mine, theirs, rtol=1e-13, atol=1e-13)


def test_a_model_that_changes_its_numbers_is_stepped_as_fairseq_does():
    """Whether a group may be stepped in one pass is decided once, and looked at again."""
    (ours, _), (same, _) = adams(torch.float32, **OPTIONS), adams(torch.float32, **OPTIONS)
    for dtype in (torch.float32, torch.float64, torch.float32):
        for optimizer in (ours, same):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.data = parameter.data.to(dtype)
                parameter.grad = None
        gradients_for(ours, same)
        ours.step()
        bare_step(same)
    for mine, theirs in zip(ours.param_groups[0]["params"], same.param_groups[0]["params"]):
        assert mine.dtype == theirs.dtype and torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["bfloat16", "amsgrad", "betas", "closure", "torch"])
def test_what_cannot_be_fused_is_stepped_by_fairseq(change, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("was fused")

    if change == "torch":
        monkeypatch.setattr(adam, "_has_fused_adam", lambda: False)
    adam._has_fused_adam()  # before it cannot be tried
    monkeypatch.setattr(adam, "adamw", refuse)
    dtype = torch.bfloat16 if change == "bfloat16" else torch.float32
    options = {**OPTIONS, "amsgrad": change == "amsgrad"}
    if change == "betas":
        options["betas"] = (0.9, 1.0)
    (ours, _), (same, _) = adams(dtype, **options), adams(dtype, **options)
    gradients_for(ours, same)
    ours.step(*([lambda: None] if change == "closure" else []))
    bare_step(same)
    for mine, theirs in zip(ours.param_groups[0]["params"], same.param_groups[0]["params"]):
        assert torch.equal(mine, theirs)
