"""``--adversarial-epsilon``, ``--z-loss`` and ``--logit-softcap`` in models of both packages."""

import json
import re

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.commands.main import main
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.plugin.find import head_of, output_matrix
from tests.conftest import PACKAGE
from tests.covering import covering
from tests.plugin.conftest import (
    KINDS,
    LONGEST_FIRST,
    OFF,
    any_model,
    assert_close,
    build_criterion,
    build_model,
    gradients,
    make_sample,
)
from tests.plugin.test_stateful_training import BATCHES, TINY, XL
from tests.reference import losses as reference

ADVERSARIAL = [
    *((head, kind) for head in ("mos", "moc") for kind in KINDS),
    *((name, None) for name in (*KINDS, "transformer shared", "transformer separate",
                                "lstm shared", "lstm separate")),
]  # fmt: skip


@pytest.mark.parametrize(
    "of, accuracy, smoothed", covering(ADVERSARIAL, (False, True), ((0.0, 0), (0.1, 1)))
)
def test_the_adversarial_softmax_lowers_the_targets_logit(task, of, accuracy, smoothed):
    """In each expert of a mixture; the logs are those of the plain criterion."""
    (name, kind), (smoothing, prefix) = of, smoothed
    table = {} if kind is None else {"embedding_type": kind}
    model, sample = (
        any_model(task, name, **table).double().train(),
        make_sample(task, LONGEST_FIRST),
    )
    options = {"label_smoothing": smoothing, "ignore_prefix_size": prefix}
    options["report_accuracy"] = accuracy  # for which it makes the scores
    ours = build_criterion(task, adversarial_epsilon=0.1, **options, **OFF)
    loss, _, log = ours(model, sample)
    _, _, plain_log = build_criterion(task, "label_smoothed_cross_entropy", **options)(
        model, sample
    )
    for key in plain_log:
        found, expected = (torch.as_tensor(each[key]).double() for each in (log, plain_log))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)

    targets, pad = sample["target"][:, prefix:].flatten(), task.target_dictionary.pad()
    features = model.extract_features(**sample["net_input"])[0][:, prefix:].flatten(0, 1)
    contexts, log_prior = features.unsqueeze(1), features.new_zeros(len(features), 1)
    weight, head = output_matrix(model, len(task.target_dictionary)), head_of(model)
    bias = getattr(getattr(model.decoder, "fc_out", head), "bias", None)
    if kind is not None:
        contexts, log_prior = head.contexts(features), head.log_prior(features)
    if name == "moc":
        mixed = (log_prior.exp().unsqueeze(-1) * contexts).sum(1, keepdim=True)
        contexts, log_prior = mixed, torch.zeros_like(log_prior[:, :1])
    rows = torch.where(targets == pad, 2, targets)  # the naive form knows no padding
    lowered = reference.adversarial_log_mixture(contexts, log_prior, rows, weight, 0.1, bias)
    expected, _ = reference.smoothed_nll(lowered, targets, smoothing, pad)
    wanted, found = gradients(model, expected), gradients(model, loss)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-9, atol=0)
    assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name, flags, match", [
    ("mos", {"adversarial_epsilon": 0.1}, "a loss summed over tokens, for --adversarial-epsilon"),
    ("svd", {"adversarial_epsilon": 0.1}, "a loss summed over tokens, for --adversarial-epsilon"),
    ("moc", {"z_loss": 0.1}, "the probabilities of MixtureOfContexts"),
])  # fmt: skip
def test_losses_of_single_tokens_that_are_not_known_are_refused(task, name, flags, match):
    criterion = build_criterion(task, **flags, **OFF)
    with pytest.raises(UnsupportedError, match=match):
        criterion(any_model(task, name).train(), make_sample(task), reduce=False)


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("smoothing,prefix", [(0.0, 0), (0.1, 1)])
def test_it_is_added_to_the_loss_and_not_to_what_is_logged(task, form, smoothing, prefix):
    options = {**OFF, "label_smoothing": smoothing, "ignore_prefix_size": prefix}
    pad = task.target_dictionary.pad()
    for name in ("svd", "capped", "transformer shared", "lstm separate"):
        model, sample = any_model(task, name).train(), make_sample(task, sizes=LONGEST_FIRST)
        plain = build_criterion(task, loss_form=form, **options)(model, sample)
        found = build_criterion(task, loss_form=form, z_loss=0.3, **options)(model, sample)
        first = gradients(model, found[0])
        scores = model(**sample["net_input"])[0][:, prefix:].flatten(0, 1)
        targets = sample["target"][:, prefix:].flatten()
        # The scores that come out of a model are capped.
        expected = reference.z_losses(scores, targets, 0.3, None, smoothing, pad)
        second = gradients(model, expected[0])
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        assert_close(first, second, rtol=1e-4, atol=1e-5)
        for key in ("loss", "nll_loss"):
            assert float(found[2][key]) == pytest.approx(float(plain[2][key]), rel=1e-5)
        mean = float(found[2]["z_loss"]) / found[1]
        assert mean == pytest.approx(float(expected[3]) / sample["ntokens"], rel=1e-5)
        # In evaluation there is none.
        log = build_criterion(task, z_loss=0.3, **options)(model.eval(), sample)[2]
        assert "z_loss" not in log


def test_accuracy_and_single_tokens_are_those_of_the_scores(task):
    sample, model = make_sample(task), any_model(task, "capped")
    criterion = build_criterion(task, z_loss=0.3, report_accuracy=True, **OFF)
    loss, _, log = criterion(model.train(), sample)
    assert log["total"] == sample["ntokens"] and loss > log["loss"]
    each = build_criterion(task, z_loss=0.3, **OFF)(model, sample, reduce=False)
    torch.testing.assert_close(each[0].sum(), loss, rtol=1e-5, atol=1e-5)
    penalised = build_criterion(task, **{**OFF, "cosreg_weight": 1.0}, z_loss=0.3)
    assert torch.equal(penalised(model, sample, reduce=False)[0], each[0])
    assert penalised(model, sample)[0] != loss


def test_a_cap_bounds_the_scores(task):
    """test_loss_form.py compares the losses of capped scores."""
    sample = make_sample(task)["net_input"]
    capped, plain = (any_model(task, name).eval()(**sample)[0] for name in ("capped", "plain"))
    assert float(capped.abs().max()) <= 2.0
    torch.testing.assert_close(capped, 2.0 * torch.tanh(plain / 2.0))
    assert not torch.allclose(capped, plain, atol=1e-3)


@pytest.mark.parametrize("z_loss", [0.0, 0.2])
def test_the_z_loss_of_a_mixture_of_contexts(task, z_loss):
    sample = make_sample(task)
    for cap in (None, 1.5):
        model = build_model(task, output_head="moc", logit_softcap=cap).train()
        loss, size, log = build_criterion(task, z_loss=z_loss, **OFF)(model, sample)
        if z_loss:
            assert float(loss) == pytest.approx(float(log["loss"] + 0.2 * log["z_loss"]), rel=1e-5)
        else:
            assert float(loss) == float(log["loss"])


def test_a_capped_head_can_be_scripted(task):
    for head in ("softmax", "moc"):
        model = build_model(task, output_head=head, logit_softcap=1.5)
        output = model.decoder.output_projection
        features = torch.randn(3, output.table.embedding_dim)
        torch.testing.assert_close(torch.jit.script(output)(features), output(features))


LANGUAGE_MODELS = {
    "awd_lstm_wt2": (*TINY, *BATCHES),
    "transformer_xl_wt103": (*XL, "--adaptive-softmax-cutoff", ""),
}
CAPPED = ("--embedding-type", "plain", "--logit-softcap", "1.5", "--z-loss", "0.01")


@pytest.mark.slow
def test_the_cap_stays_with_the_model(train, run_cli, tiny_translation_data, tmp_path, capsys):
    """In checkpoints, validation and translation; plain fairseq cannot hold it."""
    folder = train("transformer_sc", "regularized_cross_entropy", "--share-all-embeddings", *CAPPED)
    log = (folder / "log.txt").read_text("utf-8")
    assert re.search(r"\| train \|.* z_loss \d", log)
    best = folder / "checkpoint_best.pt"
    assert load_checkpoint(best)["cfg"]["model"]["logit_softcap"] == 1.5
    common = (tiny_translation_data, "--user-dir", PACKAGE, "--path", best)
    done = run_cli("fairseq-validate", *common, "--task", "translation", "--batch-size", "4")
    found, expected = (
        re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", text)[-1]
        for text in (done.stdout + done.stderr, log)
    )
    assert found == expected
    run_cli("fairseq-generate", *common, "--beam", "2", "--batch-size", "4")
    assert main(["export", str(best), str(tmp_path / "out.pt")]) == 2
    assert "--logit-softcap 1.5" in capsys.readouterr().err
    for form in ("huggingface", "ctranslate2"):
        assert main(["export", "--to", form, str(best), str(tmp_path / form)]) == 2
        assert "--logit-softcap 1.5" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("arch", LANGUAGE_MODELS)
def test_language_models_with_a_cap(arch, train, tiny_lm_data, capsys):
    """What evaluate-lm finds is what training found in validation."""
    folder = train(arch, "regularized_cross_entropy", *LANGUAGE_MODELS[arch], *CAPPED)
    log = (folder / "log.txt").read_text("utf-8")
    in_training = float(re.findall(r"\| valid \|.*? loss ([\d.]+)", log)[-1])
    capsys.readouterr()
    flags = ("--format", "json", "--cpu", "--streams", "2", "--segment", "10")
    assert main(["evaluate-lm", f"{folder}/checkpoint_last.pt", str(tiny_lm_data), *flags]) == 0
    (found,) = json.loads(capsys.readouterr().out)["figures"]
    assert found["bits"] == pytest.approx(in_training, abs=6e-4)
