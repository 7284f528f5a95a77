"""Binarised splits read as one sequence of tokens."""

import pytest
import torch
from fairseq.data import Dictionary

from spectral_fairseq.commands.models import IndexedCorpus, open_corpus
from spectral_fairseq.errors import MissingDataError
from tests.language_models import tokens_of


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
