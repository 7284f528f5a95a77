"""Control outside the optimiser, of plain tables and of factors, under fairseq's trainer."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from omegaconf import OmegaConf

from spectral_fairseq.checkpoints.reading import load_checkpoint, torch_load
from spectral_fairseq.errors import DataError
from spectral_fairseq.plugin.control_trainer import TableChanges, control_tables, controls_of
from spectral_fairseq.plugin.find import output_matrix
from spectral_fairseq.plugin.trained_weights import trained_weights
from tests.plugin.conftest import build_criterion, build_model, make_sample, words
from tests.plugin.test_factor_renewal import svd_table
from tests.plugin.test_same_training import (
    CONTROL,
    CRITERION,
    FIXED,
    SHARED,
    same_trainings,
    weights_of,
)
from tests.plugin.test_stateful_training import XL
from tests.plugin.trainers import (
    ALL_PRECISIONS,
    OPTIMIZERS,
    PLAIN,
    PRECISIONS,
    Task,
    build_trainer,
    counted,
    excluded_rows,
    flattened_fp16,
    output_table,
    save_in_epoch,
    take_updates,
)
from tests.reference import spectra as reference

PRIOR = torch.exp(-0.0005 * torch.arange(1, 17, dtype=torch.float64))
FULL = {"spectrum_decay": 1.0, "spectrum_decay_interval": 1, "spectrum_slack": 1.2}


def shape_of(trainer):
    sigma = torch.linalg.svdvals(counted(trainer))
    return float(sigma[0] / sigma.square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_bound_holds_under_every_optimiser(optimizer):
    plain, controlled = (
        build_trainer(optimizer=optimizer),
        build_trainer(optimizer=optimizer, **FULL),
    )
    for trainer in (plain, controlled):
        with torch.no_grad():  # a common direction, as degenerated tables have
            output_table(trainer).add_(1.0)
        take_updates(trainer, 4)
    assert shape_of(plain) > 2
    # The bound is taken before the change makes the norm smaller, again and again.
    assert shape_of(controlled) < 1.3


@pytest.mark.slow
@pytest.mark.parametrize("precision", ALL_PRECISIONS)
def test_what_is_trained_is_what_is_controlled(precision):
    """One update without control, then the naive change of what the optimiser trains."""
    plain = build_trainer(*PRECISIONS[precision])
    flags = {"spectrum_side": "both", "table_centering": 0.25, "spectrum_decay": 0.5}
    controlled = build_trainer(*PRECISIONS[precision], **flags, spectrum_decay_interval=2)
    for trainer in (plain, controlled):
        take_updates(trainer, 2)
    assert plain.get_num_updates() == 2  # or an overflow hides all
    parameter = output_table(plain)
    excluded = excluded_rows(plain)
    before, after = (
        trained_weights(
            t.optimizer, output_matrix(t.get_model(), len(t.task.target_dictionary))
        ).double()
        for t in (plain, controlled)
    )
    # lr / lr_max is 1 under the fixed schedule; 2 eta of the way, all of it.
    expected = reference.controlled(before, PRIOR, 1.0, "both", 1.5, "free", 0.5, excluded)
    close = 1e-2 if precision == "memory-efficient fp16" else 1e-5
    torch.testing.assert_close(after, expected, rtol=close, atol=close)
    assert torch.equal(output_table(controlled).float(), after.to(parameter.dtype).float())


def test_flattened_float32_copy_under_fp16():
    optimizer, params, _ = flattened_fp16()
    copy = trained_weights(optimizer, params[1])
    assert torch.equal(copy, params[1].float())
    copy.mul_(2)
    optimizer._sync_fp32_params_to_fp16()
    assert torch.equal(params[1].float(), copy)


def triangular(trainer):
    """Whose --lr is the lowest rate."""
    cfg = OmegaConf.create(OmegaConf.to_container(trainer.cfg))
    peak = {"lr_scheduler": {"_name": "triangular", "max_lr": 0.2}}
    trainer.cfg = OmegaConf.merge(cfg, peak)


def manual(trainer):
    """Where --lr keeps its default of 0.25, since the schedule has rates of its own."""
    trainer.lr_scheduler.update2lr = {0: 0.02, 1: 0.02, 3: 0.002}
    trainer.lr_scheduler.epoch2lr = {}
    trainer.cfg.optimization.lr = [0.25]


@pytest.mark.parametrize("schedule, rates", [
    (None, ((0.0, 0.0), (0.01, 0.05), (0.02, 0.1), (5.0, 0.1))),
    (triangular, ((0.02, 0.01),)),
    (manual, ((0.002, 0.01),)),
])  # fmt: skip
def test_the_share_follows_the_learning_rate(schedule, rates):
    """eta k lr / lr_max of the way: none where the rate is zero, as after its schedule's end."""
    trainer = build_trainer(spectrum_decay=0.1, spectrum_decay_interval=1, spectrum_side="both")
    take_updates(trainer, 1)
    if schedule is not None:
        schedule(trainer)
    for lr, share in rates:
        before, excluded = output_table(trainer).clone(), excluded_rows(trainer)
        control_tables(trainer, controls_of(trainer), lr)
        expected = reference.controlled(before, PRIOR, share, "both", 1.5, "free", 0.0, excluded)
        torch.testing.assert_close(output_table(trainer).double(), expected, rtol=1e-5, atol=1e-6)


def test_the_whole_mean_is_taken_out_after_every_step():
    """As in the paper of mu-centering, at a constant learning rate."""
    trainer = build_trainer(table_centering=1.0, spectrum_decay_interval=1)
    with torch.no_grad():
        output_table(trainer).add_(1.0)
    for _ in range(3):
        take_updates(trainer, 1)
        assert float(counted(trainer).mean(0).abs().max()) < 1e-6


def test_it_is_due_at_every_kth_update_after_the_start():
    task, flags = Task(words()), {"spectrum_decay_interval": 3, "spectrum_decay_start": 4}
    criterion = build_criterion(task, **PLAIN, **flags, spectrum_decay=0.1)
    control = criterion.objective_of(build_model(task, embedding_type="plain")).control
    assert [n for n in range(14) if control.rule.is_due(n)] == [6, 9, 12]


def test_training_that_begins_anew_from_a_checkpoint_begins_with_its_norm(tmp_path):
    """Of a fixed prior of automatic scale, which is otherwise that of the first of all tables."""
    flags = {"spectrum_decay": 0.2, "spectrum_decay_interval": 2, "spectrum_scale": "fixed"}
    half, anew = build_trainer(**flags), build_trainer(begin=False, **flags)
    take_updates(half, 3)
    save_in_epoch(half, tmp_path / "c.pt", done=3)
    state = torch_load(tmp_path / "c.pt", map_location="cpu")
    assert list(state["extra_state"][TableChanges.name]) == ["decoder"]
    anew.load_checkpoint(str(tmp_path / "c.pt"), reset_optimizer=True)
    anew.begin_epoch(1)
    (bound,) = anew.get_criterion().objectives_of(anew.get_model())
    assert bound.parts.prior.start_norm == pytest.approx(float(counted(anew).norm()), rel=1e-3)


@pytest.mark.parametrize("kind, flags", [("plain", FULL), ("svd", {"svd_interval": 1})])
def test_a_table_with_nan_is_refused_unwritten(kind, flags):
    trainer = build_trainer(table=kind, **flags)
    stored = output_table(trainer) if kind == "plain" else svd_table(trainer).U.detach()
    stored[7, 3] = float("nan")
    before = copy.deepcopy(trainer.get_model().state_dict())
    trainer.set_num_updates(1)
    with pytest.raises(DataError, match="table of finite numbers"):
        control_tables(trainer, controls_of(trainer), 0.02)
    for name, one in trainer.get_model().state_dict().items():
        torch.testing.assert_close(one, before[name], equal_nan=True, rtol=0, atol=0)


def active(criterion, model):
    """Names of the penalties, and of what is done to the table outside the optimiser."""
    criterion.check_model(model)
    bound = criterion.objective_of(model.train())
    done = ["decay"] if bound.control.rule.is_due(10) else []
    done += ["renewal"] if bound.control.svd_interval else []
    return " ".join([*(term.name for term in bound.penalties(updates=0)), *done])


@pytest.mark.parametrize("flags, of_plain, of_factors", [
    ({}, "decay", "spectrum orthogonality renewal"),
    ({"spectrum_weight": 0.1}, "spectrum", "spectrum orthogonality renewal"),
    ({"spectrum_weight": 0.1, "spectrum_decay": 0.1}, "spectrum decay", None),
    ({"spectrum_weight": 0.0}, None, "orthogonality"),
    ({"svd_interval": 0}, None, "spectrum orthogonality"),
    (PLAIN, "", ""),
])  # fmt: skip
def test_the_preset_does_what_suits_the_table(task, flags, of_plain, of_factors):
    criterion = build_criterion(task, **flags)
    for kind, expected in (("plain", of_plain), ("svd", of_factors), ("plain", of_plain)):
        if expected is not None:
            assert active(criterion, build_model(task, embedding_type=kind)) == expected


@pytest.mark.parametrize("kind, warned", [("svd", True), ("weight-norm", False)])
def test_an_svd_table_with_a_criterion_of_fairseq_is_warned_of(task, kind, warned, caplog):
    trainer = SimpleNamespace(
        get_criterion=lambda: CrossEntropyCriterion(task, sentence_avg=False),
        get_model=lambda: build_model(task, embedding_type=kind),
    )
    controls_of(trainer)
    assert ("without spectrum control" in caplog.text) is warned


def test_an_automatic_prior_keeps_the_norm_of_the_start(task):
    """Asked again after the table grew, it is the same prior."""
    model = build_model(task, embedding_type="plain")
    criterion = build_criterion(task, **PLAIN, spectrum_weight=0.3)
    model.train()
    weight, sample = output_matrix(model, len(task.target_dictionary)), make_sample(task)
    first, second = [], []
    for log in (first, second):
        value = float(criterion(model, sample)[2]["spectrum"]) / sample["ntokens"]
        sigma = torch.linalg.svdvals(weight.detach().double()[criterion_rows(criterion, model)])
        log += [value, sigma]
        with torch.no_grad():
            weight.mul_(5)
    norm = float(first[1].norm())
    for value, sigma in (first, second):
        expected = (sigma - PRIOR * norm / PRIOR.norm()).square().sum()
        assert value == pytest.approx(float(expected), rel=1e-3)


def criterion_rows(criterion, model):
    words = criterion.objective_of(model).parts.words
    return [i for i in range(words.rows) if i not in words.excluded.tolist()]


def test_flags_of_the_prior_reach_criterion_and_arch(train):
    """The archs of this package and the criterions share their names on the command line."""
    for arch, defaults in (("transformer_sc", ("--embedding-type", "plain")), ("transformer", ())):
        folder = train(arch, CRITERION, SHARED, *FIXED, *defaults)
        cfg = load_checkpoint(folder / "checkpoint_last.pt")["cfg"]
        assert cfg["criterion"]["spectrum_c2"] == 0.05
        assert cfg["criterion"]["spectrum_prior"] == "exponential"
        assert cfg["criterion"]["spectrum_gamma"] is None
        if arch == "transformer_sc":
            assert cfg["model"]["spectrum_c2"] == 0.05


def test_a_transformer_xl_with_an_adaptive_softmax(train):
    run = ("transformer_xl_wt103_small", CRITERION, *XL, "--embedding-type", "plain")
    assert not same_trainings(train(*run, *CONTROL), train(*run))


def test_an_untied_language_model_controls_its_output_table_alone(train):
    flags = (CRITERION, "--max-update", "2", "--lr", "0")
    plain = weights_of(train("transformer_lm", *flags))
    control = weights_of(train("transformer_lm", *flags, *FIXED, "--spectrum-decay-interval", "1"))
    changed = [key for key in plain if not torch.equal(plain[key], control[key])]
    assert changed == []  # a rate of zero changes nothing at all
    flags = (*flags[:-1], "1e-9")
    control = weights_of(train("transformer_lm", *flags, *FIXED, "--spectrum-decay-interval", "1"))
    moved = [k for k in plain if not torch.allclose(plain[k], control[k], rtol=0, atol=1e-6)]
    assert moved == ["decoder.output_projection.weight"]


def test_zero_equals_fairseq_bit_for_bit(train):
    plain = train("transformer", "cross_entropy", SHARED)
    off = ("--spectrum-decay", "0", "--spectrum-decay-interval", "1", "--loss-form", "dense")
    zero = train("transformer", CRITERION, SHARED, *off)
    assert same_trainings(plain, zero)


@pytest.mark.parametrize("flags, said", [
    ({"name": "spectrum_control"}, True),
    ({"name": "spectrum_control", "spectrum_decay": 0.1}, False),
    ({"name": "spectrum_control", "spectrum_weight": 0.1}, False),
    ({"spectrum_decay": 0.1}, False),
])  # fmt: skip
def test_spectrum_control_of_a_plain_table_says_once_that_it_is_decoupled(flags, said, caplog):
    with caplog.at_level("INFO"):
        trainer = build_trainer(**flags)
        trainer.begin_epoch(2)
    line = "controlled outside the optimiser (--spectrum-decay 0.01, --table-centering 0.01)"
    assert caplog.text.count(line) == int(said)
