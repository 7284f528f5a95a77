"""Exported checkpoints: plain, safe, equal to the original wherever fairseq reads them."""

import json
import math
import re
from argparse import Namespace

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import build_model
from omegaconf import OmegaConf

from spectral_fairseq.checkpoints.collapse import collapse_tables
from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.checkpoints.settings import by_name
from spectral_fairseq.commands import export_plain
from spectral_fairseq.commands.logit_check import LogitCheck, task_like
from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.errors import CheckpointError, UnsupportedError
from tests.conftest import PACKAGE, TINY_TRANSLATION, is_language_model
from tests.language_models import TIED

SHARED = ("--share-all-embeddings", "--label-smoothing", "0.1")
# Trained through the command line: how its tables are shared -> arch and flags.
TRAINED = {
    "three ways": ("transformer_sc", *SHARED),
    "two ways": ("transformer_sc", TIED),
    "language model": ("transformer_lm_sc", TIED),
}
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
NAMES = {
    "encoder": "encoder.embed_tokens.weight",
    "decoder": "decoder.embed_tokens.weight",
    "output": "decoder.output_projection.weight",
}


def last(train, kind):
    """The checkpoint of a training of :data:`TRAINED`."""
    arch, *flags = TRAINED[kind]
    return train(arch, "spectrum_control", *flags) / "checkpoint_last.pt"


@pytest.fixture
def export(command, tmp_path):
    """Export to plain.pt in the folder of the test, or by another name."""

    def run(checkpoint, name="plain.pt"):
        command("export", checkpoint, tmp_path / name)
        return tmp_path / name

    return run


@pytest.fixture
def checkpoint(train):
    return load_checkpoint(last(train, "three ways"))


def with_settings(checkpoint, **nodes):
    """A checkpoint of which nodes of the configuration are others."""
    return {**checkpoint, "cfg": {**checkpoint["cfg"], **nodes}}


def variant(checkpoint, flags):
    """``checkpoint`` as if it had been trained with other flags, every tensor off its start."""
    changed = with_settings(checkpoint, model={**checkpoint["cfg"]["model"], **flags})
    cfg = changed["cfg"]
    task = task_like(collapse_tables(checkpoint["model"]))
    model = build_model(OmegaConf.create({key: cfg[key] for key in ("model", "task")}).model, task)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return {**changed, "model": model.state_dict()}


LOAD_SAFELY = """
import sys, torch
for path in sys.argv[1:]:
    print(torch.load(path, map_location="cpu", weights_only=True)["cfg"]["model"]["_name"])
"""


@pytest.fixture
def safely_loaded(run_cli):
    """The archs of checkpoints, loaded in another process: this one's allow-list is longer."""
    return lambda *paths: run_cli("python", "-c", LOAD_SAFELY, *paths).stdout.split()


@pytest.mark.parametrize("kind", TRAINED)
def test_what_is_exported_is_plain_and_equal(kind, train, command, tmp_path):
    path, out = last(train, kind), tmp_path / "plain.pt"
    printed = command("export", path, out)
    assert float(re.search(r"differ by at most (\S+)", printed).group(1)) < 1e-4
    original, plain = load_checkpoint(path), load_checkpoint(out)
    names = [NAMES[side] for side in NAMES if kind != "language model" or side != "encoder"]
    assert set(names) <= set(plain["model"])
    assert not [key for key in plain["model"] if key.split(".")[-1] in ("U", "V", "sigma")]
    tied = names if kind == "three ways" else [NAMES["decoder"], NAMES["output"]]
    assert len({plain["model"][name].data_ptr() for name in tied}) == 1

    cfg = plain["cfg"]
    assert f"{cfg['model']['_name']}_sc" == TRAINED[kind][0] and plain["args"] is None
    ours = ("embedding_", "spectrum_", "output_head", "mixture_", "orthogonality_")
    for node in (cfg["model"], cfg["criterion"]):
        assert not [flag for flag in node if flag.startswith(ours)]
    assert cfg["common"]["user_dir"] is None
    for flag in ("encoder_layers", "decoder_layers", "share_all_embeddings", "activation_fn"):
        assert cfg["model"].get(flag) == original["cfg"]["model"].get(flag)
    criterion = {"_name": "cross_entropy", "sentence_avg": False}
    if kind == "three ways":
        criterion = {**criterion, "_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1}
        criterion.update(report_accuracy=False, ignore_prefix_size=0)
    assert cfg["criterion"] == criterion
    assert "last_optimizer_state" not in plain


@pytest.mark.parametrize(
    "is_lm, kind",
    [(False, kind) for kind in VARIANTS] + [(True, kind) for kind in LANGUAGE_MODEL_VARIANTS],
)
def test_other_models(is_lm, kind, train):
    trained = load_checkpoint(last(train, "language model" if is_lm else "three ways"))
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


@pytest.mark.skipif(
    not hasattr(torch.serialization, "add_safe_globals"), reason="weights_only is young"
)
def test_no_unsafe_globals(train, export, safely_loaded):
    paths = [export(last(train, kind), f"{kind}.pt") for kind in ("three ways", "language model")]
    assert safely_loaded(*paths) == ["transformer", "transformer_lm"]


@pytest.fixture
def with_and_without(run_cli, run_without_plugin, tmp_path):
    """What a program makes of a checkpoint with the plugin, and of the exported one without it."""

    def run(program, data, checkpoint, exported, *options):
        # Some versions of fairseq drop the last batch unless its size is a multiple of 8.
        options = (data, *options, "--required-batch-size-multiple", "1", "--path")
        ours = run_cli(program, *options, checkpoint, "--user-dir", PACKAGE, cwd=tmp_path)
        return ours, run_without_plugin(program, *options, exported, cwd=tmp_path)

    return run


def hypotheses(output):
    """Sentence number -> its best hypothesis and the score."""
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return {int(number): (text, float(score)) for number, score, text in found}


@pytest.mark.parametrize("kind", ["three ways", "two ways"])
def test_generate_without_the_plugin(kind, train, export, tiny_translation_data, with_and_without):
    path = last(train, kind)
    flags = ("--beam", "3", "--max-len-b", "12")
    both = with_and_without("fairseq-generate", tiny_translation_data, path, export(path), *flags)
    expected, found = (hypotheses(done.stdout) for done in both)
    assert set(expected) == set(found) == set(range(7))
    for number, (text, score) in expected.items():
        assert found[number] == (text, pytest.approx(score, abs=2e-3))


def test_eval_lm_without_the_plugin(train, export, tiny_lm_data, with_and_without):
    path = last(train, "language model")
    flags = ("--gen-subset", "test", "--tokens-per-sample", "16")
    both = with_and_without("fairseq-eval-lm", tiny_lm_data, path, export(path), *flags)
    loss = re.compile(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)")
    expected, found = (loss.search(done.stderr + done.stdout).groups() for done in both)
    assert float(found[0]) == pytest.approx(float(expected[0]), abs=2e-4)


@pytest.mark.parametrize("option", ["--finetune-from-model", "--restore-file"])
def test_training_goes_on_without_the_plugin(
    option, train, export, tiny_translation_data, run_without_plugin, tmp_path
):
    out = export(last(train, "three ways"))
    done = run_without_plugin(
        *("fairseq-train", tiny_translation_data, "--arch", "transformer"),
        *("--share-all-embeddings", *TINY_TRANSLATION, option, out),
        *("--save-dir", tmp_path / "more"),
        *"--optimizer adam --lr 1e-9 --max-tokens 96 --max-epoch 1 --num-workers 0".split(),
        *"--data-buffer-size 0 --required-batch-size-multiple 1".split(),
        cwd=tmp_path,
    )
    assert "NaN" not in done.stderr
    before, after = load_checkpoint(out), load_checkpoint(tmp_path / "more" / "checkpoint_last.pt")
    assert after["optimizer_history"][-1]["num_updates"] > 1
    for key, tensor in before["model"].items():
        torch.testing.assert_close(after["model"][key], tensor, rtol=0, atol=1e-6)


def test_an_unequal_model_is_not_written(train, command, tmp_path, monkeypatch):
    def wrong(model):
        tables = dict(collapse_tables(model))
        return {**tables, **{name: tables[name] * 1.001 for name in NAMES.values()}}

    monkeypatch.setattr(export_plain, "collapse_tables", wrong)
    error = command("export", last(train, "three ways"), tmp_path / "plain.pt", rc=2)
    assert "logits" in error and list(tmp_path.iterdir()) == []


def test_not_a_number_is_not_equal():
    assert not LogitCheck(math.nan, 1.0).equal
    assert not LogitCheck(0.1, math.nan).equal
    assert LogitCheck(9e-5, 1.0).equal and not LogitCheck(2e-4, 1.0).equal


@pytest.mark.parametrize("arch, criterion, flag, program", [
    ("transformer", "cross_entropy", "--share-all-embeddings", "fairseq-generate"),
    ("transformer_lm", "cross_entropy", TIED, "fairseq-eval-lm"),
])  # fmt: skip
def test_a_plain_checkpoint_is_saved_anew_for_fairseq_alone(
    arch,
    criterion,
    flag,
    program,
    train,
    export,
    request,
    run_without_plugin,
    safely_loaded,
    tmp_path,
):
    """fairseq saves objects that torch >= 2.6 refuses to load, unless it is told to trust them."""
    path = train(arch, criterion, flag) / "checkpoint_last.pt"
    out = export(path)
    before, after = (load_checkpoint(one)["model"] for one in (path, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    data = "tiny_lm_data" if is_language_model(arch) else "tiny_translation_data"
    all_sentences = ("--required-batch-size-multiple", "1")
    data = request.getfixturevalue(data)
    run_without_plugin(program, data, "--path", out, *all_sentences, cwd=tmp_path)
    assert safely_loaded(out, export(out, "again.pt")) == [arch, arch]


@pytest.mark.parametrize("arch, flag", [("transformer", SHARED[0]), ("transformer_lm", TIED)])
def test_a_checkpoint_of_a_fairseq_that_saved_flags_alone(
    arch, flag, train, export, safely_loaded, command, tmp_path
):
    """Before 0.10 there was no configuration."""
    state = load_checkpoint(train(arch, "cross_entropy", flag) / "checkpoint_last.pt")
    nodes = [dict(by_name(state["cfg"][name])) for name in ("task", "model")]
    flags = {**nodes[0], **nodes[1], "task": nodes[0]["_name"], "arch": arch, "min_lr": 0.0}
    old = {**state, "cfg": None, "args": Namespace(**flags)}
    torch.save(old, tmp_path / "old.pt")
    out = export(tmp_path / "old.pt")
    assert safely_loaded(out) == [arch]
    exported = load_checkpoint(out)
    assert exported["cfg"]["model"]["decoder_layers"] == nodes[1]["decoder_layers"]
    old["args"].task = "no_such_task"
    torch.save(old, tmp_path / "old.pt")
    error = command("export", tmp_path / "old.pt", tmp_path / "none.pt", rc=2)
    assert "flags of which fairseq can make a configuration" in error


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
    unknown = {**checkpoint["cfg"]["model"], "_name": "no_such_arch"}
    for changed, match in (
        ({**checkpoint, "cfg": None}, "cfg.model"),
        (with_settings(checkpoint, model=unknown), "no_such_arch"),
        (with_settings(checkpoint, task=None), "cfg.task"),
    ):
        with pytest.raises(CheckpointError, match=match):
            export_plain.export_checkpoint(changed)


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


def test_a_namespace_elsewhere_becomes_safe(checkpoint, safely_loaded, tmp_path):
    task = dict(checkpoint["cfg"]["task"])
    legacy = Namespace(**{**task, "task": task.pop("_name")})
    plain, _ = export_plain.export_checkpoint(with_settings(checkpoint, task=legacy))
    assert plain["cfg"]["task"]["task"] == plain["cfg"]["model"]["task"] == "translation"
    torch.save(plain, tmp_path / "plain.pt")
    if hasattr(torch.serialization, "add_safe_globals"):
        assert safely_loaded(tmp_path / "plain.pt") == ["transformer"]


def test_model_overrides_reach_the_exported_flags(train, export):
    """They had no effect."""
    out = export(last(train, "three ways"))
    for scaled in (True, False):
        overrides = {"no_scale_embedding": not scaled}
        (model,), _, _ = load_model_ensemble_and_task([str(out)], arg_overrides=overrides)
        assert (model.encoder.embed_scale != 1) == scaled


def test_embedding_files_are_not_asked_for_again(checkpoint):
    model = {**checkpoint["cfg"]["model"], "encoder_embed_path": "/no/such/file"}
    plain, _ = export_plain.export_checkpoint(with_settings(checkpoint, model=model))
    assert plain["cfg"]["model"]["encoder_embed_path"] is None


def test_what_is_printed_is_text_or_json(train, command, tmp_path):
    source = last(train, "language model")
    printed = command("export", source, tmp_path / "a.pt")
    assert "a plain transformer_lm checkpoint" in printed
    found = json.loads(command("export", source, tmp_path / "b.pt", "--format", "json"))
    assert found["arch"] == "transformer_lm" and found["output"] == str(tmp_path / "b.pt")
