"""``--z-loss`` and ``--logit-softcap`` in fairseq's models and this package's criterions."""

import json
import re

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.commands.main import main
from spectral_fairseq.embeddings import TABLES
from tests.conftest import PACKAGE
from tests.plugin.conftest import (
    LONGEST_FIRST,
    assert_close,
    build_criterion,
    build_model,
    gradients,
    host_model,
    make_sample,
)
from tests.reference import losses as reference

OFF = {"name": "mle_cosreg", "cosreg_weight": 0.0}


def models(task):
    return {
        "svd": build_model(task),
        "capped": build_model(task, embedding_type="plain", logit_softcap=2.0),
        "of fairseq": host_model(task, "transformer shared"),
        "lstm of fairseq": host_model(task, "lstm separate"),
    }


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("smoothing,prefix", [(0.0, 0), (0.1, 1)])
def test_it_is_added_to_the_loss_and_not_to_what_is_logged(task, form, smoothing, prefix):
    options = {**OFF, "label_smoothing": smoothing, "ignore_prefix_size": prefix}
    pad = task.target_dictionary.pad()
    for model in models(task).values():
        for module in model.modules():
            module.dropout = 0.0 if isinstance(getattr(module, "dropout", None), float) else None
        sample = make_sample(task, sizes=LONGEST_FIRST)
        model.train()
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
    sample, model = make_sample(task), build_model(task, embedding_type="plain", logit_softcap=2.0)
    criterion = build_criterion(task, z_loss=0.3, report_accuracy=True, **OFF)
    loss, _, log = criterion(model.train(), sample)
    assert log["total"] == sample["ntokens"] and loss > log["loss"]
    each = build_criterion(task, z_loss=0.3, **OFF)(model, sample, reduce=False)
    torch.testing.assert_close(each[0].sum(), loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", ["softmax", "moc"])
@pytest.mark.parametrize("embedding_type", [kind.kind for kind in TABLES])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_capped_scores_is_the_plain_criterions(task, head, embedding_type, smoothing):
    options = {"embedding_type": embedding_type, "output_head": head, "mixture_components": 3}
    model = build_model(task, logit_softcap=1.5, **options).double().train()
    sample = make_sample(task)
    sizes = {"label_smoothing": smoothing}
    ours = build_criterion(task, **OFF, **sizes)(model, sample)
    plain = build_criterion(task, "label_smoothed_cross_entropy", **sizes)(model, sample)
    torch.testing.assert_close(ours[0].double(), plain[0].double(), rtol=1e-6, atol=1e-6)
    found, expected = gradients(model, ours[0]), gradients(model, plain[0])
    assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if head == "softmax":
        assert float(model(**sample["net_input"])[0].detach().abs().max()) <= 1.5
    model.decoder.output_projection.softcap = None
    other = build_criterion(task, **OFF, **sizes)(model, sample)[0]
    assert abs(float((other - ours[0]).detach())) > 1e-5


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


STREAMS = ("--task", "stateful_language_modeling", "--batch-size", "3")
LANGUAGE_MODELS = {
    "awd_lstm_wt2": ("--decoder-embed-dim", "16", "--decoder-hidden-size", "16"),
    "transformer_xl_wt103": (
        *("--adaptive-softmax-cutoff", "", "--decoder-embed-dim", "16", "--mem-len", "8"),
        *("--decoder-layers", "1", "--decoder-attention-heads", "2"),
        *("--decoder-ffn-embed-dim", "16"),
    ),
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
    folder = train(arch, "regularized_cross_entropy", *STREAMS, *LANGUAGE_MODELS[arch], *CAPPED)
    log = (folder / "log.txt").read_text("utf-8")
    in_training = float(re.findall(r"\| valid \|.*? loss ([\d.]+)", log)[-1])
    best = folder / "checkpoint_best.pt"
    capsys.readouterr()
    flags = ("--format", "json", "--cpu", "--streams", "3", "--segment", "16")
    assert main(["evaluate-lm", str(best), str(tiny_lm_data), *flags]) == 0
    (found,) = json.loads(capsys.readouterr().out)["figures"]
    assert found["bits"] == pytest.approx(in_training, abs=6e-4)
