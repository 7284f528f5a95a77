"""Evaluation in streams: the model, the cache beside it, and no memory that grows."""

import gc

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.lm.continuous_cache import CacheGrid
from spectral_fairseq.lm.evaluation import StreamReader, evaluate, perplexity
from tests.lm.tiny_stateful import PADDING, START, corpus, reader, tiny_model
from tests.reference import evaluation as reference


def one_pass(model, tokens):
    """log p (T, N), features (T, d) of a whole corpus read at once."""
    inputs = torch.cat([torch.tensor([START]), tokens[:-1].long()])
    with torch.no_grad():
        scores, extra = model(inputs[None])
    return torch.log_softmax(scores[0], -1), extra["features"][0]


def nll_of(log_model, tokens):
    return -float(log_model.gather(1, tokens.long().unsqueeze(1)).sum())


@pytest.mark.parametrize("segment", [1, 3, 4, 33, 100])
@pytest.mark.parametrize("length, streams", [(33, 1), (33, 4), (32, 4), (7, 7), (11, 8)])
def test_streams_equal_their_parts_one_by_one(length, streams, segment):
    model, tokens = tiny_model(), corpus(length)
    found = evaluate(reader(model, streams, segment), tokens)
    assert found.tokens == length
    expected = 0.0
    bounds = [stream * length // streams for stream in range(streams + 1)]
    for start, end in zip(bounds, bounds[1:]):
        before = torch.tensor([START]) if start == 0 else tokens[start - 1 : start].long()
        inputs = torch.cat([before, tokens[start : end - 1].long()])
        with torch.no_grad():
            log_model = torch.log_softmax(model(inputs[None])[0][0], -1)
        expected += nll_of(log_model, tokens[start:end])
    assert found.nll == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("segment", [3, 41])
def test_cache_equals_its_naive_loop_for_every_value_of_a_grid(segment):
    model, tokens = tiny_model(), corpus(41)
    log_model, features = one_pass(model, tokens)
    grid = CacheGrid(7, thetas=(0.0, 0.5, 2.0), weights=(0.0, 0.1, 0.6))
    found = evaluate(reader(model, segment=segment), tokens, cache=grid)
    for theta, row in zip(grid.thetas, found.cached):
        for weight, nll in zip(grid.weights, row):
            naive = reference.log_with_cache(log_model, features, tokens, 7, theta, weight)
            assert nll == pytest.approx(-sum(naive), rel=1e-12)
    assert found.cached[0][0] == pytest.approx(found.nll, rel=1e-14)


def test_streams_have_caches_of_their_own():
    model, tokens = tiny_model(), corpus(40)
    grid = CacheGrid(50, (1.0,), (0.5,))
    found = evaluate(reader(model, 2, 6), tokens, cache=grid)
    expected = 0.0
    for part, start in ((tokens[:20], START), (tokens[20:], int(tokens[19]))):
        one = StreamReader(model, PADDING, start, 1, 6)
        expected += evaluate(one, part, cache=grid).cached[0][0]
    assert found.cached[0][0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus():
    # Elements of all live tensors made by the evaluation, whenever a segment is done.
    def peak(length):
        model, tokens = tiny_model(), corpus(length)
        grid, seen = CacheGrid(11, (0.5, 1.0), (0.1, 0.2)), []

        def count(_):
            made = gc.get_objects()
            seen.append(sum(one.numel() for one in made if type(one) is torch.Tensor))

        gc.collect()
        gc.freeze()  # what is there now is not looked at
        try:
            evaluate(reader(model, 2, 5), tokens, cache=grid, progress=count)
        finally:
            gc.unfreeze()
        assert len(seen) == length // 10
        return max(seen)

    assert 0 < peak(2000) <= peak(200)


def test_progress_counts_every_token():
    done = []
    evaluate(reader(tiny_model(), 3, 4), corpus(31), progress=done.append)
    assert sum(done) == 31 and len(done) > 1


def test_nothing_is_differentiated_and_training_mode_is_never_entered():
    model, seen = tiny_model(), set()
    model.register_forward_pre_hook(lambda *_: seen.add((torch.is_grad_enabled(), model.training)))
    evaluate(reader(model), corpus(9))
    assert seen == {(False, False)}


def test_too_few_tokens_and_impossible_caches_are_refused():
    with pytest.raises(DataError, match="5 tokens, one for each stream"):
        evaluate(reader(tiny_model(), 5), corpus(4))
    with pytest.raises(DataError, match="at least one token"):
        evaluate(reader(tiny_model()), corpus(0))
    for grid, match in (
        (CacheGrid(0, (1.0,), (0.1,)), "window"),
        (CacheGrid(3, (-1.0,), (0.1,)), "theta"),
        (CacheGrid(3, (1.0,), (1.0,)), "lambda"),
        (CacheGrid(3, (), (0.1,)), "theta"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            evaluate(reader(tiny_model()), corpus(9), cache=grid)


def test_perplexity_of_what_is_no_number():
    assert perplexity(0.0, 3) == 1.0
    assert perplexity(float("nan"), 3) == perplexity(1e9, 3) == float("inf")
