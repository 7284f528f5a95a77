"""The JSON document: its signatures, what stands in a checkpoint beside the table."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from spectral_fairseq.analysis import results
from spectral_fairseq.analysis.measures import measure_table
from spectral_fairseq.analysis.options import Options
from spectral_fairseq.analysis.results import analyse_model, document, labels_for, recorded_prior
from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import CheckpointError, ConfigurationError
from spectral_fairseq.functional.spectrum_penalty import PRIORS, Prior
from spectral_fairseq.provenance import finite, sha256
from tests.checkpoints.made import cone, entries, extracted, save, save_dictionary, with_padding

SC = {
    "_name": "transformer_sc",
    "spectrum_prior": "polynomial",
    "spectrum_c1": "auto",
    "spectrum_c2": 0.0005,
    "spectrum_gamma": None,
}


@pytest.fixture
def svd_checkpoint(tmp_path):
    save_dictionary(tmp_path / "dict.txt", 57)
    return save(
        tmp_path / "checkpoint_best.pt",
        entries(with_padding(cone()), "svd"),
        updates=1200,
        model=SC,
        task={"data": str(tmp_path)},
    )


@pytest.mark.slow
def test_the_document_is_json(svd_checkpoint, tmp_path):
    other = save(tmp_path / "plain.pt", entries(with_padding(cone())))
    options = Options(words=("w3",), isotropy_words=20, isotropy_runs=2)
    analysed = [analyse_model(svd_checkpoint, options)]
    analysed.append(analyse_model(other, options, dictionary=tmp_path, label="other"))
    found = document("analyze", analysed, options)
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again == found
    one = found["checkpoints"][0]
    assert one["arch"] == "transformer_sc" and one["progress"] == {"epoch": 2, "updates": 1200}
    assert one["dictionary"]["remark"] == "found in the folder of the training data"
    assert one["sha256"] == sha256(svd_checkpoint) and one["label"] == "checkpoint_best"
    assert len(one["prior"]) == 6 and found["checkpoints"][1]["prior"] is None


def test_signatures_name_what_decides_the_numbers(svd_checkpoint, tmp_path):
    options = Options(seed=3, isotropy_words=20, isotropy_runs=2)
    line = analyse_model(svd_checkpoint, options).result["signature"]
    parts = dict(part.split(":", 1) for part in line.split("|"))
    assert parts["seed"] == "3" and parts["isotropy"] == "20x2" and parts["words"] == "60of61"
    assert parts["ckpt"] == sha256(svd_checkpoint)[:12]
    assert parts["dict"] == sha256(tmp_path / "dict.txt")[:12]
    assert parts["torch"] == torch.__version__ and parts["kind"] == "svd"
    assert "isotropy:all" in analyse_model(svd_checkpoint, Options()).result["signature"]


def test_the_prior_is_that_of_the_training(svd_checkpoint):
    model = entries(with_padding(cone()), "svd")
    table = extracted(model)
    for kind in PRIORS:
        flags = {**SC, "spectrum_prior": kind}
        prior = recorded_prior(flags, table)
        assert prior == SVDEmbedding(61, 6, 1, prior=kind).prior_settings == Prior(kind)
    flags = {**SC, "spectrum_c1": "7.5", "spectrum_gamma": 0.3}
    assert recorded_prior(flags, table).c1 == 7.5
    assert recorded_prior(flags, table).gamma == 0.3
    assert recorded_prior({}, table) is None
    older = {name: value for name, value in SC.items() if name != "spectrum_c2"}
    assert recorded_prior(older, table).c2 == Prior.c2
    table.kind = "plain"
    assert recorded_prior(SC, table) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"spectrum_prior": "flat", "spectrum_gamma": None},
        {"spectrum_c1": "many"},
        {"spectrum_gamma": [1]},
    ],
)
def test_a_prior_that_cannot_be(changed):
    table = extracted(entries(with_padding(cone()), "svd"))
    with pytest.raises(CheckpointError, match="prior in the checkpoint's settings"):
        recorded_prior({**SC, **changed}, table)


@pytest.mark.parametrize("name", ["checkpoint_best.pt", "dict.txt", "counts.txt", None])
@pytest.mark.parametrize("rename", [True, False])
def test_a_file_that_is_replaced_meanwhile(name, rename, svd_checkpoint, tmp_path, monkeypatch):
    """The report carried the hash of the file that had taken its place."""
    save_dictionary(tmp_path / "counts.txt", 57)

    def replace_and_measure(*given, **named):
        if name is not None:
            file = tmp_path / name
            os.utime(shutil.copy(file, tmp_path / "new"), ns=(0, 0))
            if rename:
                os.replace(tmp_path / "new", file)
            else:
                os.utime(file, ns=(0, 0))
        return measure_table(*given, **named)

    monkeypatch.setattr(results, "measure_table", replace_and_measure)
    given = {"counts": tmp_path / "counts.txt"}
    if name is None:
        assert analyse_model(svd_checkpoint, Options(), **given).result["sha256"]
        return
    with pytest.raises(CheckpointError, match=f"{name}.*replaced.*numbered checkpoint"):
        analyse_model(svd_checkpoint, Options(), **given)


def test_a_vocabulary_that_is_replaced_meanwhile(tmp_path, monkeypatch):
    words = [f"w{row}" for row in range(30)]
    (tmp_path / "vocab.json").write_text(json.dumps(words), "utf-8")
    torch.save({"lm_head.weight": torch.randn(32, 4)}, tmp_path / "pytorch_model.bin")

    def replace_and_measure(*given, **named):
        (tmp_path / "vocab.json").write_text(json.dumps(words[::-1] + ["more"]), "utf-8")
        return measure_table(*given, **named)

    monkeypatch.setattr(results, "measure_table", replace_and_measure)
    with pytest.raises(CheckpointError, match="vocab.json.*replaced"):
        analyse_model(tmp_path, Options())


def test_what_has_no_end_is_not_hashed(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    for endless in (tmp_path / "pipe.pt", "/dev/zero"):
        with pytest.raises(CheckpointError, match="a device or a pipe"):
            analyse_model(endless, Options())


def test_labels():
    paths = [Path("runs/a/checkpoint_best.pt"), Path("runs/b/checkpoint_best.pt")]
    assert labels_for(paths) == ["a/checkpoint_best", "b/checkpoint_best"]
    assert labels_for(paths[:1]) == ["checkpoint_best"]
    assert len(set(labels_for([paths[0], paths[0]]))) == 2
    twice = [Path("/runs/checkpoint_best.pt")] * 2
    assert labels_for(twice) == ["/runs/checkpoint_best (1)", "/runs/checkpoint_best (2)"]
    assert labels_for(paths, ["x", "y"]) == ["x", "y"]
    for wrong in (["x"], ["x", "x"]):
        with pytest.raises(ConfigurationError, match="2 different names"):
            labels_for(paths, wrong)


def test_what_json_has_no_form_for():
    assert finite({"a": [1.0, float("nan")], "b": (float("inf"), "x", None)}) == {
        "a": [1.0, None],
        "b": [None, "x", None],
    }


@pytest.mark.parametrize(
    "criterion, kind, expected",
    [
        ({"_name": "spectrum_control"}, "svd", ["spectrum control"]),
        ({"criterion": "spectrum_control"}, "plain", ["spectrum control"]),  # of an old checkpoint
        ({"_name": "mle_cosreg", "table_centering": 0.01}, "plain", ["spectrum control"]),
        ({"_name": "mle_cosreg", "spectrum_weight": 0.0}, "weight-norm", ["weight norm"]),
        ({"_name": "cross_entropy"}, "svd", []),
    ],
)
def test_what_a_checkpoint_was_trained_with(criterion, kind, expected, tmp_path):
    path = save(tmp_path / "a.pt", entries(with_padding(cone()), kind), criterion=criterion)
    assert analyse_model(path, Options()).result["trained_with"] == expected


@pytest.mark.parametrize(
    "names, expected",
    [
        (["decoder.layers.0.fc1"], True),
        (["encoder.layers.0.fc1", "decoder.layers.0.fc1"], False),
        (["model.layers.0.mlp.up_proj"], True),
        ([], False),  # nothing but a table
    ],
)
def test_a_language_model_is_a_decoder_alone(names, expected):
    model = {f"{name}.weight": torch.randn(8, 6) for name in ["decoder.embed_tokens", *names]}
    model["decoder.embed_tokens.weight"] = cone(60, 6)
    assert analyse_model(model, Options()).result["language_model"] is expected


@pytest.mark.parametrize(
    "arch, expected",
    [
        *(("LlamaForCausalLM", True), ("GPT2LMHeadModel", True), ("BertLMHeadModel", True)),
        *(("DistilBertForMaskedLM", False), ("MarianMTModel", False)),
        *(("T5WithLMHeadModel", False), ("XLMWithLMHeadModel", False)),
    ],
)
def test_the_class_of_a_model_says_whether_it_is_a_language_model(arch, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [arch]}))
    names = ("model.embed_tokens.weight", "model.layers.0.fc.weight", "lm_head.weight")
    model = dict(zip(names, (cone(60, 6), torch.randn(8, 6), cone(60, 6, seed=1))))
    torch.save(model, tmp_path / "pytorch_model.bin")
    assert analyse_model(tmp_path, Options()).result["language_model"] is expected
