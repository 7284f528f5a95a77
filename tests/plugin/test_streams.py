"""A corpus cut into streams and segments, against the plainest way to do it."""

import gc
import weakref

import numpy as np
import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.plugin.corpus import Corpus
from spectral_fairseq.plugin.segment_lengths import fixed_lengths, sampled_lengths
from spectral_fairseq.plugin.stream_iterator import StreamIterator
from spectral_fairseq.plugin.streams import Streams

PAD, EOS = 1, 2


def corpus(tokens, seed=0):
    """Sentences of one to seven words; every token its own index, so that none is mistaken."""
    generator = np.random.default_rng(seed)
    left, sentences = torch.arange(4, 4 + tokens), []
    while len(left):
        count = int(generator.integers(1, 8))
        sentences.append(left[:count])
        left = left[count:]
    return Corpus(sentences, first_input=EOS)


def streams_of(tokens, batch_size, length, slots=1, workers=1, trim=False):
    streams = Streams(corpus(tokens), batch_size, slots, workers, PAD, trim)
    streams.cut(fixed_lengths(streams.length, length))
    return streams


def micro_batches(streams, worker=0, epoch=1):
    iterator = StreamIterator(streams, worker, epoch, num_workers=0, buffer_size=0)
    return list(iterator.next_epoch_itr())


def joined(batches, row, key):
    """The segments of one row one after the other, padding left out."""
    rows = [b["target"][row] if key == "target" else b["net_input"][key][row] for b in batches]
    return [int(token) for piece in rows for token in piece if token != PAD]


@pytest.mark.parametrize("batch_size", [1, 3, 5, 7])
@pytest.mark.parametrize("length", [1, 2, 4, 6, 70])
@pytest.mark.parametrize("tokens", [7, 37, 60, 61])
def test_evaluation_predicts_every_token_once(tokens, length, batch_size):
    streams = streams_of(tokens, batch_size, length)
    batches = micro_batches(streams)
    targets = [joined(batches, row, "target") for row in range(batch_size)]
    assert sum(targets, []) == list(range(4, 4 + tokens))
    assert max(map(len, targets)) - min(map(len, targets)) <= 1
    for row, target in enumerate(targets):
        before = EOS if target[0] == 4 else target[0] - 1
        assert joined(batches, row, "src_tokens") == [before, *target[:-1]]
    assert sum(batch["ntokens"] for batch in batches) == tokens
    for batch in batches:
        counted = batch["target"].ne(PAD)
        assert torch.equal(batch["net_input"]["src_tokens"].ne(PAD), counted)
        assert torch.equal(batch["net_input"]["src_lengths"], counted.sum(1))
        assert counted[:, 0].all()  # no row without a token
        assert counted[:, :-1].all()  # padding at the right end only
        assert batch["nsentences"] == batch_size == len(batch["id"])
    ids = torch.cat([batch["id"] for batch in batches])
    assert len(ids.unique()) == len(ids)


@pytest.mark.parametrize("tokens, batch_size, slots, workers", [(61, 3, 2, 1), (61, 2, 3, 2)])
def test_training_streams_are_equally_long(tokens, batch_size, slots, workers):
    count = batch_size * slots * workers
    streams = streams_of(tokens, batch_size, 4, slots, workers, trim=True)
    assert streams.trimmed == tokens % count and streams.length == tokens // count
    seen = []
    for worker in range(workers):
        batches = micro_batches(streams, worker)
        assert len(batches) == len(streams.lengths) * slots
        for slot in range(slots):
            own = batches[slot::slots]
            assert {batch["slot"] for batch in own} == {slot}
            assert [batch["segment"] for batch in own] == list(range(len(streams.lengths)))
            seen += [joined(own, row, "target") for row in range(batch_size)]
        for update in range(len(streams.lengths)):
            group = batches[update * slots : (update + 1) * slots]
            assert {b["target"].shape for b in group} == {(batch_size, streams.lengths[update])}
    assert sum(sorted(seen), []) == list(range(4, 4 + tokens - streams.trimmed))


def test_an_iterator_is_gone_with_its_last_user():
    """Not when garbage is collected: ending its loading processes then takes 5 seconds for each."""
    iterator = StreamIterator(streams_of(61, 3, 4), 0, 1, num_workers=0, buffer_size=0)
    assert len(list(iterator.next_epoch_itr())) == 5
    known = weakref.ref(iterator)
    gc.disable()
    try:
        del iterator
        assert known() is None
    finally:
        gc.enable()


def test_two_workers_share_the_streams_of_one_with_two_slots():
    one = micro_batches(streams_of(61, 3, 4, slots=2, trim=True))
    two = streams_of(61, 3, 4, workers=2, trim=True)
    dealt = [batch for pair in zip(*(micro_batches(two, w) for w in (0, 1))) for batch in pair]
    assert len(one) == len(dealt)
    for first, second in zip(one, dealt):
        assert torch.equal(first["target"], second["target"])
        assert torch.equal(first["id"], second["id"])


def test_more_streams_than_tokens():
    with pytest.raises(DataError, match="at least 12 tokens in the corpus, one for each stream"):
        Streams(corpus(11), 3, 2, 2, PAD, trim=True)


@pytest.mark.parametrize("total, length, expected", [
    (10, 5, [5, 5]),
    (14, 5, [5, 9]),
    (15, 5, [5, 5, 5]),
    (3, 70, [3]),
    (10, 3, [3, 3, 4]),
    (5, 1, [1, 1, 1, 2]),
    (150, 70, [70, 70, 10]),
    (144, 70, [70, 74]),
])  # fmt: skip
def test_fixed_lengths(total, length, expected):
    assert fixed_lengths(total, length) == expected


def test_sampled_lengths():
    """Both peaks at their places, with their weights, none below five."""
    lengths = sampled_lengths(2_000_000, 70, np.random.default_rng(0))
    assert sum(lengths) == 2_000_000
    assert lengths == sampled_lengths(2_000_000, 70, np.random.default_rng(0))
    assert lengths != sampled_lengths(2_000_000, 70, np.random.default_rng(1))
    lengths = np.array(lengths[:-1])
    halves = lengths[lengths < 52]
    assert len(halves) / len(lengths) == pytest.approx(0.05, abs=0.005)
    assert halves.mean() == pytest.approx(34.5, abs=0.5)  # rounded down: half a token less
    assert lengths[lengths >= 52].mean() == pytest.approx(69.5, abs=0.2)
    assert lengths[lengths >= 52].std() == pytest.approx(5, abs=0.2)
    short = sampled_lengths(100_000, 10, np.random.default_rng(0))
    assert min(short) == 5
