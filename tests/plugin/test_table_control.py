"""The decoupled control under fairseq's trainer: optimisers, precisions, checkpoints, errors."""

import functools
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from omegaconf import OmegaConf

from spectral_fairseq.checkpoints.reading import load_checkpoint, torch_load
from spectral_fairseq.errors import DataError
from spectral_fairseq.plugin.control_trainer import (
    ControlledTables,
    control_tables,
    controls_of,
    trained_weights,
)
from spectral_fairseq.plugin.find import output_matrix
from tests.plugin.conftest import build_criterion, build_host_model, build_model, make_sample, words
from tests.plugin.test_same_training import (
    CONTROL,
    CRITERION,
    FIXED,
    SHARED,
    model_of,
    same_trainings,
)
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
    same_models,
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


@pytest.mark.slow
def test_zero_equals_plain_bit_for_bit():
    plain, zero = build_trainer(), build_trainer(spectrum_decay=0.0, spectrum_decay_interval=1)
    for trainer in (plain, zero):
        take_updates(trainer, 3)
    assert same_models(plain, zero)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ALL_PRECISIONS)
def test_resumed_equals_uninterrupted(precision, tmp_path):
    """With a fixed prior of automatic scale, whose norm is that of the first of all tables."""
    flags = {"spectrum_decay": 0.2, "spectrum_decay_interval": 2, "spectrum_side": "both"}
    flags["spectrum_scale"] = "fixed"
    build = functools.partial(build_trainer, *PRECISIONS[precision], **flags)
    through, half = build(), build()
    take_updates(through, 7)
    take_updates(half, 3)
    save_in_epoch(half, tmp_path / "c.pt", done=3)
    state = torch_load(tmp_path / "c.pt", map_location="cpu")
    assert list(state["extra_state"][ControlledTables.name]) == ["decoder"]
    resumed = build(begin=False)
    with torch.no_grad():
        output_table(resumed).mul_(3)
    resumed.load_checkpoint(str(tmp_path / "c.pt"))
    resumed.begin_epoch(1)
    take_updates(resumed, 4)
    assert same_models(through, resumed)
    # Training that begins anew from the same file begins with the norm that is in it.
    anew = build(begin=False)
    anew.load_checkpoint(str(tmp_path / "c.pt"), reset_optimizer=True)
    anew.begin_epoch(1)
    (bound,) = anew.get_criterion().objectives_of(anew.get_model())
    assert bound.parts.prior.start_norm == pytest.approx(float(counted(anew).norm()), rel=1e-3)


def test_a_table_with_nan_is_refused_unwritten():
    trainer = build_trainer(**FULL)
    with torch.no_grad():
        output_table(trainer)[7, 3] = float("nan")
    before = output_table(trainer).clone()
    trainer.set_num_updates(1)
    with pytest.raises(DataError, match="a table of finite numbers"):
        control_tables(trainer, controls_of(trainer), 0.02)
    torch.testing.assert_close(output_table(trainer), before, equal_nan=True, rtol=0, atol=0)


def active(criterion, model):
    """Names of the penalties, and what is done to the table outside the optimiser."""
    criterion.check_model(model)
    model.train()
    bound = criterion.objective_of(model)
    control = bound.control
    done = ["decay"] if control.rule.is_due(10) else []
    done += ["renewal"] if control.svd_interval else []
    return [term.name for term in bound.penalties(updates=0)], done


def test_the_preset_does_what_suits_the_table(task):
    plain = build_model(task, embedding_type="plain")
    factored, criterion = build_model(task), build_criterion(task)
    of_factors = ["spectrum", "orthogonality"]
    assert active(criterion, plain) == ([], ["decay"])
    assert active(criterion, factored) == (of_factors, ["renewal"])
    assert active(criterion, plain) == ([], ["decay"])
    asked = build_criterion(task, spectrum_weight=0.1)
    assert active(asked, plain) == (["spectrum"], [])
    assert active(asked, factored) == (of_factors, ["renewal"])
    both = build_criterion(task, spectrum_weight=0.1, spectrum_decay=0.1)
    assert active(both, plain) == (["spectrum"], ["decay"])
    assert active(build_criterion(task, **PLAIN), plain) == ([], [])
    assert active(build_criterion(task, spectrum_weight=0.0), factored) == (["orthogonality"], [])
    assert active(build_criterion(task, svd_interval=0), factored) == (of_factors, [])


@pytest.mark.parametrize("kind, warned", [("svd", True), ("weight-norm", False)])
def test_an_svd_table_with_a_criterion_of_fairseq_is_warned_of(task, kind, warned, caplog):
    trainer = SimpleNamespace(
        get_criterion=lambda: CrossEntropyCriterion(task, sentence_avg=False),
        get_model=lambda: build_model(task, embedding_type=kind),
    )
    controls_of(trainer)
    assert ("without spectrum control" in caplog.text) is warned


@pytest.mark.parametrize("shared", [True, False])
def test_penalty_on_a_plain_table_of_fairseq(task, shared):
    model = build_host_model(task, "transformer", share_all_embeddings=shared).train()
    criterion = build_criterion(
        task, **PLAIN, spectrum_weight=0.3, spectrum_c1="2.0", spectrum_c2=0.1
    )
    weight = output_matrix(model, len(task.target_dictionary))
    excluded = criterion.objective_of(model).parts.words.excluded.tolist()
    rows = weight.detach().double()[[i for i in range(len(weight)) if i not in excluded]]
    target = 2.0 * torch.exp(-0.1 * torch.arange(1, 17, dtype=torch.float64))
    expected = float((torch.linalg.svdvals(rows) - target).square().sum())
    sample = make_sample(task)
    loss, size, log = criterion(model, sample)
    assert float(log["spectrum"]) / size == pytest.approx(expected, rel=1e-4)
    assert float(loss.detach()) == pytest.approx(float(log["loss"]) + 0.3 * expected * size)
    loss.backward()
    assert torch.isfinite(weight.grad).all() and not weight.grad[excluded[1:]].isnan().any()


def test_penalty_on_a_weight_norm_table_reaches_its_parts(task):
    model = build_model(task, embedding_type="weight-norm").train()
    loss, _, log = build_criterion(task, **PLAIN, spectrum_weight=0.3)(model, make_sample(task))
    loss.backward()
    assert float(log["spectrum"]) > 0
    assert all(p.grad is not None for n, p in model.named_parameters() if n.endswith((".g", ".v")))


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


# Through the command line

XL = ("--task", "stateful_language_modeling", "--cpu", "--tokens-per-sample", "10")
XL += ("--batch-size", "3", "--batch-size-valid", "2", "--mem-len", "10")
XL += ("--decoder-embed-dim", "12", "--decoder-attention-heads", "2", "--decoder-layers", "1")
XL += ("--decoder-ffn-embed-dim", "20", "--adaptive-softmax-cutoff", "10,20,30")
XL += ("--lr-scheduler", "cosine", "--clip-norm", "0.25")


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


def test_zero_equals_fairseq_bit_for_bit(train):
    plain = train("transformer", "cross_entropy", SHARED)
    dense = ("--loss-form", "dense")
    zero = train("transformer", CRITERION, SHARED, "--spectrum-decay", "0", *dense)
    assert same_trainings(plain, zero)
    assert not same_trainings(plain, train("transformer", CRITERION, SHARED, *CONTROL))


@pytest.mark.parametrize(
    "more", [("--memory-efficient-fp16", "--fp16"), ("--fp16", "--fp16-no-flatten-grads")]
)
def test_half_precision_on_a_cpu(more, train):
    folder = train("transformer", CRITERION, SHARED, *CONTROL, "--cpu", *more)
    assert all(torch.isfinite(value).all() for value in model_of(folder).values())


@pytest.mark.parametrize("flags", [CONTROL, ("--spectrum-weight", "0.1")])
def test_a_transformer_xl_with_an_adaptive_softmax(flags, train):
    arch = "transformer_xl_wt103_small"
    folder = train(arch, CRITERION, *XL, *flags, "--log-spectrum-interval", "1")
    plain = train(arch, CRITERION, *XL, "--log-spectrum-interval", "1")
    assert not same_trainings(folder, plain)
    log = (folder / "log.txt").read_text("utf-8")
    assert ("| spectrum " in log) is (flags != CONTROL)


def test_an_untied_language_model_controls_its_output_table_alone(train):
    flags = (CRITERION, "--max-update", "2", "--lr", "0")
    plain = model_of(train("transformer_lm", *flags))
    control = model_of(train("transformer_lm", *flags, *FIXED, "--spectrum-decay-interval", "1"))
    changed = [key for key in plain if not torch.equal(plain[key], control[key])]
    assert changed == []  # a rate of zero changes nothing at all
    flags = (*flags[:-1], "1e-9")
    control = model_of(train("transformer_lm", *flags, *FIXED, "--spectrum-decay-interval", "1"))
    moved = [k for k in plain if not torch.allclose(plain[k], control[k], rtol=0, atol=1e-6)]
    assert moved == ["decoder.output_projection.weight"]
