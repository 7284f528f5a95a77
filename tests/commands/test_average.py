"""Averaged checkpoints: the mean of the tables, in an architecture that trains and generates."""

import argparse
import weakref

import pytest
import torch

from spectral_fairseq.checkpoints.averages import average_checkpoints
from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.commands.average import add_arguments, chosen_checkpoints
from spectral_fairseq.embeddings import TABLES as KINDS
from spectral_fairseq.embeddings.entries import dense_form, entries_by_module, kind_of
from spectral_fairseq.embeddings.svd import SVDEmbedding
from tests.checkpoints.made import NAME, entries
from tests.conftest import PACKAGE, train_command

SHARED = ("--share-all-embeddings", "--label-smoothing", "0.1")
MORE = (*SHARED, "--max-epoch", "3", "--max-update", "30")
TABLES = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection.table")


def table(model, module="encoder.embed_tokens"):
    """W by its definition, float64."""
    u, sigma, v = (model[f"{module}.{name}"].double() for name in ("U", "sigma", "V"))
    return u @ torch.diag(sigma) @ (v / SVDEmbedding(u.size(0), u.size(1), 1).v_scale).t()


@pytest.fixture
def folder(train):
    return train("transformer_sc", "spectrum_control", *MORE)


@pytest.fixture
def average(command, tmp_path):
    """Average into average.pt: the checkpoint, or on a failure the error."""

    def run(*arguments, rc=0):
        out = tmp_path / "average.pt"
        said = command("average", *arguments, "--output", out, rc=rc)
        assert out.exists() == (rc == 0)
        return said if rc else load_checkpoint(out)

    return run


def test_tables_are_averaged_not_factors(folder, average):
    paths = [folder / f"checkpoint{epoch}.pt" for epoch in (1, 2, 3)]
    found = average(*paths)["model"]
    models = [load_checkpoint(path)["model"] for path in paths]
    mean = sum(table(model) for model in models) / 3
    torch.testing.assert_close(table(found), mean, rtol=1e-5, atol=1e-6)

    naive = {
        f"t.{name}": sum(model[f"encoder.embed_tokens.{name}"] for model in models) / 3
        for name in ("U", "sigma", "V")
    }
    assert (table(naive, "t") - mean).abs().max() > 1e-4, "this test could not fail"

    counted = torch.arange(48) != 1
    u = found["encoder.embed_tokens.U"][counted].double()
    u = u / found["encoder.embed_tokens.scale"].double()
    torch.testing.assert_close(u.t() @ u, torch.eye(16).double(), rtol=0, atol=1e-5)


def test_everything_else_is_averaged_plainly(folder, average):
    paths = [folder / "checkpoint1.pt", folder / "checkpoint3.pt"]
    found = average("--inputs", *paths)
    one, other = (load_checkpoint(path) for path in paths)
    assert list(found["model"]) == list(one["model"])
    for key, tensor in found["model"].items():
        if key.endswith("initial_norm") or not key.startswith(TABLES):
            mean = (one["model"][key].double() + other["model"][key].double()) / 2
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)
        assert tensor.dtype == one["model"][key].dtype
    for name in ("U", "sigma", "V", "scale", "initial_norm"):
        assert len({found["model"][f"{module}.{name}"].data_ptr() for module in TABLES}) == 1
    assert found["cfg"] == one["cfg"]
    assert "last_optimizer_state" not in found


def saved(path, model, **settings):
    cfg = {"model": settings} if settings else {}
    torch.save({"args": None, "cfg": cfg, "model": model}, path)
    return path


def test_what_modules_keep_beside_tensors_is_the_first_ones(average, tmp_path):
    """In checkpoints that are nothing but a model."""
    for number in range(2):
        model = {"w": torch.full((2,), float(number)), "_extra_state": {"n": number}}
        torch.save({"model": model, "extra_state": None}, tmp_path / f"{number}.pt")
    found = average(tmp_path / "0.pt", tmp_path / "1.pt")["model"]
    assert found["_extra_state"] == {"n": 0} and found["w"].tolist() == [0.5, 0.5]


# Entry -> its two values and their average.
PLAIN = {
    "a.weight": (torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 4.0]]), [[1.5, 3.5]]),
    # The sum overflows.
    "half": (torch.tensor([2080.0, 1.0]).half(), torch.tensor([65504.0, 2.0]).half(), [33792, 1.5]),
    "steps": (torch.tensor(7), torch.tensor(9), 7),
    "empty": (torch.zeros(0), torch.zeros(0), []),
    "double": (torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 5.0]).double(), [2, 3.5]),
}


def test_plain_tensors_integers_and_half(average, tmp_path):
    for number in range(2):
        model = {name: values[number] for name, values in PLAIN.items()}
        saved(tmp_path / f"{number}.pt", {**model, "b.weight": model["a.weight"]})
    found = average(tmp_path / "0.pt", tmp_path / "1.pt")["model"]
    assert found["a.weight"].data_ptr() == found["b.weight"].data_ptr()
    for name, (first, _, mean) in PLAIN.items():
        assert found[name].dtype == first.dtype and found[name].tolist() == mean, name


def test_the_average_generates_and_trains_on(
    folder, average, tiny_translation_data, run_cli, tmp_path
):
    of_average, out = average(folder, "--last", 3)["model"], tmp_path / "average.pt"
    generate = ("fairseq-generate", tiny_translation_data, "--path", out, "--beam", "2")
    done = run_cli(*generate, "--user-dir", PACKAGE, cwd=tmp_path)
    assert done.stdout.count("\nH-") == 7
    more = (*SHARED, "--finetune-from-model", out, "--lr", "1e-9")
    method = ("transformer_sc", "spectrum_control")
    run_cli(*train_command(tiny_translation_data, tmp_path / "more", *method, *more), cwd=tmp_path)
    trained = load_checkpoint(tmp_path / "more" / "checkpoint_last.pt")["model"]
    torch.testing.assert_close(table(trained), table(of_average), rtol=0, atol=1e-5)


def test_checkpoints_of_different_models(average, tmp_path):
    one = saved(tmp_path / "1.pt", {"a": torch.zeros(2), "b": torch.zeros(3)})
    shape = saved(tmp_path / "2.pt", {"a": torch.zeros(2), "b": torch.zeros(4)})
    names = saved(tmp_path / "3.pt", {"a": torch.zeros(2), "c": torch.zeros(3)})
    error = average(one, shape, rc=2)
    assert "b of shape (3,) and (4,)" in error and "2.pt" in error
    error = average(one, names, rc=2)
    assert "b only in one" in error and "c only in one" in error


@pytest.mark.parametrize("flag, one, other", [
    ("--output-head", "mos", "moc"), ("--output-head", None, "mos"), ("--logit-softcap", 30, None),
])  # fmt: skip
def test_models_that_compute_something_else_of_the_same_tensors(
    flag, one, other, average, tmp_path
):
    name = flag[2:].replace("-", "_")
    paths = [
        saved(tmp_path / f"{i}.pt", {"a": torch.zeros(2)}, **{name: value})
        for i, value in enumerate((one, other, one))
    ]
    assert f"{flag} {other or 'none'}" in average(*paths, rc=2)
    average(paths[0], paths[2])


def test_a_name_that_would_clear_the_terminal(command, tmp_path):
    one = saved(tmp_path / "a\x1b[2J.pt", {"a": torch.zeros(2)})
    said = command("average", one, "--output", tmp_path / "b\x1b[2J.pt")
    assert "\x1b" not in said and said.count("\\x1b[2J.pt") == 2


def test_a_table_that_diverged(average, tmp_path):
    one = saved(tmp_path / "1.pt", entries(torch.randn(9, 4), "svd"))
    stored = entries(torch.randn(9, 4), "svd")
    stored[f"{NAME}.U"][3, 2] = float("nan")
    other = saved(tmp_path / "2.pt", stored)
    for paths in ((one, other), (other, one)):
        error = average(*paths, rc=2)
        assert "infinity or NaN" in error and "2.pt" in error


def choose(inputs, epochs=None, updates=None, bound=None):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([*map(str, inputs), "--output", "a.pt"])
    args.num_epoch_checkpoints, args.num_update_checkpoints = epochs, updates
    args.checkpoint_upper_bound = bound
    return chosen_checkpoints(args)


@pytest.fixture
def save_dir(tmp_path):
    for name in (
        *("checkpoint1.pt", "checkpoint2.pt", "checkpoint9.pt", "checkpoint10.pt"),
        *("checkpoint_1_50.pt", "checkpoint_2_100.pt", "checkpoint_2_1000.pt"),
        *("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint11.pt.tmp"),
    ):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"epochs": 2}, ["checkpoint10.pt", "checkpoint9.pt"]),
        ({"epochs": 2, "bound": 9}, ["checkpoint9.pt", "checkpoint2.pt"]),
        ({"epochs": 4}, ["checkpoint10.pt", "checkpoint9.pt", "checkpoint2.pt", "checkpoint1.pt"]),
        ({"updates": 2}, ["checkpoint_2_1000.pt", "checkpoint_2_100.pt"]),
        ({"updates": 2, "bound": 100}, ["checkpoint_2_100.pt", "checkpoint_1_50.pt"]),
    ],
)
def test_choice_from_a_folder(save_dir, options, expected):
    assert [path.name for path in choose([save_dir], **options)] == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"epochs": 5}, "5 epoch checkpoints"),
        ({"updates": 2, "bound": 99}, "at least two update checkpoints"),
        ({"epochs": 0}, ">= 1"),
        ({"bound": 3}, "--checkpoint-upper-bound"),
        ({}, "a folder"),
    ],
)
def test_choices_that_cannot_be_met(save_dir, options, message):
    with pytest.raises(ValueError, match=message):
        choose([save_dir], **options)


def test_choice_of_files(save_dir):
    files = [save_dir / "checkpoint1.pt", save_dir / "checkpoint_best.pt"]
    assert choose(files) == files
    with pytest.raises(ValueError, match="checkpoint files to average; found none"):
        choose([])
    with pytest.raises(ValueError, match="one existing folder"):
        choose(files, epochs=2)
    with pytest.raises(ValueError, match="one existing folder"):
        choose([save_dir / "none"], epochs=2)


@pytest.mark.parametrize("kind", [table.kind for table in KINDS])
def test_tables_of_every_kind_are_averaged_not_factors(kind, average, tmp_path):
    dense = [torch.randn(9, 4).index_fill_(0, torch.tensor([1]), 0) for _ in range(2)]
    paths = [saved(tmp_path / f"{n}.pt", entries(one, kind)) for n, one in enumerate(dense)]
    stored = entries_by_module(average(*paths)["model"])[NAME]
    found = dense_form(kind_of(stored), stored)
    torch.testing.assert_close(found, sum(dense).double() / 2, rtol=1e-5, atol=1e-6)


def test_tables_that_only_the_first_checkpoint_shares_are_refused(average, tmp_path):
    names, shared = ("decoder.embed_tokens.weight", "decoder.fc_out.weight"), torch.ones(5, 3)
    tied = saved(tmp_path / "tied.pt", dict.fromkeys(names, shared))
    untied = saved(tmp_path / "untied.pt", dict(zip(names, (shared, torch.zeros(5, 3)))))
    assert "shares them" in average(tied, untied, rc=2)


@pytest.mark.parametrize("name", ["checkpoint_last-rank-{}.pt", "checkpoint1-model_part-{}.pt"])
def test_parts_of_one_checkpoint_are_no_checkpoints_to_average(name, average, tmp_path):
    """The experts of different workers were averaged with each other."""
    names = name.format(0), name.format(1), name.format(0).replace("checkpoint", "checkpoint9")
    paths = [saved(tmp_path / one, {"expert.weight": torch.ones(3)}) for one in names]
    assert "another process saved" in average(*paths[:2], rc=2)
    average(paths[0], paths[2])


def test_sums_take_no_memory_besides(tmp_path, monkeypatch):
    """Each step took new memory for all tensors, eight times the model at the peak."""
    for number in range(3):
        tensors = {name: torch.full((2,), float(number)) for name in "abc"}
        saved(tmp_path / f"{number}.pt", tensors)
    convert, made, alive = torch.Tensor.to, [], []

    def recorded(*given, **named):
        made.append(weakref.ref(tensor := convert(*given, **named)))
        alive.append(sum(one() is not None and one().dtype == torch.float64 for one in made))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    average_checkpoints([tmp_path / f"{number}.pt" for number in range(3)], verify=False)
    assert max(alive) <= 4, "three sums, and what is added to one of them"
