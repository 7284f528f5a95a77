"""Checkpoints whose factors fairseq averaged, without knowing that they are factors."""

import copy

import torch

from spectral_fairseq.plugin.hooks.table_kinds import check_tables
from tests.plugin.trainers import build_trainer, train


def test_averaged_factors_get_a_warning(caplog):
    states = []
    for updates in (3, 30):
        trainer = build_trainer(table="svd", name="spectrum_control", svd_interval=1)
        train(trainer, updates)
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
