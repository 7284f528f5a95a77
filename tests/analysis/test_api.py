"""Analysis from Python, which the command line uses too."""

import io
import json
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from spectral_fairseq.analysis import analyze
from spectral_fairseq.commands.main import main
from spectral_fairseq.embeddings import (
    SpectralNormEmbedding,
    SVDEmbedding,
    WeightNormEmbedding,
)
from spectral_fairseq.errors import CheckpointError, ConfigurationError, DataError
from spectral_fairseq.training import factor_, weight_norm_
from tests.checkpoints.made import cone, entries, save, save_dictionary, with_padding

ROWS = cone()


class LanguageModel(nn.Module):
    """Tied, as PyTorch's own example of a language model."""

    def __init__(self, tied=True):
        super().__init__()
        self.encoder = nn.Embedding(60, 6)
        self.rnn = nn.LSTM(6, 6)
        self.decoder = nn.Linear(6, 60)
        with torch.no_grad():
            self.encoder.weight.copy_(ROWS)
            self.decoder.weight.copy_(ROWS if tied else ROWS + 1)
        if tied:
            self.decoder.weight = self.encoder.weight


def measures(*models, **options):
    return [one["measures"] for one in analyze(*models, **options).to_dict()["checkpoints"]]


def test_a_path_gives_what_the_command_prints(tmp_path, capsys):
    save_dictionary(tmp_path / "dict.txt", 57)
    path = save(tmp_path / "a.pt", entries(with_padding(ROWS)))
    report = analyze(path, dictionary=tmp_path, words=("w3",), seed=2)
    flags = ["--dict", str(tmp_path), "--words", "w3", "--seed", "2"]
    assert main(["analyze", str(path), *flags, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == report.to_dict()
    assert main(["analyze", str(path), *flags]) == 0
    assert capsys.readouterr().out == f"{report}\n"


@pytest.mark.slow
def test_models_in_memory_give_the_numbers_of_their_files(tmp_path):
    np.save(tmp_path / "a.npy", ROWS.numpy())
    model = LanguageModel()
    forms = [ROWS, ROWS.numpy(), model, model.state_dict(), {"wte.weight": ROWS}, model.encoder]
    expected, *found = (measures(form)[0] for form in [tmp_path / "a.npy", *forms])
    assert all(one == expected for one in found)
    report = analyze(model, LanguageModel(tied=False), labels=("tied", "untied"))
    tied, untied = report.to_dict()["checkpoints"]
    assert tied["table"]["names"] == ["encoder", "decoder"] and tied["path"] is None
    assert untied["table"]["name"] == "decoder" and untied["label"] == "untied"
    assert tied["sha256"] != untied["sha256"]
    assert model.encoder.weight.requires_grad


def test_measuring_in_a_training_changes_nothing():
    model = LanguageModel()
    state, before = torch.get_rng_state(), model.encoder.weight.clone()
    analyze(model)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert torch.equal(model.encoder.weight, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_measured_as_they_are(dtype):
    narrow = torch.randn(300, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, exact = (analyze(table).scalars() for table in (narrow, narrow.double()))
    assert found == pytest.approx(exact, rel=1e-4, abs=1e-5)


def test_padding_of_a_module_does_not_count():
    table = nn.Embedding(61, 6, padding_idx=1)
    with torch.no_grad():
        table.weight.copy_(with_padding(ROWS))
    assert measures(table) == measures(ROWS)


def test_a_table_is_named(tmp_path):
    model = LanguageModel(tied=False)
    (named,), (alone,) = measures(model, table="encoder"), measures(ROWS)
    assert named == alone
    assert measures(model, table="rnn.weight_ih_l0") != measures(ROWS)
    with pytest.raises(CheckpointError, match=r"encoder, plain, 60 x 6.*rnn.weight_ih_l0 \(24 x 6"):
        analyze(model, table="nothing")


def test_counts_and_words(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({f"w{row}": row for row in range(60)}))
    counts = {f"w{row}": 1000 // (row + 1) for row in range(60)}
    options = {"dictionary": tmp_path / "vocab.json", "words": "w3"}
    by_word = analyze(ROWS, counts=counts, **options).to_dict()["checkpoints"][0]
    by_row = analyze(ROWS, counts=list(counts.values()), **options).to_dict()["checkpoints"][0]
    assert by_word["measures"] == by_row["measures"]
    of_numpy = {word: np.int64(count) for word, count in counts.items()}
    of_numpy = analyze(ROWS, counts=of_numpy, **options).to_dict()["checkpoints"][0]
    assert of_numpy["measures"] == by_row["measures"]
    assert by_word["measures"]["norm_count_pearson"] is not None
    assert by_word["frequency_order"] == "counts" and list(by_word["neighbours"]) == ["w3"]
    file = tmp_path / "counts.txt"
    file.write_text("".join(f"{word} {count}\n" for word, count in counts.items()))
    with_file = analyze(ROWS, counts=file, **options).to_dict()["checkpoints"][0]
    assert with_file["measures"] == by_row["measures"]
    assert with_file["dictionary"]["counts"]["path"] == str(file)
    with pytest.raises(ConfigurationError, match="expected `dictionary` together with `words`"):
        analyze(ROWS, words="w3")  # arguments, where the command has flags
    others = analyze(ROWS, counts=[7] * 60, **options).to_dict()["checkpoints"][0]
    signatures = {one["signature"] for one in (by_word, by_row, with_file, others)}
    assert len(signatures) == 4 and all("|counts:" in one for one in signatures)


def test_scalars_are_numbers_for_loggers():
    found = analyze(ROWS).scalars()
    assert found["mean_cosine"] > 0.5 and "norm_count_slope" not in found
    assert all(isinstance(value, float) for value in found.values())
    with pytest.raises(ConfigurationError, match="1 model in the report"):
        analyze(ROWS, ROWS + 1).scalars()


def test_a_frame_has_a_row_for_each_model():
    pandas = pytest.importorskip("pandas")
    frame = analyze(ROWS, ROWS.double() * 2, labels=("one", "two")).to_frame()
    assert isinstance(frame, pandas.DataFrame) and list(frame.index) == ["one", "two"]
    assert frame.loc["two", "sigma_max"] == pytest.approx(2 * frame.loc["one", "sigma_max"])
    assert all(dtype.kind == "f" for dtype in frame.dtypes)


def test_figures_leave_pyplot_alone(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import get_backend, pyplot
    from matplotlib.figure import Figure

    before, report = (get_backend(), pyplot.get_fignums()), analyze(ROWS)
    figures = report.figures()
    assert {"singular_values", "cosines", "projection"} <= set(figures)
    assert all(isinstance(figure, Figure) for figure in figures.values())
    assert (get_backend(), pyplot.get_fignums()) == before
    figures["cosines"].savefig(tmp_path / "cosines.png")
    assert (tmp_path / "cosines.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_report_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    report = analyze(ROWS)
    page = report.write(tmp_path / "out")
    assert "in memory" in page.read_text("utf-8") and page.name == "report.html"
    assert json.loads((tmp_path / "out" / "analysis.json").read_text("utf-8")) == report.to_dict()
    with pytest.raises(ConfigurationError, match="--overwrite"):
        report.write(tmp_path / "out")


@pytest.mark.parametrize("kind", [WeightNormEmbedding, SVDEmbedding, SpectralNormEmbedding])
def test_a_table_of_factors_is_measured_as_its_matrix(kind, tmp_path):
    """Alone or on a layer, what it stores was measured: lengths .23 in the place of 1.86."""
    table = kind.from_dense(ROWS, padding_idx=1)
    with torch.no_grad():
        for one in table.parameters():
            one.mul_(1 + torch.rand(one.shape, generator=torch.Generator().manual_seed(2)))
    kept = torch.arange(60) != 1
    with torch.no_grad():
        dense = table.eval().weight
    (expected,), (whole,) = measures(dense[kept]), measures(dense)
    torch.save(table.state_dict(), tmp_path / "table.pt")
    for model, of_matrix in ((table, expected), (table.state_dict(), whole)):
        for name, value in measures(model)[0].items():
            if value is not None and name in of_matrix and of_matrix[name] is not None:
                assert value == pytest.approx(of_matrix[name], rel=1e-4, abs=1e-6), name
    assert measures(tmp_path / "table.pt") == measures(table.state_dict())
    head = nn.ModuleDict({"odd": nn.Linear(3, 3), "other": table})
    assert measures(head) == measures(head, table="other") == measures(table)
    with pytest.raises(CheckpointError, match="other .60 x 6., odd.weight"):
        analyze(head.state_dict())


@pytest.mark.parametrize("method", [weight_norm_, factor_])
def test_a_model_with_a_table_is_measured_as_the_plain_one(method):
    """Whatever the names of its layers: a tied output layer was unknown behind a table."""
    for name in ("embed", "shared", "odd"):
        model = nn.ModuleDict({name: nn.Embedding(60, 6, 3), "mid": nn.Linear(6, 6)})
        model["lm_head"] = nn.Linear(6, 60, bias=False)
        model["lm_head"].weight = model[name].weight
        layer = nn.Embedding.from_pretrained(model[name].weight.detach(), freeze=False)
        (expected,) = measures(model)
        (of_layer,) = measures(layer)
        method(model)
        method(layer)
        for one, wanted in ((model, expected), (layer, of_layer)):
            (found,) = measures(one)
            for key in ("i1", "i2", "mean_cosine", "sigma_max", "norm_mean"):
                assert found[key] == pytest.approx(wanted[key], rel=1e-4), (name, key)


@pytest.mark.skipif(not hasattr(torch.device, "__enter__"), reason="torch 2.0 is the first")
def test_the_default_device_is_not_that_of_the_measures():
    with torch.device("meta"):
        report = analyze(ROWS)
    assert report.to_dict()["checkpoints"] == analyze(ROWS).to_dict()["checkpoints"]


@pytest.mark.parametrize(
    "model, options, error, message",
    [
        (3, {}, ConfigurationError, "found an object of type int"),
        ({"a": 3}, {}, ConfigurationError, "a path, a tensor"),
        (torch.ones(3, 4, 5), {}, CheckpointError, r"shape \(N, d\).*\(3, 4, 5\)"),
        (torch.ones(5, 9), {}, DataError, "N = 5 words"),
        (torch.ones(9, 5, dtype=torch.int8), {}, DataError, "floating-point.*int8"),
        (torch.full((9, 5), float("nan")), {}, DataError, "NaN in 9 of 9 rows"),
        (nn.ReLU(), {}, CheckpointError, "in the module ReLU; found none"),
        (torch.ones(9, 5, device="meta"), {}, ConfigurationError, "device meta"),
        (np.ones((9, 5), dtype=">f4"), {}, DataError, "byte order"),
        (np.ma.masked_less(np.eye(9, 5), 1), {}, DataError, "found a masked array"),
        (nn.Linear(3, 4), {"seed": -1}, ConfigurationError, "seed"),
        (ROWS, {"colour": 1}, TypeError, "colour"),
        (ROWS, {"projection": "umap"}, ConfigurationError, "`projection` to be one of svd, pca"),
        (ROWS, {"labels": ("a", "b")}, ConfigurationError, "1 different names"),
    ],
)
def test_what_cannot_be_analysed(model, options, error, message):
    with pytest.raises(error, match=message):
        analyze(model, **options)


def test_arrays_that_torch_cannot_share_are_measured():
    """``table[::-1]`` was refused as numbers of a type that torch does not have."""
    rows = ROWS.numpy()
    expected, found = measures(rows[::-1].copy()), measures(rows[::-1])
    assert found == expected


def test_nothing_to_analyse():
    with pytest.raises(ConfigurationError, match="at least one model to analyse"):
        analyze()


def test_an_archive_behind_a_table_that_would_become_huge_is_refused(tmp_path):
    path, packed = tmp_path / "table.npy", io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(1 << 24))
    np.save(path, np.random.default_rng(0).normal(size=(60, 4)).astype("f4"))
    path.write_bytes(path.read_bytes() + packed.getvalue())
    with pytest.raises(CheckpointError, match="entries that fit"):
        analyze(path)


@pytest.mark.parametrize(
    "settings, output",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, True),
        ({"tie_word_embeddings": True}, True),
        ({"architectures": ["GPT2Model"]}, False),
        ({"architectures": ["LlamaForCausalLM"]}, False),  # whose own default is not to share it
    ],
)
def test_a_tied_output_layer_is_known_from_the_settings(settings, output, tmp_path):
    """A tied GPT-2 was called a model without an output layer, and given advice for an input."""
    torch.manual_seed(1)
    table = torch.randn(200, 8) + 1
    torch.save({"transformer.wte.weight": table}, tmp_path / "pytorch_model.bin")
    settings = {"model_type": "gpt2", "vocab_size": 200, **settings}
    (tmp_path / "config.json").write_text(json.dumps(settings), "utf-8")
    found = analyze(tmp_path)
    (one,) = found.to_dict()["checkpoints"]
    assert one["table"]["is_output"] is output
    assert ("changes no probability of an output layer" in " ".join(str(found).split())) is output
    assert ("output layer shares it" in one["table"]["choice"]) is output
