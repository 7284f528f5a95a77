"""Plain objects of fairseq in checkpoints: read, kept by name, and never run."""

import argparse
import pickle

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint, torch_load
from spectral_fairseq.checkpoints.stand_ins import STAND_INS, pickle_by_name, restored
from spectral_fairseq.commands.main import main
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.formats.opening import open_model

DICTIONARY = "fairseq.data.dictionary.Dictionary"


def stand_in(name=DICTIONARY, **attributes):
    made = STAND_INS[name]()
    made.__dict__.update(attributes)
    return made


def words(**more):
    return stand_in(symbols=["<s>", "a"], count=[1, 5], indices={"<s>": 0, "a": 1}, **more)


def checkpoint(path, *objects, scale=1.0):
    model = {"decoder.embed_tokens.weight": torch.arange(120.0).reshape(30, 4).cos() * scale}
    state = {
        "args": argparse.Namespace(arch="transformer_lm", task="language_modeling"),
        "model": model,
        "optimizer_history": [{"num_updates": 7}],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "task_state": {"dictionaries": list(objects)},
    }
    torch.save(state, path, pickle_module=pickle_by_name())
    return path


def test_the_file_names_the_class_of_fairseq(tmp_path):
    file = checkpoint(tmp_path / "c.pt", words())
    assert b"cfairseq.data.dictionary\nDictionary\n" in file.read_bytes()


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_analysed_and_averaged_with_its_state(name, tmp_path):
    one, other = (
        checkpoint(tmp_path / f"{scale}.pt", stand_in(name, val=3), scale=scale) for scale in (1, 3)
    )
    assert open_model(one).updates == 7
    assert main(["average", str(one), str(other), "--output", str(tmp_path / "mean.pt")]) == 0
    mean = load_checkpoint(tmp_path / "mean.pt")
    kept = mean["task_state"]["dictionaries"][0]
    assert (kept.stands_for, vars(kept)) == (name, {"val": 3})
    table = mean["model"]["decoder.embed_tokens.weight"]
    torch.testing.assert_close(table, torch.arange(120.0).reshape(30, 4).cos() * 2)


def test_fairseq_gets_its_own_object(tmp_path):
    dictionary = pytest.importorskip("fairseq.data.dictionary").Dictionary
    whole = dictionary()
    whole.add_symbol("word", 9)
    saved = {"kept": ([whole], {"same": whole})}
    saved["itself"] = saved
    torch.save(saved, tmp_path / "c.pt")
    state = restored(torch_load(tmp_path / "c.pt"), "c.pt")
    found = state["itself"]["kept"][0][0]
    assert type(found) is dictionary and vars(found) == vars(whole)
    assert found.index("word") == 4


@pytest.mark.parametrize("attributes", [
    {"add_symbol": 3},  # hides a method
    {"__len__": 3},
    {"symbols": argparse.Namespace()},
    {"symbols": [dict]},
    {"count": {"a": [complex]}},
])  # fmt: skip
def test_attributes_that_are_no_data_are_refused_for_fairseq(attributes):
    pytest.importorskip("fairseq")
    with pytest.raises(CheckpointError, match="numbers, texts, lists and dictionaries in the"):
        restored([stand_in(**attributes)], "c.pt")


class Called:
    """Pickled as a call of the class with an argument."""

    def __reduce__(self):
        return STAND_INS[DICTIONARY], ("anything",)


class Built:
    """Pickled as an object with a state that is no dictionary of attributes."""

    def __reduce__(self):
        return STAND_INS[DICTIONARY], (), ["state"]


class Subclass(STAND_INS[DICTIONARY]):
    stands_for = "fairseq.data.dictionary.TruncatedDictionary"


@pytest.mark.parametrize("value, match", [
    (Called(), "arguments of its constructor"),
    (Built(), "another state than attributes"),
    (Subclass(), "the object fairseq.data.dictionary.TruncatedDictionary"),
])  # fmt: skip
def test_anything_but_attributes_of_the_listed_classes_is_refused(value, match, tmp_path):
    file = checkpoint(tmp_path / "c.pt", value)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(file)


def test_others_may_allow_the_class_itself(tmp_path):
    """A program that reads with torch.load is not given stand-ins."""
    if not hasattr(torch.serialization, "safe_globals"):
        pytest.skip("this torch has no list of allowed classes")
    file = checkpoint(tmp_path / "c.pt", words())
    load_checkpoint(file)
    with pytest.raises(pickle.UnpicklingError, match="dictionary.Dictionary"):
        torch.load(file, weights_only=True)
