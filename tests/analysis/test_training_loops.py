"""Measures in a training: logged when they are due, one warning where there are none."""

import logging

import pytest
import torch
from torch import nn

from spectral_fairseq.analysis import analyze, api, training_measures
from spectral_fairseq.errors import CheckpointError, ConfigurationError


def model():
    return torch.nn.ModuleDict({"lm_head": torch.nn.Linear(4, 30)})


class Log(list):
    """A trainer that keeps what is logged."""

    def log(self, measures):
        self.append(measures)


@pytest.mark.parametrize("rank_zero, logged", [(True, 2), (False, 0)])
def test_the_trainer_of_transformers(transformers, rank_zero, logged):  # noqa: F811
    from spectral_fairseq.training.callbacks import SpectralTrainerCallback

    log = Log()
    measures = SpectralTrainerCallback(log, measure_every=10)
    handler = transformers.trainer_callback.CallbackHandler([measures], model(), None, None, None)
    for step in range(1, 21):
        state = transformers.TrainerState(global_step=step, is_world_process_zero=rank_zero)
        handler.on_step_end(None, state, transformers.TrainerControl())
    assert len(log) == logged
    assert all(-1 <= one["table/mean_cosine"] <= 1 for one in log)


def distribute(table, mesh, placement):
    tensor = torch.distributed.tensor.distribute_tensor(table, mesh, [placement])
    return nn.Parameter(tensor)


def test_a_table_that_is_split_over_devices_is_refused_before_any_operation(mesh, monkeypatch):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    made = nn.ModuleDict({"wte": nn.Embedding(30, 4), "lm_head": nn.Linear(4, 30)})
    weight = made["lm_head"].weight.detach()
    for placement in (Shard(0), Shard(1)):
        made["lm_head"].weight = distribute(weight, mesh, placement)
        with monkeypatch.context() as patch:
            patch.setattr(DTensor, "__torch_dispatch__", None)
            for model in (made, made.state_dict(keep_vars=True), made["lm_head"].weight):
                with pytest.raises(CheckpointError, match=r"DTensor.*full_tensor\(\)"):
                    analyze(model)
        assert training_measures(made) == {}
    made["lm_head"].weight = distribute(weight, mesh, Replicate())
    found = analyze(made).to_dict()["checkpoints"][0]
    assert found["table"]["name"] == "lm_head" and found["table"]["rows"] == 30


def test_a_module_of_fsdp_is_refused_before_its_state_dict_waits():
    class FullyShardedDataParallel(nn.Module):
        def state_dict(self, *args, **options):
            raise AssertionError("the other processes would have to call it as well")

    with pytest.raises(ConfigurationError, match="FSDP.*FULL_STATE_DICT"):
        analyze(nn.Sequential(FullyShardedDataParallel()))


def test_a_table_of_deepspeeds_third_stage():
    made = model()
    made["lm_head"].weight = nn.Parameter(torch.zeros(0))
    made["lm_head"].weight.ds_id = 3
    with pytest.raises(CheckpointError, match="DeepSpeed.*GatheredParameters"):
        analyze(made)


BROKEN = {
    "diverged": lambda: model().requires_grad_(False).apply(diverge),
    "of an adapter": lambda: nn.ModuleDict(
        {"lm_head": nn.ModuleDict({"base_layer": nn.Linear(4, 30), "ia3_l": nn.Linear(4, 1)})}
    ),
    "without a table": lambda: nn.Conv2d(3, 4, 5),
    "of something else": lambda: "no/such/file",
}


def diverge(module):
    if isinstance(module, nn.Linear):
        module.weight[3] = float("nan")


@pytest.mark.parametrize("form", BROKEN)
def test_a_training_is_warned_once_and_goes_on(form, monkeypatch, caplog):
    monkeypatch.setattr(api, "_unmeasured", set())
    made = BROKEN[form]()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            if form == "diverged":
                made["lm_head"].weight[3 + step] = float("nan")
            assert training_measures(made) == {}
    (warning,) = [one.getMessage() for one in caplog.records if "not measured" in one.getMessage()]
    assert type(made).__name__ in warning and "expected" in warning
