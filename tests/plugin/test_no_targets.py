"""A batch without targets, of padding alone or within the ignored prefix: a loss of 0, no NaN."""

import pytest
import torch
from fairseq.logging import metrics

from spectral_fairseq.errors import ConfigurationError, DataError
from tests.covering import covering
from tests.plugin.conftest import OUR_MODELS, any_model, build_criterion, sample_for
from tests.plugin.trainers import build_trainer

METHODS = (
    {},
    {"adversarial_epsilon": 0.1},
    {"rdrop_weight": 1.0},
    {"z_loss": 0.1},
    {"cosreg_weight": 1.0},
    {"loss_form": "dense"},
    {"loss_form": "blockwise"},
    {"report_accuracy": True},
)
# The models with which a method cannot be combined; the others train.
REFUSED = {
    "adversarial_epsilon": ("capped", "xl adaptive"),
    "rdrop_weight": ("awd-lstm", "awd-lstm mos", "awd-lstm moc", "xl", "xl mos", "xl adaptive"),
    "z_loss": ("mos", "awd-lstm mos", "xl mos", "xl adaptive"),
}


def without_targets(task, model, size):
    """(batch, tokens in the ignored prefix): of padding alone if there are none."""
    sample = sample_for(model, task)
    if not size:
        sample["target"] = torch.full_like(sample["target"], task.target_dictionary.pad())
        sample["ntokens"] = 0
    return sample


def named(value):
    """The name of a method; pytest names the other parameters itself."""
    return next(iter(value), "nothing") if isinstance(value, dict) else None


@pytest.mark.parametrize("name, method", covering(OUR_MODELS, METHODS), ids=named)
def test_a_batch_without_targets(task, name, method):
    model = any_model(task, name, dropout=0.1)
    smoothing = 0.0 if name == "xl adaptive" else 0.1
    for prefix in (0, 9):
        model.zero_grad()
        flags = {"label_smoothing": smoothing, "ignore_prefix_size": prefix, **method}
        criterion = build_criterion(task, "regularized_cross_entropy", **flags)
        if any(name in REFUSED.get(flag, ()) for flag in method):
            with pytest.raises(ConfigurationError):
                criterion.check_model(model)
            return
        criterion.check_model(model)
        sample = without_targets(task, model, prefix)
        model.eval()
        loss, _, log = criterion(model, sample)
        assert loss.item() == 0 and float(log["nll_loss"]) == 0
        model.train()
        loss, size, log = criterion(model, sample)
        assert float(log["loss"]) == 0 and (size or loss.item() == 0)
        assert all(torch.isfinite(torch.as_tensor(value)) for value in log.values())
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                assert torch.isfinite(parameter.grad).all()
                assert size or not parameter.grad.any()


@pytest.mark.parametrize("sentence_avg", [False, True])
def test_an_update_without_tokens_has_no_loss_in_the_logs(sentence_avg):
    """It was shown as nan, as a training that has diverged is."""
    trainer = build_trainer(sentence_avg=sentence_avg, cosreg_weight=1.0)
    task = trainer.task

    def shown(*sizes):
        metrics.reset()
        with metrics.aggregate() as found:
            for size in sizes:
                trainer.train_step([without_targets(task, trainer.get_model(), size)])
        values = found.get_smoothed_values()
        return [values.get(name) for name in ("loss", "nll_loss", "ppl")]

    assert shown(0) == [None, None, None]
    weights = {name: one.clone() for name, one in trainer.get_model().state_dict().items()}
    alone = shown(9)
    trainer.get_model().load_state_dict(weights)
    assert shown(9, 0) == alone and all(value > 0 for value in alone)
    with pytest.raises(DataError, match="no batch"):
        type(trainer.get_criterion()).reduce_metrics([])
