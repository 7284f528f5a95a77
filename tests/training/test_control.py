"""SpectrumControl: the change by definition, equal to fairseq's, one on all workers."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import ConfigurationError, DataError, UnsupportedError
from spectral_fairseq.methods.control import ControlRule
from spectral_fairseq.training import SpectrumControl, factor_, weight_norm_
from spectral_fairseq.training.control import share_of_rate
from tests.reference import spectra as reference
from tests.training.models import LAYOUTS, Straight, build
from tests.workers import on_two_workers

NEEDS_HOOKS = pytest.mark.skipif(
    not hasattr(torch.optim.Optimizer, "register_step_post_hook"), reason="needs torch 2.0"
)
PRIOR = {"exponential": lambda k: math.exp(-0.0005 * k), "polynomial": lambda k: k**-0.5}


def table(rows=40, dim=6, seed=0):
    torch.manual_seed(seed)
    return nn.Parameter(torch.randn(rows, dim) + 2.0)


@pytest.mark.parametrize("prior", PRIOR)
@pytest.mark.parametrize("scale", ["free", "fixed"])
@pytest.mark.parametrize("side", ["above", "both"])
def test_every_kth_step_is_the_change_by_definition(side, scale, prior):
    weight = table()
    options = {"side": side, "scale": scale, "prior": prior, "slack": 1.2}
    control = SpectrumControl(
        weight, decay=0.05, centering=0.02, every=4, start=4, excluded=(3,), **options
    )
    shape = torch.tensor([PRIOR[prior](k) for k in range(1, 7)], dtype=torch.float64)
    kept = [i for i in range(40) if i != 3]
    norm = float(weight.detach().double()[kept].norm())
    expected = weight.detach().double()
    for step in range(1, 17):
        rate = 1 - step / 20
        with torch.no_grad():
            weight.add_(0.01)
        expected = expected + 0.01
        assert control.step(rate) == (step > 4 and step % 4 == 0)
        if step > 4 and step % 4 == 0:
            target = shape * (norm / shape.norm()) if scale == "fixed" else shape
            shares = (0.05 * 4 * rate, 0.02 * 4 * rate)
            expected = reference.controlled(
                expected, target, shares[0], side, 1.2, scale, shares[1], [3]
            )
        torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-4, atol=1e-5)
    assert control.updates == 16


@pytest.mark.slow
@pytest.mark.parametrize("side", ["above", "both"])
@pytest.mark.parametrize("scale", ["free", "fixed"])
def test_it_equals_a_run_of_fairseq(side, scale):
    pytest.importorskip("fairseq")
    from spectral_fairseq.plugin.find import output_matrix
    from tests.plugin.trainers import build_trainer, take_updates

    schedule = {"spectrum_decay": 0.1, "table_centering": 0.05, "spectrum_decay_interval": 2}
    flags = {"spectrum_side": side, "spectrum_scale": scale, "spectrum_slack": 1.2}
    theirs, ours = build_trainer(**schedule, **flags), build_trainer()
    tables = [
        output_matrix(one.get_model(), len(one.task.target_dictionary)) for one in (theirs, ours)
    ]
    parts = theirs.get_criterion().objective_of(theirs.get_model()).parts
    control = SpectrumControl(  # both measure the norm of the new table
        tables[1],
        decay=0.1,
        centering=0.05,
        every=2,
        side=side,
        scale=scale,
        slack=1.2,
        excluded=parts.words.excluded.tolist(),
    )
    for weight in tables:
        with torch.no_grad():
            weight.add_(0.5)
    assert torch.equal(*tables)
    before = tables[1].detach().clone()
    for _ in range(4):
        take_updates(theirs, 1)
        take_updates(ours, 1)
        control.step()
    assert torch.equal(tables[0], tables[1]) and not torch.equal(before, tables[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_of_transformers(transformers, layout):
    model = build(transformers, layout)
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight.add_(0.5)
    control = SpectrumControl(model, decay=1.0, centering=0.5, every=1, slack=1.0)
    rows = list(control.excluded)
    padded = layout.startswith(("llama, tied", "marian", "bert"))
    assert rows == ([] if not padded else [0 if layout == "bert" else 1])
    kept = [i for i in range(len(weight)) if i not in rows]
    mean = weight.detach()[kept].mean(0).norm()
    excluded = weight.detach()[rows].clone()
    control.step()
    assert model.get_output_embeddings().weight is weight
    assert torch.equal(weight.detach()[rows], excluded)
    assert weight.detach()[kept].mean(0).norm() < 0.6 * mean


@pytest.mark.parametrize("every", [1, 3])
def test_a_resumed_control_goes_on(every):
    options = {"scale": "fixed", "side": "both", "decay": 0.2, "every": every}
    weight = table()
    control = SpectrumControl(weight, **options)
    for _ in range(4):
        control.step(0.7)
    saved = copy.deepcopy(control.state_dict())
    resumed_weight = nn.Parameter(weight.detach().clone())
    for _ in range(5):
        control.step(0.3)
    resumed = SpectrumControl(resumed_weight, **options)
    resumed.load_state_dict(saved)
    for _ in range(5):
        resumed.step(0.3)
    assert torch.equal(resumed_weight, weight) and resumed.state_dict() == control.state_dict()
    with pytest.raises(ConfigurationError, match="state_dict"):
        resumed.load_state_dict({"updates": 3})


def test_the_table_of_the_moment_is_changed(transformers):
    """Moved, compiled or given new parameters after the control was made."""
    model = build(transformers)
    control = SpectrumControl(model, every=1, centering=1.0)
    model.lm_head.weight = model.transformer.wte.weight = nn.Parameter(
        model.lm_head.weight.detach() + 1.0
    )
    control.step()
    assert model.lm_head.weight.detach().mean(0).abs().max() < 1e-5
    wrapped = SpectrumControl(nn.DataParallel(model))
    assert wrapped.weight is model.lm_head.weight
    if hasattr(torch, "compile"):
        assert SpectrumControl(torch.compile(model)).weight is model.lm_head.weight


def test_a_model_that_got_its_memory_later():
    """The norm of its table is that at the first step."""
    model, weight = Straight(), nn.Parameter(Straight().lm_head.weight.detach() + 2.0)
    options = {"every": 1, "decay": 0.5, "side": "both", "scale": "fixed", "excluded": (3,)}
    later = SpectrumControl(model.to("meta"), **options)
    model.to_empty(device="cpu").lm_head.weight.data.copy_(weight.detach())
    for control in (later, SpectrumControl(weight, **options)):
        control.step()
    assert torch.equal(model.lm_head.weight, weight)


def test_autocast_does_not_round_the_change():
    plain, mixed = table(), table()
    options = {"every": 1, "decay": 0.5, "slack": 1.0}
    SpectrumControl(plain, **options).step()
    control = SpectrumControl(mixed, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        control.step()
    assert torch.equal(plain, mixed)


def test_a_table_that_diverged_is_not_written():
    weight = table()
    control = SpectrumControl(weight, every=1)
    with torch.no_grad():
        weight[5, 2] = math.nan
    before = weight.detach().clone()
    with pytest.raises(DataError, match="Training diverged"):
        control.step()
    assert torch.equal(weight.detach().nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("excluded", [(), (5,)])
def test_a_table_with_nan_is_refused_before_the_first_step(excluded):
    weight = table()
    with torch.no_grad():
        weight[5, 2] = math.nan
    with pytest.raises(DataError, match="1 of"):
        SpectrumControl(weight, excluded=excluded)


def _controlled_by_the_first(rank):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Straight())
    control = SpectrumControl(model, decay=0.3, slack=1.0, every=2, centering=0.1)

    # An eigensolver of another machine may differ in the last bits; here it differs by more.
    class Differing(ControlRule):
        def plan(self, weight, *given, **options):
            return super().plan(weight * (1 + 1e-4 * rank), *given, **options)

    control.rule = Differing(**vars(control.rule))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        tokens = torch.randint(40, (8,), generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        control.step(1 - step / 10)
    return control.weight.detach(), control.updates


@pytest.mark.slow
def test_workers_keep_equal_tables_bit_for_bit(tmp_path):
    (first, updates), (second, _) = on_two_workers(_controlled_by_the_first, tmp_path)
    assert torch.equal(first, second) and updates == 6


WRONG = {
    "decay": 1.5,
    "centering": -0.1,
    "every": 0,
    "start": -1,
    "slack": 0.5,
    "side": "below",
    "scale": "other",
    "prior": "linear",
    "c2": 1e9,
    "excluded": (40,),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_outside_their_range(name):
    with pytest.raises(ConfigurationError):
        SpectrumControl(table(), **{name: WRONG[name]})


def test_a_rate_above_that_of_the_schedule_counts_as_the_highest():
    weight, other = table(), table()
    for one, rate in ((weight, 3.0), (other, 1.0)):
        SpectrumControl(one, every=1, decay=0.1, centering=0.1, slack=1.0).step(rate)
    assert torch.equal(weight, other)


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf])
def test_a_wrong_rate_is_refused_at_every_step(rate):
    with pytest.raises(ConfigurationError, match="rate"):
        SpectrumControl(table()).step(rate)


NO_TABLE = {
    "computed": lambda: table() * 2,
    "frozen": lambda: table().requires_grad_(False),
    "of 16 bits": lambda: nn.Parameter(table().detach().half()),
    "too few rows": lambda: table(5, 6),
    "a vector": lambda: nn.Parameter(torch.ones(5)),
    "a model without one": lambda: nn.GRU(4, 4),
    "no model": lambda: "model",
    "weight norm": lambda: _with_table(weight_norm_),
    "factors": lambda: _with_table(factor_),
}


def _with_table(method):
    layer = nn.Embedding(30, 4)
    method(layer)
    return layer


@pytest.mark.parametrize("what", NO_TABLE)
def test_what_is_no_plain_table_is_refused(what):
    made = NO_TABLE[what]()
    with pytest.raises((ConfigurationError, UnsupportedError), match="expected .*; found"):
        SpectrumControl(made)


def _trained(optimizer, model, updates, accelerator=None, after=lambda: None):
    """Some updates, each on other words; ``after`` is called behind the step of each."""
    for step in range(updates):
        tokens = torch.arange(step, step + 8)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        after()


@NEEDS_HOOKS
@pytest.mark.parametrize("prepared", [False, True])
def test_a_control_follows_an_optimiser(prepared):
    """In two lines: the same as a call of step after each of its steps."""
    made = []
    for follows in (True, False):
        torch.manual_seed(0)
        model = Straight()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
        control = SpectrumControl(model, every=2, slack=1.0, decay=0.5)
        if follows and prepared:
            accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
            trained, stepped, scheduled = accelerator.prepare(model, optimizer, schedule)
            control.follow(stepped)
            _trained(stepped, trained, 6, accelerator, after=scheduled.step)
        elif follows:
            assert control.follow(optimizer) is control
            _trained(optimizer, model, 6, after=schedule.step)
        else:

            def after(control=control, schedule=schedule):
                control.step(schedule.get_last_lr()[0] / 0.5)
                schedule.step()

            _trained(optimizer, model, 6, after=after)
        assert control.updates == 6
        made.append(model.lm_head.weight.detach())
    assert torch.equal(*made)
    other = copy.deepcopy(model)
    with pytest.raises(ConfigurationError, match="found another model's"):
        SpectrumControl(model).follow(torch.optim.SGD(other.parameters(), lr=0.5))
    with pytest.raises(ConfigurationError, match="made without"):
        SpectrumControl().step()


@NEEDS_HOOKS
def test_a_state_of_accelerate_has_that_of_a_control(tmp_path):
    """With ``register_for_checkpointing``, a resumed training equals one that went on."""
    made = []
    for resumed in (False, True):
        torch.manual_seed(0)
        accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
        model = Straight()
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        control = SpectrumControl(model, every=3, slack=1.0, decay=0.5).follow(optimizer)
        accelerator.register_for_checkpointing(control)
        if resumed:
            accelerator.load_state(tmp_path)
            assert control.updates == 4
        else:
            _trained(optimizer, model, 4, accelerator)
            accelerator.save_state(tmp_path)
        _trained(optimizer, model, 4, accelerator)
        made.append(model.lm_head.weight.detach())
    assert torch.equal(*made)


@NEEDS_HOOKS
def test_the_step_of_a_subclass_counts_once():
    """torch tells of it twice where the class above was made before."""

    class Ours(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    layer = nn.Linear(3, 7)
    torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = Ours(layer.parameters(), lr=0.1)
    control = SpectrumControl(layer).follow(optimizer)
    for updates in (1, 2):
        layer(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert control.updates == updates


@pytest.mark.parametrize("fused", [False, True])
def test_a_control_follows_the_steps_that_are_taken_once_each(fused):
    """A fused optimiser is called by the scaler although it takes no step."""
    scaler = getattr(torch.amp, "GradScaler", None)
    if scaler is None:
        pytest.skip("this torch has no GradScaler for a CPU")
    model = Straight()
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    except RuntimeError:
        pytest.skip("this torch has no fused optimiser for a CPU")
    control = SpectrumControl(model, every=1).follow(optimizer).follow(optimizer)
    scaler = scaler("cpu", init_scale=8.0)
    before = model.lm_head.weight.detach().clone()
    for factor, updates in ((math.inf, 0), (1.0, 1)):
        scaler.scale(model(torch.arange(8)).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert control.updates == updates
        assert torch.equal(model.lm_head.weight, before) == (updates == 0)


@NEEDS_HOOKS
@pytest.mark.parametrize("drops", [False, True])
def test_a_step_without_gradients_counts_where_the_optimiser_drops_them(drops):
    """Lightning lets the optimiser take one where training_step returns None."""

    class Plain(torch.optim.Optimizer):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(0.1 * parameter.grad)
                parameter.grad = None if drops else parameter.grad

    model = Straight()
    optimizer = Plain(model.parameters(), {"lr": 0.1})
    control = SpectrumControl(model).follow(optimizer)
    for with_loss, updates in ((True, 1), (False, 2 if drops else 1), (True, 3 if drops else 2)):
        optimizer.zero_grad(set_to_none=True)
        if with_loss:
            model(torch.arange(8)).mean().backward()
        optimizer.step()
        assert control.updates == updates


def test_a_control_that_could_not_be_bound_has_no_model():
    model, other = Straight(), Straight()
    model.lm_head.weight.requires_grad_(False)
    control = SpectrumControl()
    with pytest.raises(ConfigurationError, match="frozen"):
        control.bind(model)
    assert not control.is_bound
    control.bind(other)
    control.step()
    with pytest.raises(ConfigurationError, match="frozen"):
        control.bind(model)
    assert control.weight is other.lm_head.weight and control.updates == 1


def test_a_copy_of_a_control_in_use_goes_on():
    """It kept rows with their graph, which deepcopy refuses."""
    model = Straight()
    control = SpectrumControl(model, every=1, slack=1.0)
    control.step()
    copied = copy.deepcopy(control)
    for one in (control, copied):
        one.step()
    assert copied.weight is not control.weight
    assert torch.equal(copied.weight, control.weight)


def test_a_table_that_nothing_trains_is_warned_of():
    """As in a loop that trains a copy of the model."""
    model = Straight()
    control = SpectrumControl(model, every=2, slack=1.0)
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.5)
    _trained(optimizer, copied, 1)
    control.step()
    control.step()
    with pytest.warns(UserWarning, match="such as a copy") as told:
        for _ in range(6):
            control.step()
    assert len(told) == 1
    control = SpectrumControl(copied, every=1, slack=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            _trained(optimizer, copied, 1)
            control.step()


def test_a_table_of_which_a_step_changes_few_rows_is_trained():
    words = nn.Embedding(100, 6, sparse=True)
    control = SpectrumControl(words, every=1, slack=1.0)
    optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            words(torch.tensor([7])).sum().backward()
            optimizer.step()
            control.step()
            optimizer.zero_grad()


def test_a_schedule_that_begins_later_multiplies_the_rate_of_the_optimiser():
    model = Straight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    control = SpectrumControl(model)
    for step in (1, 2):  # warm-up by hand
        optimizer.param_groups[0]["lr"] = 1e-3 * step / 2
        _trained(optimizer, model, 1)
        control.step(share_of_rate(control, optimizer))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    assert optimizer.param_groups[0]["lr"] == 1e-3
