"""evaluate-lm from checkpoint to printed figures: against training's own, and what it refuses."""

import json
import math
import re

import pytest

from spectral_fairseq.commands.lm_evaluation import check
from spectral_fairseq.commands.lm_options import DynamicOptions, EvaluationOptions, TuneOptions
from spectral_fairseq.commands.models import load_language_model
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.continuous_cache import CacheGrid
from spectral_fairseq.lm.dynamic_evaluation import (
    DynamicEvaluation,
    DynamicRates,
    gradient_statistics,
)
from spectral_fairseq.lm.evaluation import StreamReader, evaluate, perplexity
from spectral_fairseq.lm.grid_search import CACHE_THETAS, CACHE_WEIGHTS
from tests.language_models import block_checkpoint, remade, stateful_checkpoint, tokens_of

SMALL_STATISTICS = ("--dynamic-batch-size", "4")


@pytest.fixture(scope="module")
def stateful(train):
    return stateful_checkpoint(train)


@pytest.fixture
def run(command, tiny_lm_data):
    def run(checkpoint, *flags, rc=0):
        argv = ("evaluate-lm", checkpoint, tiny_lm_data, "--cpu", "--format", "json", *flags)
        printed = command(*argv, rc=rc)
        return printed if rc else json.loads(printed)

    return run


def figure(document, method):
    (found,) = [one for one in document["figures"] if one["method"] == method]
    return found


def pieces(checkpoint, data, streams=1, segment=5, **overrides):
    loaded = load_language_model(checkpoint, data, overrides)
    return loaded, StreamReader(loaded.model, loaded.padding, loaded.start, streams, segment)


def test_equals_the_validation_of_training(stateful, run):
    log = (stateful.parent / "log.txt").read_text("utf-8")
    in_training = float(re.findall(r"\| valid \|.*? loss ([\d.]+)", log)[-1])
    found = figure(run(stateful, "--streams", 3, "--segment", 16), "model")
    assert found["bits"] == pytest.approx(in_training, abs=6e-4)
    assert found["perplexity"] == pytest.approx(2 ** found["bits"])


def test_the_segment_changes_nothing_and_every_token_counts_once(stateful, run, tiny_lm_data):
    found = [figure(run(stateful, "--segment", segment), "model") for segment in (1, 9, 1000)]
    tokens = tokens_of(tiny_lm_data, "valid")
    for one in found:
        assert one["tokens"] == len(tokens)
        assert one["perplexity"] == pytest.approx(found[0]["perplexity"], rel=1e-5)
    assert run(stateful)["options"]["segment"] == 16  # that of the training


def test_cache_and_dynamic_evaluation_are_those_of_lm(stateful, run, tiny_lm_data):
    cached = "--cache-window 20 --cache-theta 0.4 --cache-lambda 0.3 --segment 6".split()
    rates = "--dynamic-rate 0.005 --dynamic-decay 0.05 --dynamic-epsilon 0.001".split()
    more = ("--gen-subset", "test", "--dynamic-batches", 3, *SMALL_STATISTICS)
    document = run(stateful, *cached, *rates, *more)
    loaded, reader = pieces(stateful, tiny_lm_data, segment=6)
    train, test = (tokens_of(tiny_lm_data, split) for split in ("train", "test"))
    statistics = gradient_statistics(
        StreamReader(loaded.model, loaded.padding, loaded.start, 4, 6), train, 3
    )
    grid = CacheGrid(20, (0.4,), (0.3,))
    with DynamicEvaluation(loaded.model, statistics, DynamicRates(0.005, 0.05, 0.001)) as dynamic:
        expected = evaluate(reader, test, cache=grid, update=dynamic.update)
    plain = evaluate(reader, test).nll
    assert abs(expected.nll - plain) > 1e-4 * plain
    for method, nll in (
        ("dynamic evaluation", expected.nll),
        ("dynamic evaluation + cache", expected.cached[0][0]),
    ):
        found = figure(document, method)
        assert found["perplexity"] == pytest.approx(perplexity(nll, len(test)), rel=1e-6)
        assert "eta0.005,lambda0.05,epsilon0.001,mean,3x4" in found["signature"]
        assert ("window20,theta0.4,lambda0.3" in found["signature"]) == ("cache" in method)


def test_published_values_for_sums(stateful, run):
    given = run(stateful, "--dynamic-units", "sum", "--dynamic-decay", 0.075, *SMALL_STATISTICS)
    assert given["options"]["dynamic"]["epsilon"] == 0.001
    assert given["options"]["segment"] == 5
    signature = figure(given, "dynamic evaluation")["signature"]
    batches = int(re.search(r"sum,(\d+)x4", signature).group(1))
    model = load_language_model(stateful, given["data"]["path"], {}).model
    tensors = len(list(model.parameters()))
    means = DynamicRates(0.002, 0.075, 0.001).from_sums(batches, tensors)
    rates = ("--dynamic-rate", means.rate, "--dynamic-decay", means.decay)
    same = run(stateful, *rates, "--dynamic-epsilon", means.epsilon, *SMALL_STATISTICS)
    nll = figure(given, "dynamic evaluation")["nll"]
    assert figure(same, "dynamic evaluation")["nll"] == pytest.approx(nll, rel=1e-9)


def test_tuning_searches_valid_and_never_the_split_evaluated(stateful, run, tiny_lm_data):
    grids = (
        *("--tune-cache-theta", "0.1,1,3", "--tune-cache-lambda", "0.05,0.4"),
        *("--tune-dynamic-rate", "0.0001,0.01", "--tune-dynamic-decay", "0,0.1"),
    )
    common = ("--tune", "--cache-window", 15, "--dynamic", *SMALL_STATISTICS, *grids)
    document = run(stateful, "--gen-subset", "test", *common)
    dynamic, cache = document["tuning"]
    valid, test = (len(tokens_of(tiny_lm_data, split)) for split in ("valid", "test"))
    assert dynamic["tokens"] == cache["tokens"] == valid
    assert document["figures"][0]["tokens"] == test
    assert len(dynamic["points"]) == 4 and len(cache["points"]) == 6
    for search in (dynamic, cache):
        assert search["subset"] == "valid"
        assert search["best"] == min(search["points"], key=lambda one: one["perplexity"])
    # Evaluating the values found, without a search, gives the same figures on either split.
    best = (
        *("--cache-window", 15, "--cache-theta", cache["best"]["theta"]),
        *("--cache-lambda", cache["best"]["lambda"], "--dynamic-rate", dynamic["best"]["rate"]),
        *("--dynamic-decay", dynamic["best"]["decay"], *SMALL_STATISTICS),
    )
    again = run(stateful, "--gen-subset", "test", *best)
    assert [one["nll"] for one in again["figures"]] == pytest.approx(
        [one["nll"] for one in document["figures"]], rel=1e-6
    )
    on_valid = run(stateful, "--gen-subset", "valid", *best)
    assert [one["perplexity"] for one in on_valid["figures"][1:]] == pytest.approx(
        [dynamic["best"]["perplexity"], cache["best"]["perplexity"]], rel=1e-6
    )
    for one in document["figures"]:
        assert (f"tuned:valid[:{valid}]" in one["signature"]) == (one["method"] != "model")
    assert all("tuned" not in one["signature"] for one in again["figures"])


def test_dynamic_evaluation_is_shown_beside_the_static_model(stateful, run):
    static = run(stateful, "--segment", 6)["figures"]
    found = run(stateful, "--segment", 6, "--dynamic", *SMALL_STATISTICS)["figures"]
    assert [one["method"] for one in found] == ["model", "dynamic evaluation"]
    assert found[0] == static[0]


def test_a_best_value_at_the_end_of_its_grid_is_said(stateful, run):
    """Text without repetitions gains nothing from a cache, so its least share is the best one."""
    (search,) = run(stateful, "--tune", "--cache-window", 9)["tuning"]
    assert len(search["points"]) == len(CACHE_WEIGHTS) * len(CACHE_THETAS)
    assert search["best"]["lambda"] == min(CACHE_WEIGHTS)
    assert search["ends"]["lambda"] == "smallest"


def test_a_number_that_is_given_is_not_searched(stateful, run):
    """It was ignored, so that theta 0.3 was reported nowhere and 0.1 was used."""
    given = ("--tune", "--cache-theta", 0.3, "--dynamic-decay", 0, *SMALL_STATISTICS)
    document = run(stateful, *given, "--tune-dynamic-rate", "0.0001,0.01")
    dynamic, cache = document["tuning"]
    assert [(one["rate"], one["decay"]) for one in dynamic["points"]] == [(0.0001, 0), (0.01, 0)]
    assert {one["theta"] for one in cache["points"]} == {0.3}
    assert len(cache["points"]) == len(CACHE_WEIGHTS)
    assert "theta0.3," in figure(document, "dynamic evaluation + cache")["signature"]


def test_tuning_on_some_tokens_needs_no_model_of_the_rest(stateful, run, tiny_lm_data):
    document = run(stateful, "--tune", "--cache-window", 9, "--tune-tokens", 21)
    (search,) = document["tuning"]
    assert search["tokens"] == 21
    loaded, reader = pieces(stateful, tiny_lm_data, segment=16)
    point = search["points"][3]
    grid = CacheGrid(9, (point["theta"],), (point["lambda"],))
    nll = evaluate(reader, tokens_of(tiny_lm_data, "valid")[:21], cache=grid).cached[0][0]
    assert point["perplexity"] == pytest.approx(perplexity(nll, 21), rel=1e-6)


def test_mixture_and_svd_table_adapt_their_own_parameters(stateful, run, tiny_lm_data, tmp_path):
    flags = {"_name": "awd_lstm_mos_ptb", "output_head": "mos", "mixture_components": 3}
    path = remade(stateful, tmp_path / "m.pt", tiny_lm_data, embedding_type="svd", **flags)
    plain = run(path)["figures"][0]
    document = run(path, "--cache", "--dynamic", "--dynamic-rate", 0.001, *SMALL_STATISTICS)
    for one in document["figures"][1:]:
        assert 1 < one["perplexity"] < math.inf
        assert one["perplexity"] != pytest.approx(plain["perplexity"], rel=1e-4)


def test_text_shows_the_grids_and_signs_each_figure(stateful, run, command, tiny_lm_data):
    grid = (
        "--tune --cache-window 7 --tune-cache-theta 0.5,2 --tune-cache-lambda 0.1,0.2,0.3".split()
    )
    text = command("evaluate-lm", stateful, tiny_lm_data, "--cpu", *grid)
    document = run(stateful, *grid)
    (search,) = document["tuning"]
    for point in search["points"]:
        assert f"{point['perplexity']:.2f}" in text
    assert text.count("*") == 2  # in the table, and what it means
    for name in search["ends"]:
        assert f"note: {name}" in text
    for one in document["figures"]:
        assert f"{one['perplexity']:.2f}" in text and one["signature"] in text
        assert f"ckpt:{document['checkpoint']['sha256'][:12]}" in one["signature"]


def test_overrides_show_in_the_signature(stateful, run):
    found = run(stateful, "--model-overrides", "{'dropout': 0.0}")
    assert "overrides:dropout=0.0" in found["figures"][0]["signature"]


REFUSED = {
    "--streams to be a whole number >= 1": ("--streams", 0),
    "--segment to be a whole number >= 1": ("--segment", 0),
    "the cache window to be": ("--cache-window", 0),
    "lambda to be a finite number >= 0 and < 1": ("--cache-lambda", 1),
    "theta to be a finite number >= 0": ("--cache-theta", -1),
    "epsilon of dynamic": ("--dynamic-epsilon", 0),
    "--dynamic-batches to be": ("--dynamic-batches", 0),
    "Add --cache, --dynamic or both": ("--tune",),
    "Add --tune": ("--tune-tokens", 5),
    "--tune-tokens to be": ("--tune", "--cache", "--tune-tokens", 0),
    "Add --cache": ("--tune", "--dynamic", "--tune-cache-lambda", 0.1),
    "Add --dynamic": ("--tune", "--cache", "--tune-dynamic-decay", 0.1),
    "--model-overrides to be": ("--model-overrides", "{"),
    "'mem_lne', which it does not have": ("--model-overrides", "{'mem_lne': 640}"),
    "the split 'dev'": ("--gen-subset", "dev"),
    "100 tokens or more|smaller --dynamic-batch-size": ("--dynamic", "--dynamic-batch-size", 10**5),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message, stateful, run):
    assert re.search(message, run(stateful, *REFUSED[message], rc=2))


def test_a_model_without_a_state_is_left_to_fairseq(train, run):
    said = run(block_checkpoint(train), rc=2)
    assert "carries a state" in said and "arch transformer_lm_sc" in said
    assert "fairseq-eval-lm DATA" in said


@pytest.mark.parametrize("value", ["1,x", "x", ""])
def test_a_grid_is_numbers(value, run, capsys):
    with pytest.raises(SystemExit):
        run("absent.pt", "--tune", "--tune-cache-theta", value)
    assert "--tune-cache-theta: expected numbers separated by commas" in capsys.readouterr().err


def test_impossible_options_need_no_checkpoint():
    with pytest.raises(ConfigurationError, match="Give both"):
        check(EvaluationOptions(dynamic=DynamicOptions(units="sum"), tune=TuneOptions()))


def test_the_command_itself(stateful, run_cli, tiny_lm_data):
    done = run_cli("spectral-fairseq", "evaluate-lm", stateful, tiny_lm_data, "--cpu")
    assert "perplexity" in done.stdout and "\r" not in done.stderr
