"""Ways of training that would train something else are refused; watching one changes nothing."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from spectral_fairseq.analysis import analyze
from spectral_fairseq.embeddings import TABLES
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.plugin.checks import WaysOfTraining
from tests.plugin.conftest import build_criterion, build_model, make_sample
from tests.plugin.trainers import build_trainer, same_models, save_in_epoch, train


def check(cfg, model, criterion):
    trainer = SimpleNamespace(cfg=cfg, get_model=lambda: model, get_criterion=lambda: criterion)
    WaysOfTraining(trainer).begin_training()


def configuration(**changes):
    return OmegaConf.create(
        {
            "distributed_training": {"ddp_backend": changes.pop("ddp_backend", "pytorch_ddp")},
            "common": {"memory_efficient_fp16": False, "memory_efficient_bf16": False, **changes},
        }
    )


@pytest.mark.parametrize("name", ["mle_cosreg", "weight_norm"])
def test_sharded_parameters_with_a_criterion_of_ours(task, name):
    sharded, criterion = configuration(ddp_backend="fully_sharded"), build_criterion(task, name)
    model = build_model(task, "transformer_sc", embedding_type="plain")
    with pytest.raises(UnsupportedError, match="pytorch_ddp"):
        check(sharded, model, criterion)
    check(sharded, model, build_criterion(task, "label_smoothed_cross_entropy"))
    check(configuration(), model, criterion)


@pytest.mark.parametrize("options", [{}, {"embedding_type": "plain", "output_head": "mos"}])
def test_sharded_parameters_with_a_table_or_a_head_of_ours(task, options):
    criterion = build_criterion(task, "label_smoothed_cross_entropy")
    with pytest.raises(UnsupportedError, match="fully_sharded"):
        check(configuration(ddp_backend="fully_sharded"), build_model(task, **options), criterion)


@pytest.mark.parametrize("precision, dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_factored_tables_without_float32_copies(task, precision, dtype):
    criterion = build_criterion(task, "spectrum_control")
    efficient = configuration(**{f"memory_efficient_{precision}": True})
    model = build_model(task)
    for kind in ("svd", "weight-norm"):
        with pytest.raises(UnsupportedError, match=f"--memory-efficient-{precision}.*--amp"):
            check(efficient, build_model(task, embedding_type=kind), criterion)
    check(efficient, build_model(task, embedding_type="plain"), criterion)
    # The reason: a step of Adam leaves the diagonal of the stored V where it is.
    diagonal = model.decoder.output_projection.table.V.detach().diagonal().to(dtype)
    assert torch.equal(diagonal - 5e-4, diagonal)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [table.kind for table in TABLES])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"cosreg_weight": 1.0, "spectrum_weight": 0.01},
        {"adversarial_epsilon": 0.1, "loss_form": "blockwise"},
        {"gradient_gating": 1.5},
    ],
)
def test_watching_a_training_changes_nothing(kind, flags, tmp_path):
    """Logs, validation and analysis, and checks at the start of a resumed run."""
    unwatched, watched = (
        build_trainer(table=kind, log_spectrum_interval=interval, **flags) for interval in (0, 1)
    )
    train(unwatched, 6)
    for done in range(1, 7):
        train(watched, 1)
        watched.valid_step(make_sample(watched.task, seed=9))
        analyze(watched.get_model())
        if done == 3:
            save_in_epoch(watched, tmp_path / "c.pt", done)
            watched = build_trainer(table=kind, begin=False, log_spectrum_interval=1, **flags)
            watched.load_checkpoint(str(tmp_path / "c.pt"))
            watched.begin_epoch(1)
    assert same_models(unwatched, watched)


@pytest.mark.parametrize("kind", [table.kind for table in TABLES])
def test_the_checks_before_training_leave_a_model_as_it_is(task, kind):
    model = build_model(task, embedding_type=kind).train()
    flags = {"cosreg_weight": 1.0, "spectrum_weight": 0.01, "log_spectrum_interval": 1}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    build_criterion(task, "mle_cosreg", **flags).check_model(model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("head", ["mos", "moc"])
def test_the_accuracy_of_a_mixture_shifts_no_mask(task, head):
    model = build_model(task, output_head=head, dropout=0.2, mixture_dropout=0.2).train()
    states = []
    for report in (False, True):
        criterion = build_criterion(
            task, "mle_cosreg", adversarial_epsilon=0.1, report_accuracy=report
        )
        torch.manual_seed(3)
        criterion(model, make_sample(task))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
