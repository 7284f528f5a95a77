"""Language models built from checkpoints or refused; corpora read as one sequence."""

import os
import shutil

import pytest
import torch
from fairseq.data import Dictionary

from spectral_fairseq.commands import models
from spectral_fairseq.commands.models import (
    IndexedCorpus,
    load_language_model,
    load_model_and_task,
    open_corpus,
)
from spectral_fairseq.commands.overrides import check_overrides, parse_overrides
from spectral_fairseq.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    MissingDataError,
    UnsupportedError,
)
from tests.language_models import block_checkpoint, stateful_checkpoint, tokens_of


def test_overrides_reach_the_model(train, tiny_lm_data):
    path = stateful_checkpoint(train)
    model = load_language_model(path, tiny_lm_data, {"weight_drop": 0.25}).model
    assert model.decoder.network.layers[0].weight_drop == 0.25
    with pytest.raises(ConfigurationError, match="'weight_dorp'.*Did you mean.*weight_drop"):
        load_language_model(path, tiny_lm_data, {"weight_dorp": 0.25})
    expected = "^expected --weight-drop to be a finite number >= 0 and < 1"
    with pytest.raises(ConfigurationError, match=expected):
        load_language_model(path, tiny_lm_data, {"weight_drop": 1.5})
    with pytest.raises(DataError, match="override only"):
        load_language_model(path, tiny_lm_data, {"decoder_hidden_size": 13})


def test_what_is_no_language_model_is_refused(train, tiny_lm_data, tiny_translation_data, tmp_path):
    translation = train("transformer", "cross_entropy", "--share-all-embeddings")
    with pytest.raises(CheckpointError, match="with an encoder"):
        load_language_model(translation / "checkpoint_last.pt", tiny_lm_data, {})
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="without a decoder"):
        load_language_model(tmp_path / "other.pt", tiny_lm_data, {})
    with pytest.raises(CheckpointError, match="no such file"):
        load_language_model(tmp_path / "absent.pt", tiny_lm_data, {})


def test_other_data_are_refused(train, tiny_lm_data, tiny_translation_data, tmp_path):
    path = block_checkpoint(train)
    with pytest.raises(MissingDataError, match="dict.txt"):
        load_language_model(path, tiny_translation_data, {})
    words = (tiny_lm_data / "dict.txt").read_text("utf-8")
    (tmp_path / "dict.txt").write_text(words + "".join(f"more{i} 1\n" for i in range(8)), "utf-8")
    with pytest.raises(DataError, match="fit the dictionary"):
        load_language_model(path, tmp_path, {})
    loaded = load_language_model(path, tiny_lm_data, {})
    assert loaded.remark is None
    lines = words.splitlines(keepends=True)
    (tmp_path / "dict.txt").write_text("".join([lines[1], lines[0], *lines[2:]]), "utf-8")
    assert "order" in load_language_model(path, tmp_path, {}).remark


def test_a_checkpoint_that_is_replaced_meanwhile(train, tiny_lm_data, tmp_path, monkeypatch):
    """The signature named the file that had taken its place."""
    path = shutil.copy(stateful_checkpoint(train), tmp_path / "checkpoint_last.pt")

    def load_and_replace(*given):
        loaded = load_model_and_task(*given)
        os.replace(shutil.copy(path, tmp_path / "new"), path)
        return loaded

    monkeypatch.setattr(models, "load_model_and_task", load_and_replace)
    with pytest.raises(CheckpointError, match="checkpoint_last.pt.*replaced.*numbered checkpoint"):
        load_language_model(path, tiny_lm_data, {})


def test_texts_that_start_otherwise_are_refused(train, tiny_lm_data):
    """fairseq-eval-lm without the flag gives another perplexity, without a word about it."""
    with pytest.raises(UnsupportedError, match="fairseq-eval-lm.* --add-bos-token"):
        load_language_model(block_checkpoint(train), tiny_lm_data, {"add_bos_token": True})


@pytest.mark.parametrize("text", ["mem_len=3", "[1]", "{1: 2}", "{'a': print()}", "{"])
def test_overrides_are_a_dictionary_of_literals(text):
    with pytest.raises(ConfigurationError, match="model-overrides"):
        parse_overrides(text)
    assert parse_overrides("{'mem_len': 640, 'same_length': True}") == {
        "mem_len": 640,
        "same_length": True,
    }


def test_settings_that_hold_one_another_are_read_once():
    node = {"leaf": 1}
    for _ in range(60):
        node = {"a": node, "b": node}
    node["again"] = node
    check_overrides({"cfg": node}, {"leaf": 2})
    with pytest.raises(ConfigurationError, match="'other'"):
        check_overrides({"cfg": node}, {"other": 2})


class Sentences(list):
    """As fairseq's datasets: items and their sizes."""

    reads = 0

    @property
    def sizes(self):
        return [len(one) for one in self]

    def __getitem__(self, index):
        Sentences.reads += 1
        return super().__getitem__(index)


def test_a_corpus_is_its_sentences_in_a_row():
    lengths = [3, 1, 4, 2, 6]
    whole = torch.arange(sum(lengths), dtype=torch.int32)
    corpus = IndexedCorpus(Sentences(whole.split(lengths)))
    assert len(corpus) == 16
    for first in range(16):
        for end in range(17):
            found = corpus[first:end]
            assert found.dtype == torch.long
            assert torch.equal(found, whole[first:end].long())
    assert torch.equal(corpus[:100], whole.long())
    Sentences.reads = 0
    _ = corpus[8:10]
    assert Sentences.reads == 1  # of that slice alone


def test_a_binarised_split_is_its_text(tiny_lm_data):
    dictionary = Dictionary.load(str(tiny_lm_data / "dict.txt"))
    corpus = open_corpus(tiny_lm_data, "valid", dictionary)
    assert torch.equal(corpus[:], tokens_of(tiny_lm_data, "valid"))


def test_a_split_of_several_files(tmp_path, tiny_lm_data):
    dictionary = Dictionary.load(str(tiny_lm_data / "dict.txt"))
    for name, split in (("train", "valid"), ("train1", "test")):
        for kind in ("bin", "idx"):
            (tmp_path / f"{name}.{kind}").write_bytes(
                (tiny_lm_data / f"{split}.{kind}").read_bytes()
            )
    first, second = (tokens_of(tiny_lm_data, split) for split in ("valid", "test"))
    assert torch.equal(open_corpus(tmp_path, "train", dictionary)[:], first)
    both = open_corpus(tmp_path, "train", dictionary, combine=True)
    assert torch.equal(both[:], torch.cat([first, second]))


def test_a_missing_split_is_refused_with_those_there_are(tiny_lm_data):
    dictionary = Dictionary.load(str(tiny_lm_data / "dict.txt"))
    with pytest.raises(MissingDataError, match="splits test, train, valid.*Name one of those"):
        open_corpus(tiny_lm_data, "dev", dictionary)
