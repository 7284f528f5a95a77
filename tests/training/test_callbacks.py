"""The callbacks under the real trainers: steps, rates, measures, checkpoints, plain saves."""

import copy
import importlib.util
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.training import (
    SpectrumControl,
    TablePenalty,
    factor_,
    fused_loss_,
    mixture_,
    parameter_groups,
    trainer_callback,
    weight_norm_,
)
from spectral_fairseq.training import callbacks as module
from spectral_fairseq.training.callbacks import (
    SpectralCallback,
    SpectralLightningCallback,
    SpectralTrainerCallback,
)
from spectral_fairseq.training.control import share_of_rate
from tests.training.models import DIM, IDS, TEXT, WORDS, Straight, build


@pytest.mark.parametrize("fused, loss", [(True, 0.0), (True, 0.5), (False, None)])
def test_label_smoothing_of_trainer_that_the_loss_does_not_know_is_refused(
    transformers, trainer, fused, loss
):
    model = build(transformers)
    function = fused_loss_(model, label_smoothing=loss) if fused else None
    made = trainer(model, function, label_smoothing_factor=0.5, max_steps=1)
    made.add_callback(SpectralTrainerCallback(made))
    if loss == 0.0:
        with pytest.raises(ConfigurationError, match="no label_smoothing_factor"):
            made.train()
    else:
        made.train()
    # Where the model computes the loss Trainer takes the labels away, and refuses nothing itself.
    if fused:
        made = trainer(model, None, label_smoothing_factor=0.5, max_steps=1)
        with pytest.raises(UnsupportedError, match="label_smoothing to fused_loss_"):
            made.train()


def test_a_model_that_computes_the_loss_itself_needs_no_function(transformers, trainer):
    trained = []
    for with_function in (True, False):
        model = build(transformers)
        loss = fused_loss_(model)
        trainer(model, loss if with_function else None, gradient_accumulation_steps=2).train()
        trained.append(weights(model))
    same(*trained, close=1e-6)


def test_weight_decay_of_factors_is_refused_in_trainer_and_acts_once_in_groups(
    transformers, trainer
):
    model = build(transformers)
    factor_(model)
    made = trainer(model, weight_decay=0.1, max_steps=1)
    made.add_callback(SpectralTrainerCallback(made))
    with pytest.raises(ConfigurationError, match="parameter_groups"):
        made.train()
    groups = parameter_groups(model, lr=0.02, weight_decay=0.1)
    made = trainer(model, weight_decay=0.1, max_steps=1)
    made.optimizer = torch.optim.AdamW(groups)
    made.add_callback(SpectralTrainerCallback(made))
    made.train()


def test_weight_norm_tables_are_told_the_epoch_by_trainer(transformers, trainer):
    model = build(transformers)
    table = weight_norm_(model)
    made = trainer(model, max_steps=-1, num_train_epochs=3)
    made.add_callback(SpectralTrainerCallback(made))
    made.train()
    assert table.epoch == 3


def weights(model):
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def same(found, expected, close=0.0):
    assert set(found) == set(expected)
    for name, one in found.items():
        torch.testing.assert_close(one, expected[name], rtol=close, atol=close, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gpt2", "llama, tied", "t5"])
def test_trainer_counts_tokens_as_before(transformers, trainer, layout):
    """Gradient accumulation, unequal batches: the model's own loss and ours train the same."""
    found = []
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "optim": "sgd"}
    for fused in (False, True):
        model = build(transformers, layout)
        trained = trainer(model, fused_loss_(model) if fused else None, **options)
        if layout == "gpt2" and not trained.model_accepts_loss_kwargs:
            pytest.skip("before transformers 4.50 its own loss is a mean over each batch")
        if fused and layout == "t5":
            shifted = model.prepare_decoder_input_ids_from_labels
            trained.data_collator = lambda rows, shifted=shifted: {
                **transformers.default_data_collator(rows),
                "decoder_input_ids": shifted(torch.stack([row["labels"] for row in rows])),
            }
        if layout == "t5":
            # T5's own loss is a mean over each batch, and Trainer does not weigh it by its tokens.
            trained.train_dataset = [{"input_ids": row, "labels": row} for row in TEXT]
            trained.args.gradient_accumulation_steps = 1
        trained.train()
        found.append(weights(model))
    same(found[1], found[0], close=1e-5)
    assert any(
        (one - weights(build(transformers, layout))[name]).any() for name, one in found[0].items()
    )


@pytest.mark.slow
def test_the_control_follows_the_schedule(transformers, trainer):
    options = {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 6}
    rates = []
    model = build(transformers)
    control = SpectrumControl(model, every=2, decay=0.4, slack=1.0)
    step = control.step
    control.step = lambda rate: (rates.append(rate), step(rate))[1]
    with torch.no_grad():
        model.lm_head.weight.add_(0.1)
    before = copy.deepcopy(model)
    trained = trainer(model, **options)
    trained.add_callback(SpectralTrainerCallback(trained, control, measure_every=3))
    trained.train()
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25])
    logged = [one for one in trained.state.log_history if "table/mean_cosine" in one]
    assert [one["step"] for one in logged] == [3, 6]
    # By hand: the same training with the control after every step.
    naive = trainer(before, **options)
    own = SpectrumControl(before, every=2, decay=0.4, slack=1.0)
    left = iter(rates)

    class Naive(transformers.TrainerCallback):
        def on_optimizer_step(self, *args, **kwargs):
            own.step(next(left))

    naive.add_callback(Naive())
    naive.train()
    same(weights(model), weights(before))


METHODS = {
    "control": lambda model: None,
    "weight norm": lambda model: weight_norm_(model, range(WORDS)),
    "factors": factor_,
    "mixture": lambda model: mixture_(model, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_training_is_the_same_training(transformers, trainer, tmp_path, method):
    def prepared(folder, seed=0):
        model = build(transformers, seed=seed)
        loss = METHODS[method](model)
        loss = loss if method == "mixture" else fused_loss_(model)
        control = None
        if method == "control":
            control = SpectrumControl(model, every=3, decay=0.3, slack=1.0, scale="fixed")
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
        trained = trainer(model, loss, folder=folder, **options)
        trained.add_callback(
            SpectralTrainerCallback(trained, control, plain_at_end=method != "mixture")
        )
        return trained

    whole = prepared(tmp_path / "whole")
    whole.train()
    resumed = prepared(tmp_path / "resumed", seed=7)  # its weights come from the checkpoint
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    same(weights(resumed.model), weights(whole.model))
    state = json.loads((tmp_path / "whole" / "checkpoint-4" / "trainer_state.json").read_text())
    kept = state["stateful_callbacks"]["SpectralTrainerCallback"]["attributes"]
    assert (kept["spectrum_control"]["updates"] == 4) if method == "control" else kept == {}
    if method == "mixture":
        return
    whole.save_model(str(tmp_path / "plain"))
    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "plain", output_loading_info=True
    )
    assert not any(map(len, report.values())) and type(whole.model.lm_head) is torch.nn.Linear
    expected, found = (one.eval()(input_ids=IDS).logits for one in (whole.model, loaded))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_each_of_several_controls_is_resumed(transformers, trainer, tmp_path):
    """Each got the first state that Trainer had ever kept, of which it has a list."""

    def prepared(folder, controls=2):
        model = build(transformers, "llama")
        tables = (model.lm_head.weight, model.model.embed_tokens.weight)
        trained = trainer(model, folder=folder, save_strategy="steps", save_steps=2, max_steps=6)
        made = [
            SpectrumControl(table, every=3 + index, decay=0.3, slack=1.0)
            for index, table in enumerate(tables[:controls])
        ]
        trained.add_callback(SpectralTrainerCallback(trained, measure_every=2))
        for control in made:
            trained.add_callback(SpectralTrainerCallback(trained, control))
        return trained, made

    whole, _ = prepared(tmp_path / "whole")
    whole.train()
    resumed, controls = prepared(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert [control.updates for control in controls] == [6, 6]
    same(weights(resumed.model), weights(whole.model))
    one, _ = prepared(tmp_path / "one", controls=1)
    one.train()
    two, _ = prepared(tmp_path / "two")
    with pytest.raises(ConfigurationError, match="2 callbacks of a control; found one with fewer"):
        two.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-4"))


def test_an_optimiser_without_a_rate_has_the_full_share():
    """Adafactor with relative_step keeps None."""
    layer = torch.nn.Linear(4, 9)
    optimizer = SimpleNamespace(param_groups=[{"params": [layer.weight], "lr": None}])
    assert share_of_rate(SpectrumControl(layer), optimizer) == 1.0


def test_the_share_of_a_schedule_that_keeps_no_highest_rate():
    """ReduceLROnPlateau keeps none in the optimiser, and the share stayed at 1."""
    weight = torch.nn.Parameter(torch.eye(5, 3))
    control = SpectrumControl(weight)
    optimizer = torch.optim.SGD([weight], lr=0.4)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    shares = []
    for loss in (1.0, 2.0, 2.0):
        shares.append(share_of_rate(control, optimizer))
        schedule.step(loss)
    assert shares == [1.0, 1.0, 0.5]
    resumed = torch.optim.SGD([weight], lr=0.4)
    resumed.load_state_dict(optimizer.state_dict())
    assert share_of_rate(control, resumed) == 0.25


def test_the_share_of_a_schedule_that_rises_above_its_first_rate():
    """CyclicLR keeps its lowest rate alone, and the share stayed at 1."""
    weight = torch.nn.Parameter(torch.eye(5, 3))
    control = SpectrumControl(weight)
    optimizer = torch.optim.SGD([weight], lr=0.4)
    cycle = {"step_size_up": 2, "cycle_momentum": False}
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.4, **cycle)
    shares = []
    for _ in range(6):
        shares.append(share_of_rate(control, optimizer))
        optimizer.step()
        schedule.step()
    assert shares == pytest.approx([1.0, 1.0, 1.0, 0.625, 0.25, 0.625])
    resumed = torch.optim.SGD([weight], lr=0.4)
    resumed.load_state_dict({**optimizer.state_dict()})
    resumed.param_groups[0]["lr"] = 0.1
    assert share_of_rate(control, resumed) == pytest.approx(0.25)


def _shares_of(factors, updates=0):
    """The shares of a LambdaLR with these factors of a rate of 1."""
    weight = torch.nn.Parameter(torch.eye(5, 3))
    control = SpectrumControl(weight)
    control.updates = updates
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])
    shares = []
    for _ in factors[1:]:
        shares.append(share_of_rate(control, optimizer))
        optimizer.step()
        schedule.step()
    return shares


def test_a_schedule_whose_peak_is_far_below_its_rate_is_warned_of_once():
    """The schedule of the Transformer over a rate of 1 left a thousandth of the control."""
    noam = [512**-0.5 * min(step**-0.5, step * 4**-1.5) for step in range(1, 12)]
    with pytest.warns(UserWarning, match="risen to 0.0220971 and falls again") as warned:
        assert _shares_of(noam) == noam[:-1]
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _shares_of([0.01, 0.5, 1.0, 0.5, 0.01, 0.02, 0.01, 0.0])  # its peak is known
        _shares_of([0.05, 0.04, 0.03, 0.0])  # met in its course
        _shares_of([0.01, 0.05, 0.01, 0.0], updates=7)  # in a later cycle


@pytest.mark.parametrize("every, logging", [(1, 1), (2, 2), (2, 1), (3, 2), (4, 4)])
def test_measures_stand_beside_the_losses_and_hide_none(transformers, trainer, every, logging):
    """A log of measures took what was due for logged: the loss of that step never came."""
    seen = []

    class Report(transformers.TrainerCallback):
        """As W&B and TensorBoard have it, which come before the callbacks of users."""

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append((state.global_step, {"loss", "table/mean_cosine"} & set(logs)))

    options = {"logging_strategy": "steps", "logging_steps": logging, "max_steps": 8}
    plain = trainer(build(transformers), optim="sgd", **options)
    plain.train()
    expected = [(log["step"], log["loss"]) for log in plain.state.log_history if "loss" in log]
    for old in (False, True):
        made = trainer(build(transformers), optim="sgd", **options)
        made.add_callback(Report())
        mine = SpectralTrainerCallback(made, measure_every=every) if old else None
        made.add_callback(mine or SpectralCallback(measure_every=every))
        made.train()
        history = made.state.log_history
        assert [(log["step"], log["loss"]) for log in history if "loss" in log] == expected
        measured = [log["step"] for log in history if "table/mean_cosine" in log]
        assert measured == list(range(every, 9, every))
        for log in history:
            due = log["step"] % every == 0 and log["step"] % logging == 0
            if "loss" in log:
                assert ("table/mean_cosine" in log) == due
        both = [step for step, names in seen if len(names) == 2]
        assert both == [step for step in range(1, 9) if step % every == 0 == step % logging]
        seen.clear()


def test_a_control_that_takes_the_trained_model(transformers, trainer):
    """Trainer makes the model anew where it is given model_init, at each training."""
    made, options = [], {"every": 1, "slack": 1.0, "decay": 1.0, "centering": 1.0}

    def init():
        made.append(build(transformers, seed=len(made)))
        return made[-1]

    callback = SpectralCallback(control=SpectrumControl(**options))
    arguments = trainer(build(transformers), max_steps=3, lr_scheduler_type="constant").args
    data = [{"input_ids": row, "labels": row} for row in TEXT]
    tried = transformers.Trainer(
        model_init=init, args=arguments, train_dataset=data, callbacks=[callback]
    )
    for _ in range(2):  # as a search of hyperparameters
        tried.train()
        weight = tried.model.lm_head.weight
        assert callback.control.weight is weight and callback.control.updates == 3
        assert float(weight.detach().mean(0).norm()) < 1e-6
    assert len(made) >= 3


def _of_another_model(transformers, trainer, other):
    """Callbacks and losses that belong to another model than that of the trainer."""
    model = build(transformers)
    stale = SpectrumControl(other)
    yield trainer(model, max_steps=1), SpectralCallback(stale)
    made = trainer(model, max_steps=1)
    yield made, SpectralTrainerCallback(made, stale)
    yield trainer(model, fused_loss_(other), max_steps=1), SpectralCallback()


@pytest.mark.parametrize("copied", [False, True])
def test_what_belongs_to_another_model_is_refused(transformers, trainer, copied):
    """It worked on that one, without a word."""
    message = "of the model that is trained; found another model's"
    other = build(transformers)
    for made, callback in _of_another_model(transformers, trainer, other):
        if copied:
            made.model = copy.deepcopy(made.model)
        made.add_callback(callback)
        with pytest.raises(ConfigurationError, match=message):
            made.train()
    model, penalty = build(transformers), TablePenalty(other, cosine=1.0)
    for refused in (
        lambda: fused_loss_(model, penalty=penalty),
        lambda: fused_loss_(model, penalty=TablePenalty(other.lm_head.weight, cosine=1.0)),
        lambda: mixture_(model, 2, penalty=penalty),
    ):
        with pytest.raises(ConfigurationError, match=message):
            refused()
    one, two = fused_loss_(model, label_smoothing=0.1), copy.deepcopy(model)
    with pytest.raises(ConfigurationError, match=message):
        one(two(input_ids=IDS), IDS)
    own = two(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(own, one(model(input_ids=IDS), IDS))


def test_a_penalty_takes_the_model_of_its_loss(transformers):
    model = build(transformers)
    with pytest.raises(ConfigurationError, match="penalty to fused_loss_"):
        TablePenalty(cosine=0.5)()
    loss = fused_loss_(model, penalty=TablePenalty(cosine=0.5))
    own = build(transformers)
    expected = own(input_ids=IDS, labels=IDS).loss + TablePenalty(own, cosine=0.5)()
    torch.testing.assert_close(loss(model(input_ids=IDS), IDS), expected)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    torch.testing.assert_close(copied(input_ids=IDS, labels=IDS).loss, expected)


@pytest.mark.slow
@pytest.mark.parametrize("table", [weight_norm_, factor_])
def test_measures_of_a_table_that_is_computed(transformers, trainer, table):
    model = build(transformers)
    table(model)
    trained = trainer(model, fused_loss_(model), max_steps=1, learning_rate=1e-12)
    expected = float(torch.linalg.svdvals(model.lm_head.weight.detach())[0])
    trained.add_callback(SpectralTrainerCallback(trained, measure_every=1))
    trained.train()
    (logged,) = [one for one in trained.state.log_history if "table/mean_cosine" in one]
    values = [value for name, value in logged.items() if name.startswith("table/")]
    assert any(value == pytest.approx(expected, rel=1e-4) for value in values), logged


@pytest.mark.slow
def test_evaluation_and_early_labels(transformers, trainer):
    model = build(transformers)
    mine = trainer(model, fused_loss_(model)).evaluate()["eval_loss"]
    plain = trainer(build(transformers)).evaluate()["eval_loss"]
    assert mine == pytest.approx(plain, rel=1e-5)


def test_a_control_that_is_called_twice_is_refused(transformers, trainer):
    model = build(transformers)
    made = trainer(model)
    control = SpectrumControl(model)
    made.add_callback(SpectralCallback(control))
    assert not control.follows(SimpleNamespace())  # a trainer's own, which nothing can refer to
    control.follow(made.create_optimizer())
    with pytest.raises(ConfigurationError, match="called once after each step"):
        made.train()
    one, other = SpectralCallback(control), SpectralCallback(control)
    for callbacks in ([one, one], [one, other]):  # it took two steps for one
        made = trainer(model)
        for callback in callbacks:
            made.add_callback(callback)
        with pytest.raises(ConfigurationError, match="found one that several callbacks"):
            made.train()
        trained = SimpleNamespace(optimizers=[], callbacks=callbacks)
        with pytest.raises(ConfigurationError, match="found one that several callbacks"):
            one.on_fit_start(trained, model)


def test_a_second_training_after_plain_at_end_needs_a_new_optimiser(transformers, trainer):
    """Trainer kept the one of the table that was taken off, which left the plain one alone."""
    model = build(transformers)
    weight_norm_(model)
    made = trainer(model, max_steps=1)
    made.add_callback(SpectralCallback(plain_at_end=True))
    made.train()
    before = model.lm_head.weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"trainer\.optimizer and"):
        made.train()
    made.optimizer = made.lr_scheduler = None
    made.train()
    assert not torch.equal(model.lm_head.weight, before)


def test_new_callbacks_without_a_trainer_are_refused(transformers):
    made = SpectralTrainerCallback(None)
    arguments = SimpleNamespace(restore_callback_states_from_checkpoint=True)
    with pytest.raises(UnsupportedError, match="restores its own"):
        made.on_train_begin(arguments, None, None)


def test_a_missing_framework_and_a_wrong_interval_are_named(monkeypatch):
    for framework in module.FRAMEWORKS:
        monkeypatch.setitem(module.FRAMEWORKS, framework, tuple)
    with pytest.raises(ConfigurationError, match="pip install transformers"):
        SpectralCallback()
    with pytest.raises(ConfigurationError, match="pip install transformers"):
        SpectralTrainerCallback(None)
    with pytest.raises(ConfigurationError, match="pip install lightning"):
        SpectralLightningCallback()
    monkeypatch.setitem(module.FRAMEWORKS, "transformers", lambda: (type("Hooks", (), {}),))
    monkeypatch.setitem(sys.modules, "transformers", module)
    with pytest.raises(ConfigurationError, match="measure_every"):
        SpectralTrainerCallback(None, measure_every=-1)


@pytest.mark.slow
def test_a_framework_is_imported_where_it_is_used(transformers):
    """A program with Trainer would wait for Lightning, some seconds each time."""
    program = """
import contextlib, copy, gc, importlib, os, pickle, sys
from spectral_fairseq.training.callbacks import SpectralCallback, SpectralLightningCallback
assert not {"transformers", "lightning"} & {*sys.modules}
from transformers import TrainerCallback
class Own(SpectralCallback): pass
for kind in (SpectralCallback, Own):
    callback = kind(measure_every=3)
    assert "lightning" not in sys.modules and isinstance(callback, TrainerCallback)
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert type(other) is type(callback) and vars(other) == vars(callback)
        assert isinstance(other, kind) and type(other).__name__ == kind.__name__
    assert not hasattr(callback, "setup")
for shared in ("torch._dynamo", "torchmetrics"):  # which both import, and which import neither
    with contextlib.suppress(ImportError):
        importlib.import_module(shared)
assert "lightning" not in sys.modules
gc.freeze()  # a collection in every fork would copy the memory that they share
others = {"lightning.pytorch": "pytorch_lightning", "pytorch_lightning": "lightning"}
for name in sys.argv[1:]:
    if os.fork():
        assert os.wait()[1] == 0, name
        continue
    lightning = importlib.import_module(name)
    for hook in (callback.setup, callback.on_step_end, SpectralLightningCallback().teardown):
        assert callable(hook)
    assert isinstance(callback, lightning.Callback) and callback.measure_every == 3
    assert isinstance(callback, TrainerCallback) and isinstance(callback, Own)
    assert others[name] not in sys.modules
    assert callback.state_key == "Own"
    os._exit(0)
"""
    packages = [("lightning", "lightning.pytorch"), ("pytorch_lightning", "pytorch_lightning")]
    names = [name for package, name in packages if importlib.util.find_spec(package) is not None]
    subprocess.run([sys.executable, "-c", program, *names], check=True)


@pytest.mark.slow
def test_trainer_beside_a_torchaudio_that_cannot_be_loaded(transformers, tmp_path):
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text("raise OSError('another build')\n")
    information = tmp_path / "torchaudio-2.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torchaudio\nVersion: 2.0\n")
    (information / "RECORD").write_text("torchaudio/__init__.py,,\n")
    program = """
import sys
from spectral_fairseq.training import weight_norm_
assert sys.modules.pop("torchaudio") is None  # it counts as absent
import spectral_fairseq.training.callbacks
assert sys.modules["torchaudio"] is None
from transformers import Trainer
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@pytest.fixture()
def lightning():
    return pytest.importorskip("lightning.pytorch")


def fit(lightning, folder, steps, ours, resume=None, rates=None, method=None):
    """A small model with a method or else a control: two batches a step, a falling rate."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = torch.nn.Embedding(WORDS, DIM)
            self.lm_head = torch.nn.Linear(DIM, WORDS, bias=False)
            with torch.no_grad():
                self.lm_head.weight.add_(0.3)

        def training_step(self, batch, index):
            (ids,) = batch
            scores = self.lm_head(self.embed(ids[:, :-1]))
            return torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    made = Module()
    control = None
    if method is not None:
        method(made)
    else:
        control = SpectrumControl(made, every=2, decay=0.4, slack=1.0, scale="fixed")
    if rates is not None:
        step = control.step
        control.step = lambda rate: (rates.append(rate), step(rate))[1]
    logger = lightning.loggers.CSVLogger(folder)
    logged = []
    logger.log_metrics = lambda metrics, step=None: logged.append((step, metrics))
    trained = lightning.Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            *([SpectralLightningCallback(control, measure_every=3)] if ours is True else []),
            *([ours] if isinstance(ours, SpectralCallback) else []),
            lightning.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=6),
        ],
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(TEXT), batch_size=2)
    trained.fit(made, loader, ckpt_path=resume)
    return made, logged, trained


@pytest.mark.slow
def test_lightning(lightning, tmp_path):
    rates = []
    whole, logged, _ = fit(lightning, tmp_path / "whole", 12, True, rates=rates)
    assert rates == pytest.approx([1 - step / 20 for step in range(12)])
    measured = [step for step, metrics in logged if "table/mean_cosine" in metrics]
    assert measured == [3, 6, 9, 12]
    plain, _, _ = fit(lightning, tmp_path / "plain", 12, False)
    assert not torch.equal(plain.lm_head.weight, whole.lm_head.weight)
    (half,) = (tmp_path / "whole").glob("*step=6*")
    resumed, _, _ = fit(lightning, tmp_path / "resumed", 12, True, resume=half)
    same(weights(resumed), weights(whole))


@pytest.mark.slow
def test_lightning_gives_the_model_to_a_callback_without_one(lightning, tmp_path):
    found = {}
    for kind in (SpectralCallback, SpectralLightningCallback):
        control = SpectrumControl(every=2, decay=0.4, slack=1.0, scale="fixed")
        callback = kind(control=control, measure_every=3)
        made, logged, _ = fit(lightning, tmp_path / kind.__name__, 12, callback)
        assert control.weight is made.lm_head.weight and control.updates == 12
        assert [step for step, metrics in logged if "table/mean_cosine" in metrics] == [3, 6, 9, 12]
        found[kind] = weights(made)
    whole, _, _ = fit(lightning, tmp_path / "whole", 12, True)
    for one in found.values():
        same(one, weights(whole))
    (half,) = (tmp_path / "SpectralCallback").glob("*step=6*")
    again = SpectralCallback(control=SpectrumControl(every=2, decay=0.4, slack=1.0, scale="fixed"))
    resumed, _, _ = fit(lightning, tmp_path / "resumed", 12, again, resume=half)
    same(weights(resumed), weights(whole))
    with pytest.raises(ConfigurationError, match="found another model's"):
        fit(lightning, tmp_path / "other", 12, SpectralCallback(SpectrumControl(made)))


def test_lightning_finds_the_model_beside_a_head_of_the_module(lightning, transformers):
    """The control changed a projection of another kind."""

    class Module(lightning.LightningModule):
        def __init__(self, has_model):
            super().__init__()
            self.head = torch.nn.Linear(DIM, WORDS)
            self.model = build(transformers) if has_model else None

    for has_model in (True, False):
        module, control = Module(has_model), SpectrumControl()
        trained = SimpleNamespace(optimizers=[], callbacks=[])
        SpectralCallback(control).on_fit_start(trained, module)
        assert control.weight is (module.model.lm_head if has_model else module.head).weight


@pytest.mark.slow
def test_lightning_saves_and_averages_what_was_trained_before_it_is_plain(lightning, tmp_path):
    """The last checkpoint had the plain weights beside an optimiser of the table's entries."""
    callbacks = [SpectralCallback(plain_at_end=True)]
    callbacks += [lightning.callbacks.ModelCheckpoint(tmp_path, save_last=True)]
    averaging = getattr(lightning.callbacks, "EMAWeightAveraging", None)  # from Lightning 2.6 on
    callbacks += [] if averaging is None else [averaging(decay=0.5)]

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Straight(tied=True)

        def training_step(self, batch, index):
            scores = self.model(batch[0])
            return torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[0].flatten())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    module = Module()
    table = weight_norm_(module.model)
    trained = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    dataset = torch.utils.data.TensorDataset(TEXT)
    trained.fit(module, torch.utils.data.DataLoader(dataset, batch_size=8))
    assert type(module.model.lm_head) is torch.nn.Linear
    assert module.model.lm_head.weight is module.model.embed.weight
    torch.testing.assert_close(module.model.lm_head.weight, table.dense())
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    names = {name.split(".", 1)[1] for name in saved["state_dict"]}
    assert {"embed.table.g", "embed.table.v"} <= names and "lm_head.weight" not in names


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.optim.Optimizer, "register_step_post_hook"), reason="needs torch 2.0"
)
def test_lightning_takes_the_steps_that_the_optimiser_takes(lightning, tmp_path):
    """Those that a scaler skips were counted, and two in one batch as one."""
    scaler = getattr(torch.amp, "GradScaler", None)
    if scaler is None:
        pytest.skip("this torch has no GradScaler for a CPU")

    class Module(lightning.LightningModule):
        def __init__(self, by_hand):
            super().__init__()
            self.embed = torch.nn.Embedding(WORDS, DIM)
            self.lm_head = torch.nn.Linear(DIM, WORDS)
            self.automatic_optimization = not by_hand

        def training_step(self, batch, index):
            loss = self.lm_head(self.embed(batch[0])).float().square().mean()
            if self.automatic_optimization:
                return loss * (math.inf if index in (1, 2) else 1.0)
            for _ in range(2):
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.lm_head(self.embed(batch[0])).square().mean())
                optimizer.step()
            return None

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    precision = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler("cpu", init_scale=4.0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(TEXT), batch_size=4)
    callback = SpectralCallback(control=SpectrumControl(every=1))
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    options.update(max_steps=6, callbacks=[callback], default_root_dir=tmp_path)
    for by_hand, more, updates in ((False, {"plugins": [precision]}, 4), (True, {}, 6)):
        trainer = lightning.Trainer(**options, **more)
        trainer.fit(Module(by_hand), loader)
        assert callback.control.updates == updates
    trainer.save_checkpoint(tmp_path / "last")
    options["max_steps"] = 8
    lightning.Trainer(**options).fit(Module(True), loader, ckpt_path=tmp_path / "last")
    assert callback.control.updates == 8
    lightning.Trainer(**options).fit(Module(True), loader)  # a training of its own
    assert callback.control.updates == 8


@pytest.mark.slow
def test_weight_norm_tables_are_told_the_epoch_by_lightning(lightning, tmp_path):
    trained, _, _ = fit(lightning, tmp_path, 12, True, method=weight_norm_)  # 6 steps an epoch
    assert trained.lm_head.used_table.epoch == 2


@pytest.mark.slow
def test_several_optimisers_are_refused(lightning):
    with pytest.raises(UnsupportedError, match="1 optimiser, for"):
        SpectralLightningCallback().on_fit_start(SimpleNamespace(optimizers=[1, 2]), None)


@pytest.mark.usefixtures("transformers")
def test_a_trainer_that_keeps_no_states_measures_and_refuses_a_control(monkeypatch):
    bases = trainer_callback.trainer_bases()
    monkeypatch.setattr(trainer_callback, "trainer_bases", lambda: bases[:1])
    SpectralTrainerCallback(None, measure_every=10).on_train_begin(None, object(), None)
    with pytest.raises(ConfigurationError, match=r"4\.42"):
        SpectralTrainerCallback(None, SpectrumControl(torch.nn.Embedding(30, 4).weight))


@pytest.mark.usefixtures("transformers")
def test_a_trainer_that_does_not_call_the_control_is_refused():
    """The table was left as it was: transformers 4.41 and loops of others call on_step_end only."""
    control = SpectrumControl(torch.nn.Embedding(30, 4).weight)
    callback = SpectralTrainerCallback(SimpleNamespace(), control)
    state = SimpleNamespace(global_step=1)
    with pytest.raises(UnsupportedError, match="SimpleNamespace, which has taken a step without"):
        callback.on_step_end(None, state, None)
    callback.on_optimizer_step(None, state, None, optimizer=SimpleNamespace(step_was_skipped=True))
    callback.on_step_end(None, state, None)


def test_a_strategy_that_does_not_tell_the_rate_is_refused():
    """The control went on at its full rate, whatever the schedule said."""
    pytest.importorskip("lightning")
    callback = SpectralLightningCallback(SpectrumControl(torch.nn.Embedding(30, 4).weight))
    trainer = SimpleNamespace(global_step=1)
    with pytest.raises(UnsupportedError, match="which has taken a step without it"):
        callback.on_train_batch_end(trainer, None, None, None, 0)


def test_two_fused_losses_are_refused(transformers, tmp_path):
    """Liger's forward pass would leave the loss of this package out without a word."""
    model = build(transformers)
    trainer = SimpleNamespace(compute_loss_func=None)
    callback = SpectralTrainerCallback(trainer)
    arguments = SimpleNamespace(use_liger_kernel=True, label_smoothing_factor=0.0)
    state = SimpleNamespace(stateful_callbacks={}, global_step=0)
    callback.on_train_begin(arguments, state, None, model=model)
    fused_loss_(model)
    with pytest.raises(UnsupportedError, match="use_liger_kernel"):
        callback.on_train_begin(arguments, state, None, model=model)
