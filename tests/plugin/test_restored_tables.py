"""Checkpoints whose averaged factors are no table, or whose mixture is another one."""

import copy

import pytest
import torch

from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.plugin.restored_tables import (
    check_experts,
    check_output_layers,
    check_shared,
    check_tables,
)
from tests.plugin.conftest import build_host_model, build_model
from tests.plugin.trainers import build_trainer, take_updates


def test_averaged_factors_get_a_warning(caplog):
    states = []
    for updates in (3, 30):
        trainer = build_trainer(table="svd", name="spectrum_control", svd_interval=1)
        take_updates(trainer, updates)
        states.append(copy.deepcopy(trainer.get_model().state_dict()))
    model = trainer.get_model()
    for state in states:
        check_tables(state, model)
    assert "spectral-fairseq average" not in caplog.text
    mean = {key: (one + states[1][key]) / 2 for key, one in states[0].items()}
    check_tables(mean, model)
    assert caplog.text.count("use spectral-fairseq average") == 1


def test_what_is_no_matrix_of_numbers_is_left_to_others():
    trainer = build_trainer(table="svd")
    state, model = dict(trainer.get_model().state_dict()), trainer.get_model()
    for wrong in (torch.ones(16, 16, device="meta"), torch.ones(3), torch.eye(16).to_sparse(), "V"):
        check_tables({**state, "decoder.embed_tokens.V": wrong}, model)


def test_another_mixture_is_refused_with_its_flags():
    mixture, single = (build_trainer(arch=f"transformer_{kind}") for kind in ("mos", "sc"))
    stored = mixture.get_model().state_dict()
    check_experts(stored, mixture.get_model())
    with pytest.raises(CheckpointError, match="a single softmax; .* a mixture of .+ experts"):
        check_experts(stored, single.get_model())
    name = "decoder.output_projection.prior.weight"
    with pytest.raises(CheckpointError, match="--mixture-components"):
        check_experts({**stored, name: stored[name][:1]}, mixture.get_model())
    for wrong in (torch.tensor(3.0), "three"):  # no matrix: of another file, or damaged
        with pytest.raises(CheckpointError, match="one of a single softmax"):
            check_experts({**stored, name: wrong}, mixture.get_model())


@pytest.mark.parametrize("shared", [True, False])
def test_a_capped_output_layer_over_a_plain_table_is_refused_by_fairseq_s_own(shared, task):
    """fairseq only said that the architectures should match."""
    table = {"embedding_type": "plain", "share_all_embeddings": shared}
    capped = build_model(task, logit_softcap=2.0, **table)
    plain = build_host_model(task, "transformer", share_all_embeddings=shared)
    with pytest.raises(CheckpointError, match="of fairseq in decoder.*--logit-softcap.*--save-dir"):
        plain.load_state_dict(capped.state_dict())
    for model in (capped, build_model(task)):
        check_output_layers(model.state_dict(), model)
        check_output_layers(plain.state_dict(), model)


def test_the_remedy_for_another_arch_in_the_same_folder_is_another_folder(task):
    """Whoever changes --arch in a command seldom wants the checkpoint of the old one."""
    factored = build_model(task).state_dict()
    mixture = build_model(task, "transformer_mos", share_all_embeddings=False).state_dict()
    for stored in (factored, mixture):
        plain = build_host_model(task, "transformer", share_all_embeddings=True)
        with pytest.raises(CheckpointError, match="give another --save-dir"):
            plain.load_state_dict(stored)


@pytest.mark.parametrize("arch", ["transformer", "transformer_sc", "transformer_mos"])
def test_two_tables_for_one_of_the_model_are_refused(arch, task):
    """fairseq loads them one after the other, so that the last one silently stays."""
    build = build_host_model if arch == "transformer" else build_model
    model = build(task, arch, share_all_embeddings=True)
    state = dict(model.state_dict())
    check_shared(state, model)
    plain = {name: one for name, one in state.items() if not name.endswith((".U", ".sigma", ".V"))}
    table = torch.rand(len(state["encoder.layers.0.fc1.weight"]), 4)
    for shared in (
        [name for name in state if name.startswith("encoder.embed_tokens.")],
        ["encoder.embed_tokens.weight"],  # a plain table is loaded into any
    ):
        for name in shared:
            for other in (1.0, float("nan")):
                twin = name.replace("encoder", "decoder")
                one = state.get(name, table)
                if one.numel() and one.is_floating_point():
                    wrong = {**plain, name: one, twin: one + other}
                    with pytest.raises(CheckpointError, match="in the checkpoint, which are one"):
                        check_shared(wrong, model)
                    check_shared({**wrong, twin: one.clone()}, model)


def test_a_bias_of_one_of_two_layers_with_one_table_is_its_own():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5), "b": torch.nn.Linear(3, 5)})
    model["b"].weight = model["a"].weight
    check_shared(model.state_dict(), model)
    wrong = {**model.state_dict(), "b.weight": torch.rand(5, 3)}
    with pytest.raises(CheckpointError, match="b.weight to equal a.weight"):
        check_shared(wrong, model)
