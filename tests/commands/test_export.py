"""Exported checkpoints: plain, safe, equal to the original wherever fairseq reads them."""

import json
import math
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import build_model
from omegaconf import OmegaConf

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.checkpoints.rewriting import collapse_tables
from spectral_fairseq.commands import export_plain
from spectral_fairseq.commands.main import main
from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.errors import CheckpointError, UnsupportedError
from tests.conftest import PACKAGE

SHARED = ("--share-all-embeddings", "--label-smoothing", "0.1")
# Trained through the command line: name -> flags.
TRANSLATION = {"three ways": SHARED, "two ways": ("--share-decoder-input-output-embed",)}
LANGUAGE_MODEL = ("--share-decoder-input-output-embed",)
# Made from a trained checkpoint by building another model: name -> flags that differ.
APART = {"share_all_embeddings": False}
VARIANTS = {
    "output only": APART,
    "apart, all": {**APART, "embedding_tables": "all"},
    "plain tables": {"embedding_type": "plain"},
    "polynomial": {"spectrum_prior": "polynomial", "spectrum_c1": "3.0"},
    "another shape": {
        **{
            f"{side}_{flag}": True
            for side in ("encoder", "decoder")
            for flag in ("normalize_before", "learned_pos")
        },
        "layernorm_embedding": True,
        "decoder_layers": 2,
    },
}
LANGUAGE_MODEL_VARIANTS = {
    "output only": {"share_decoder_input_output_embed": False},
    "apart, all": {"share_decoder_input_output_embed": False, "embedding_tables": "all"},
    "plain tables": {"embedding_type": "plain"},
}
TIES = {
    "three ways": {("encoder", "decoder"), ("decoder", "output")},
    "two ways": {("decoder", "output")},
}
NAMES = {
    "encoder": "encoder.embed_tokens.weight",
    "decoder": "decoder.embed_tokens.weight",
    "output": "decoder.output_projection.weight",
}


def export_of(folder, tmp_path, name="plain.pt"):
    out = tmp_path / name
    assert main(["export", str(folder / "checkpoint_last.pt"), str(out)]) == 0
    return out


def train_translation(train, kind):
    return train("transformer_sc", "spectrum_control", *TRANSLATION[kind])


@pytest.fixture
def checkpoint(train):
    return load_checkpoint(train_translation(train, "three ways") / "checkpoint_last.pt")


def train_lm(train):
    return train("transformer_lm_sc", "spectrum_control", *LANGUAGE_MODEL)


def variant(checkpoint, flags):
    """``checkpoint`` as if it had been trained with other flags, every tensor off its start."""
    cfg = {**checkpoint["cfg"], "model": {**checkpoint["cfg"]["model"], **flags}}
    task = export_plain.task_like(collapse_tables(checkpoint["model"]))
    model = build_model(OmegaConf.create({key: cfg[key] for key in ("model", "task")}).model, task)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return {**checkpoint, "cfg": cfg, "model": model.state_dict()}


def exported_translation(train, kind, tmp_path):
    return export_of(train_translation(train, kind), tmp_path)


def safely_loaded(*paths):
    """The archs of checkpoints, loaded in a new process: this one's allow-list is longer."""
    code = (
        "import sys, torch\n"
        "for path in sys.argv[1:]:\n"
        "    c = torch.load(path, map_location='cpu', weights_only=True)\n"
        "    print(c['cfg']['model']['_name'])"
    )
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.parametrize("kind", TRANSLATION)
def test_translation_is_plain_and_equal(kind, train, tmp_path, capsys):
    folder = train_translation(train, kind)
    out = export_of(folder, tmp_path)
    printed = capsys.readouterr().out
    original, plain = load_checkpoint(folder / "checkpoint_last.pt"), load_checkpoint(out)

    assert float(re.search(r"differ by at most (\S+)", printed).group(1)) < 1e-4
    assert set(NAMES.values()) <= set(plain["model"])
    assert not [key for key in plain["model"] if key.split(".")[-1] in ("U", "V", "sigma")]
    for one, other in TIES.get(kind, ()):
        assert plain["model"][NAMES[one]].data_ptr() == plain["model"][NAMES[other]].data_ptr()

    cfg = plain["cfg"]
    assert cfg["model"]["_name"] == "transformer" and plain["args"] is None
    ours = ("embedding_", "spectrum_", "output_head", "mixture_", "orthogonality_")
    for node in (cfg["model"], cfg["criterion"]):
        assert not [flag for flag in node if flag.startswith(ours)]
    assert cfg["common"]["user_dir"] is None
    for flag in ("encoder_layers", "decoder_layers", "share_all_embeddings", "activation_fn"):
        assert cfg["model"][flag] == original["cfg"]["model"][flag]
    assert "last_optimizer_state" not in plain


@pytest.mark.parametrize(
    "is_lm, kind",
    [(False, kind) for kind in VARIANTS] + [(True, kind) for kind in LANGUAGE_MODEL_VARIANTS],
)
def test_other_models(is_lm, kind, train):
    folder = train_lm(train) if is_lm else train_translation(train, "three ways")
    trained = load_checkpoint(folder / "checkpoint_last.pt")
    original = variant(trained, (LANGUAGE_MODEL_VARIANTS if is_lm else VARIANTS)[kind])
    plain, check = export_plain.export_checkpoint(original)
    assert 0 < check.max_logit and check.max_difference < 1e-5 * check.max_logit
    names = [NAMES[side] for side in NAMES if not (is_lm and side == "encoder")]
    assert set(names) <= set(plain["model"])
    if not is_lm:
        shared = plain["cfg"]["model"]["share_all_embeddings"]
        assert len({plain["model"][key].data_ptr() for key in names}) == (1 if shared else 3)


def test_half_precision_and_copies_of_a_shared_table(checkpoint):
    stored = {key: tensor.half() for key, tensor in checkpoint["model"].items()}
    for key, tensor in checkpoint["model"].items():
        if key.endswith(("scale", "initial_norm")):
            stored[key] = tensor.clone()  # these stay float32 whatever the model is
    u, sigma, v = (stored[f"encoder.embed_tokens.{name}"].double() for name in ("U", "sigma", "V"))
    naive = u @ torch.diag(sigma) @ (v / SVDEmbedding(48, 16, 1).v_scale).t()

    plain, check = export_plain.export_checkpoint({**checkpoint, "model": stored})
    assert check.equal
    plain = plain["model"]
    assert len({plain[key].data_ptr() for key in NAMES.values()}) == 1
    assert plain[NAMES["encoder"]].dtype == torch.float32
    torch.testing.assert_close(plain[NAMES["encoder"]].double(), naive, rtol=1e-6, atol=1e-7)
    for key, tensor in plain.items():
        if key not in NAMES.values():
            assert tensor.dtype == torch.float16 and torch.equal(tensor, stored[key])


def test_language_model_is_plain_and_equal(train, tmp_path, capsys):
    plain = load_checkpoint(export_of(train_lm(train), tmp_path))
    assert float(re.search(r"differ by at most (\S+)", capsys.readouterr().out).group(1)) < 1e-4
    assert plain["cfg"]["model"]["_name"] == "transformer_lm"
    flags = plain["cfg"]["model"]
    assert not [flag for flag in flags if flag.startswith(("spectrum_", "embedding_"))]
    assert {NAMES["decoder"], NAMES["output"]} <= set(plain["model"])


def test_criterion_becomes_the_hosts(train, tmp_path):
    smoothed = load_checkpoint(export_of(train_translation(train, "three ways"), tmp_path))
    assert smoothed["cfg"]["criterion"] == {
        "_name": "label_smoothed_cross_entropy",
        "label_smoothing": 0.1,
        "sentence_avg": False,
        "report_accuracy": False,
        "ignore_prefix_size": 0,
    }
    plain = load_checkpoint(export_of(train_lm(train), tmp_path, "lm.pt"))
    assert plain["cfg"]["criterion"] == {"_name": "cross_entropy", "sentence_avg": False}


@pytest.mark.skipif(
    not hasattr(torch.serialization, "add_safe_globals"), reason="weights_only is young"
)
def test_no_unsafe_globals(train, tmp_path):
    translation = exported_translation(train, "three ways", tmp_path)
    lm = export_of(train_lm(train), tmp_path, "lm.pt")
    assert safely_loaded(translation, lm) == ["transformer", "transformer_lm"]


def hypotheses(output):
    """Sentence number -> its best hypothesis and the score."""
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return {int(number): (text, float(score)) for number, score, text in found}


@pytest.mark.parametrize("kind", TRANSLATION)
def test_generate_without_the_plugin(
    kind, train, tiny_translation_data, run_cli, run_without_plugin, tmp_path
):
    folder = train_translation(train, kind)
    out = export_of(folder, tmp_path)
    # Some versions of fairseq drop the last batch unless its size is a multiple of 8.
    options = (
        tiny_translation_data,
        *"--beam 3 --required-batch-size-multiple 1 --max-len-b 12".split(),
    )
    ours = run_cli(
        "fairseq-generate",
        *options,
        *("--path", folder / "checkpoint_last.pt", "--user-dir", PACKAGE),
        cwd=tmp_path,
    )
    plain = run_without_plugin("fairseq-generate", *options, "--path", out, cwd=tmp_path)
    expected, found = hypotheses(ours.stdout), hypotheses(plain.stdout)
    assert set(expected) == set(found) == set(range(7))
    for number, (text, score) in expected.items():
        assert found[number] == (text, pytest.approx(score, abs=2e-3))


def test_eval_lm_without_the_plugin(train, tiny_lm_data, run_cli, run_without_plugin, tmp_path):
    folder = train_lm(train)
    out = export_of(folder, tmp_path)
    options = (
        tiny_lm_data,
        *"--gen-subset test --tokens-per-sample 16 --required-batch-size-multiple 1".split(),
    )
    ours = run_cli(
        "fairseq-eval-lm",
        *options,
        *("--path", folder / "checkpoint_last.pt", "--user-dir", PACKAGE),
        cwd=tmp_path,
    )
    plain = run_without_plugin("fairseq-eval-lm", *options, "--path", out, cwd=tmp_path)
    loss = re.compile(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)")
    expected, found = (loss.search(done.stderr + done.stdout).groups() for done in (ours, plain))
    assert float(found[0]) == pytest.approx(float(expected[0]), abs=2e-4)


@pytest.mark.parametrize("option", ["--finetune-from-model", "--restore-file"])
def test_training_goes_on_without_the_plugin(
    option, train, tiny_translation_data, run_without_plugin, tmp_path
):
    from tests.conftest import TINY_TRANSLATION

    out = exported_translation(train, "three ways", tmp_path)
    done = run_without_plugin(
        "fairseq-train",
        tiny_translation_data,
        *("--arch", "transformer", "--share-all-embeddings", *TINY_TRANSLATION),
        option,
        out,
        "--save-dir",
        tmp_path / "more",
        *"--optimizer adam --lr 1e-9 --max-tokens 96 --max-epoch 1 --num-workers 0".split(),
        *"--data-buffer-size 0 --required-batch-size-multiple 1".split(),
        cwd=tmp_path,
    )
    assert "NaN" not in done.stderr
    before, after = load_checkpoint(out), load_checkpoint(tmp_path / "more" / "checkpoint_last.pt")
    assert after["optimizer_history"][-1]["num_updates"] > 1
    for key, tensor in before["model"].items():
        torch.testing.assert_close(after["model"][key], tensor, rtol=0, atol=1e-6)


def test_an_unequal_model_is_not_written(train, tmp_path, monkeypatch, capsys):
    def wrong(model):
        tables = dict(collapse_tables(model))
        return {**tables, **{name: tables[name] * 1.001 for name in NAMES.values()}}

    monkeypatch.setattr(export_plain, "collapse_tables", wrong)
    folder = train_translation(train, "three ways")
    out = tmp_path / "plain.pt"
    assert main(["export", str(folder / "checkpoint_last.pt"), str(out)]) == 2
    assert "logits" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_not_a_number_is_not_equal():
    assert not export_plain.LogitCheck(math.nan, 1.0).equal
    assert not export_plain.LogitCheck(0.1, math.nan).equal
    assert export_plain.LogitCheck(9e-5, 1.0).equal and not export_plain.LogitCheck(2e-4, 1.0).equal


@pytest.mark.parametrize("is_lm", [False, True])
def test_a_plain_checkpoint_is_saved_anew_for_fairseq_alone(
    is_lm, train, request, run_without_plugin, tmp_path
):
    """fairseq saves objects that torch >= 2.6 refuses to load, unless it is told to trust them."""
    arch = "transformer_lm" if is_lm else "transformer"
    folder = train(arch, "cross_entropy", *(LANGUAGE_MODEL if is_lm else SHARED[:1]))
    out = export_of(folder, tmp_path)
    before, after = (load_checkpoint(one)["model"] for one in (folder / "checkpoint_last.pt", out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    data = request.getfixturevalue("tiny_lm_data" if is_lm else "tiny_translation_data")
    program = "fairseq-eval-lm" if is_lm else "fairseq-generate"
    all_sentences = ("--required-batch-size-multiple", "1")
    run_without_plugin(program, data, "--path", out, *all_sentences, cwd=tmp_path)
    again = tmp_path / "again.pt"
    assert main(["export", str(out), str(again)]) == 0
    assert safely_loaded(out, again) == [arch, arch]


def test_an_output_layer_not_understood(checkpoint):
    model = checkpoint["model"]
    mixture = {**model, "decoder.output_projection.prior.weight": torch.zeros(3, 16)}
    partial = {key: value for key, value in model.items() if key != "encoder.embed_tokens.V"}
    adapter = {**model, "decoder.adapter.weight": torch.zeros(3)}
    for changed, kind, match in (
        (mixture, CheckpointError, "a single softmax; found one of a mixture of 3"),
        (partial, UnsupportedError, r"embed_tokens\.U"),
        (adapter, UnsupportedError, r"decoder\.adapter\.weight"),
    ):
        with pytest.raises(kind, match=match):
            export_plain.export_checkpoint({**checkpoint, "model": changed})


def test_configurations_not_understood(checkpoint):
    with pytest.raises(CheckpointError, match="cfg.model"):
        export_plain.export_checkpoint({**checkpoint, "cfg": None})
    model = {**checkpoint["cfg"]["model"], "_name": "no_such_arch"}
    with pytest.raises(CheckpointError, match="no_such_arch"):
        export_plain.export_checkpoint({**checkpoint, "cfg": {**checkpoint["cfg"], "model": model}})
    with pytest.raises(CheckpointError, match="cfg.task"):
        export_plain.export_checkpoint({**checkpoint, "cfg": {**checkpoint["cfg"], "task": None}})


@pytest.mark.parametrize("smoothing", [{}, {"label_smoothing": 0.1}])
def test_settings_that_a_tool_has_left_out_are_not_needed(checkpoint, smoothing):
    nodes = {name: checkpoint["cfg"][name] for name in ("model", "task")}
    nodes["criterion"] = {"_name": "mle_cosreg", **smoothing}
    plain, _ = export_plain.export_checkpoint(
        {**checkpoint, "cfg": nodes, "optimizer_history": [None]}
    )
    kind = "label_smoothed_cross_entropy" if smoothing else "cross_entropy"
    assert plain["cfg"]["criterion"] == {"_name": kind, **smoothing}
    assert plain["optimizer_history"][0]["num_updates"] == 0


def test_a_namespace_elsewhere_becomes_safe(checkpoint, tmp_path):
    task = dict(checkpoint["cfg"]["task"])
    legacy = Namespace(**{**task, "task": task.pop("_name")})
    cfg = {**checkpoint["cfg"], "task": legacy}
    plain, _ = export_plain.export_checkpoint({**checkpoint, "cfg": cfg})
    assert plain["cfg"]["task"]["task"] == plain["cfg"]["model"]["task"] == "translation"
    torch.save(plain, tmp_path / "plain.pt")
    if hasattr(torch.serialization, "add_safe_globals"):
        assert safely_loaded(tmp_path / "plain.pt") == ["transformer"]


def test_model_overrides_reach_the_exported_flags(train, tmp_path):
    """They had no effect."""
    out = exported_translation(train, "three ways", tmp_path)
    for scaled in (True, False):
        overrides = {"no_scale_embedding": not scaled}
        (model,), _, _ = load_model_ensemble_and_task([str(out)], arg_overrides=overrides)
        assert (model.encoder.embed_scale != 1) == scaled


def test_embedding_files_are_not_asked_for_again(checkpoint):
    model = {**checkpoint["cfg"]["model"], "encoder_embed_path": "/no/such/file"}
    cfg = {**checkpoint["cfg"], "model": model}
    plain, _ = export_plain.export_checkpoint({**checkpoint, "cfg": cfg})
    assert plain["cfg"]["model"]["encoder_embed_path"] is None


def test_nothing_is_overwritten_unasked(train, tmp_path, capsys):
    source = train_translation(train, "three ways") / "checkpoint_last.pt"
    content = source.read_bytes()
    out = tmp_path / "plain.pt"
    out.write_text("precious")
    assert main(["export", str(source), str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err and out.read_text() == "precious"

    link = tmp_path / "link.pt"
    link.symlink_to(source)
    for same in (source, link):
        assert main(["export", str(source), str(same), "--overwrite"]) == 2
        assert "input" in capsys.readouterr().err and source.read_bytes() == content
    assert main(["export", str(source), str(tmp_path), "--overwrite"]) == 2
    assert main(["export", str(source), str(tmp_path / "no" / "out.pt")]) == 2
    assert "no such folder" in capsys.readouterr().err

    assert main(["export", str(source), str(out), "--overwrite"]) == 0
    assert "model" in load_checkpoint(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.pt", "plain.pt"]


@pytest.mark.parametrize("torch_fails_too", [False, True])
def test_a_failed_write_leaves_the_old_file(torch_fails_too, train, tmp_path, monkeypatch, capsys):
    source = train_translation(train, "three ways") / "checkpoint_last.pt"
    out = tmp_path / "plain.pt"
    out.write_text("precious")

    def fail(checkpoint, file, **options):
        Path(file).write_bytes(b"half")
        try:
            raise OSError("disk full")
        finally:
            if torch_fails_too:  # as its writer does when it closes the archive
                raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", fail)
    assert main(["export", str(source), str(out), "--overwrite"]) == 2
    assert "disk full" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["plain.pt"]
    assert out.read_text() == "precious"


def test_what_is_printed_is_text_or_json(train, tmp_path, capsys):
    source = str(train_lm(train) / "checkpoint_last.pt")
    assert main(["export", source, str(tmp_path / "a.pt")]) == 0
    assert "a plain transformer_lm checkpoint" in capsys.readouterr().out
    assert main(["export", source, str(tmp_path / "b.pt"), "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["arch"] == "transformer_lm" and printed["output"] == str(tmp_path / "b.pt")
