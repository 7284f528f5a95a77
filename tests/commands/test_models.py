"""Language models built from checkpoints or refused; corpora read as one sequence or in blocks."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import FairseqDecoder
from fairseq_cli import eval_lm

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.commands.export_plain import export_checkpoint
from spectral_fairseq.commands.lm_evaluation import choose_layout
from spectral_fairseq.commands.lm_options import EvaluationOptions
from spectral_fairseq.commands.models import (
    BlockReader,
    IndexedCorpus,
    check_overrides,
    load_language_model,
    open_corpus,
    parse_overrides,
)
from spectral_fairseq.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    MissingDataError,
    UnsupportedError,
)
from spectral_fairseq.lm.dynamic_evaluation import adapted_parameters, gradient_statistics
from spectral_fairseq.lm.evaluation import CacheGrid, evaluate
from tests.language_models import block_checkpoint, remade, stateful_checkpoint, tokens_of
from tests.plugin.conftest import build_host_model
from tests.reference import evaluation as reference


class Positions(torch.nn.Module):
    """A decoder that stands for any model of at most 50 positions."""

    def __init__(self):
        super().__init__()
        self.decoder = FairseqDecoder(Dictionary())

    def max_positions(self):
        return 50


class TensorsAlone(FairseqDecoder):
    """Like that of hf_gpt2: features without a pair, and no argument for an encoder."""

    def extract_features(self, prev_output_tokens, incremental_state=None):
        raise AssertionError

    output_layer = extract_features


def test_features_of_another_form_are_not_asked_for():
    model = Positions()
    model.decoder = TensorsAlone(Dictionary())
    assert not BlockReader(model, 1, 2, 5, 0, 1).shows_features


@pytest.mark.parametrize(
    "total, block, context, rows",
    [
        (23, 5, 0, 3),
        (23, 5, 3, 4),
        (23, 7, 6, 2),
        (4, 9, 2, 5),
        (20, 5, 0, 1),
        (23, 50, 49, 7),
    ],
)
def test_blocks_predict_every_token_once_with_its_context(total, block, context, rows):
    corpus, padding, start = torch.arange(10, 10 + total), 1, 2
    inputs = [start, *range(10, 9 + total)]
    seen = []
    for segment in BlockReader(Positions(), padding, start, block, context, rows).segments(corpus):
        assert segment.tokens.size(0) <= rows and segment.tokens.size(1) <= block
        for tokens, targets in zip(segment.tokens.tolist(), segment.targets.tolist()):
            tokens = [one for one in tokens if one != padding]
            counted = [one for one in targets if one != padding]
            assert targets[: len(tokens)][len(tokens) - len(counted) :] == counted
            first = counted[0] - 10
            assert tokens == inputs[max(0, first - context) : first + len(counted)]
            assert len(counted) == min(block - context, total - first)
            seen += counted
    assert seen == corpus.tolist()


def host_perplexity(path, data, block, context, split="valid"):
    parser = options.get_eval_lm_parser()
    arguments = [
        *(str(data), "--path", str(path), "--gen-subset", split, "--cpu", "--no-progress-bar"),
        *("--tokens-per-sample", str(block), "--context-window", str(context)),
        *"--required-batch-size-multiple 1 --batch-size 1 --num-workers 0".split(),
    ]
    args = options.parse_args_and_arch(parser, input_args=arguments)
    return float(eval_lm.main(convert_namespace_to_omegaconf(args))["perplexity"])


def our_perplexity(path, data, block, context, split="valid", rows=3):
    loaded = load_language_model(path, data, {})
    corpus = open_corpus(data, split, loaded.dictionary)
    reader = BlockReader(loaded.model, loaded.padding, loaded.start, block, context, rows)
    found = evaluate(reader, corpus)
    assert found.tokens == len(tokens_of(data, split))
    return math.exp(found.nll / found.tokens)


@pytest.mark.parametrize("block, context", [(16, 0), (16, 5), (7, 6)])
def test_equals_fairseq_eval_lm(block, context, train, tiny_lm_data):
    path = block_checkpoint(train)
    expected = host_perplexity(path, tiny_lm_data, block, context)
    assert our_perplexity(path, tiny_lm_data, block, context) == pytest.approx(expected, rel=1e-5)


OTHERS = {
    "stock": {"_name": "transformer_lm"},
    "adaptive": {
        "_name": "transformer_lm",
        "adaptive_softmax_cutoff": "12,24",
        "share_decoder_input_output_embed": False,
        "criterion": "adaptive_loss",
    },
    "mixture": {
        "_name": "transformer_lm_mos",
        "output_head": "mos",
        "embedding_type": "plain",
        "mixture_components": 3,
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_equal_fairseq_eval_lm(kind, train, tiny_lm_data, tmp_path):
    path = remade(block_checkpoint(train), tmp_path / "other.pt", tiny_lm_data, **OTHERS[kind])
    expected = host_perplexity(path, tiny_lm_data, 10, 4, "test")
    assert our_perplexity(path, tiny_lm_data, 10, 4, "test") == pytest.approx(expected, rel=1e-5)


def test_dynamic_evaluation_of_the_hosts_adaptive_softmax(train, tiny_lm_data, tmp_path):
    """Its gradients, against those of one softmax over the head and one a cluster, in float64."""
    path = remade(block_checkpoint(train), tmp_path / "a.pt", tiny_lm_data, **OTHERS["adaptive"])
    model = load_language_model(path, tiny_lm_data, {}).model.double()
    corpus = tokens_of(tiny_lm_data, "valid")[:16]
    statistics = gradient_statistics(BlockReader(model, 1, 2, 16, 0, 1), corpus)
    clusters = model.decoder.adaptive_softmax
    first, *starts = clusters.cutoff
    inputs = torch.cat([torch.tensor([2]), corpus[:-1]])
    hidden, _ = model.decoder.extract_features(inputs[None], None)
    head = clusters.head(hidden[0]).log_softmax(-1)
    found = [head[:, :first]]
    for j, tail in enumerate(clusters.tail):
        found.append(head[:, first + j, None] + tail(hidden[0]).log_softmax(-1))
    nll = -torch.cat(found, -1)[range(16), corpus].mean()
    assert starts and len(set(torch.bucketize(corpus, torch.tensor([first, *starts])))) > 1
    gradients = torch.autograd.grad(nll, adapted_parameters(model), allow_unused=True)
    for rms, gradient in zip(statistics.rms, gradients):
        torch.testing.assert_close(rms, gradient.abs() if gradient is not None else 0 * rms)


def test_an_exported_checkpoint_has_the_same_perplexity(train, tiny_lm_data, tmp_path):
    path, plain = block_checkpoint(train), tmp_path / "plain.pt"
    torch.save(export_checkpoint(load_checkpoint(path))[0], plain)
    ours = our_perplexity(path, tiny_lm_data, 16, 4)
    assert our_perplexity(plain, tiny_lm_data, 16, 4) == pytest.approx(ours, rel=1e-5)


def test_a_model_without_features_is_run_whole(train, tiny_lm_data, monkeypatch):
    path = block_checkpoint(train)
    loaded = load_language_model(path, tiny_lm_data, {})
    corpus = open_corpus(tiny_lm_data, "valid", loaded.dictionary)
    reader = BlockReader(loaded.model, loaded.padding, loaded.start, 16, 5, 4)
    expected = evaluate(reader, corpus)
    reader.shows_features = False
    found = evaluate(reader, corpus)
    assert found.tokens == expected.tokens
    assert found.nll == pytest.approx(expected.nll, rel=1e-6)
    with pytest.raises(ConfigurationError, match="states before its output layer"):
        evaluate(reader, corpus, cache=CacheGrid(4, (1.0,), (0.1,)))


def test_a_decoder_that_only_inherits_extract_features(task):
    """fairseq's fconv_lm does, from a base class where it only raises."""
    model = build_host_model(task, "fconv_lm", decoder_layers="[(16, 3)]", tokens_per_sample=16)
    model.eval()
    corpus = torch.randint(4, 49, (40,), generator=torch.Generator().manual_seed(0))
    found = evaluate(BlockReader(model, 1, 2, 16, 0, 2), corpus)
    inputs = torch.cat([torch.tensor([2]), corpus[:-1]])
    with torch.no_grad():
        scores = torch.cat([model(piece[None])[0][0] for piece in inputs.split(16)]).double()
    assert found.nll == pytest.approx(-float(scores.log_softmax(-1)[range(40), corpus].sum()))


@torch.no_grad()
def test_the_cache_runs_through_blocks_in_the_order_of_the_text(train, tiny_lm_data):
    loaded = load_language_model(block_checkpoint(train), tiny_lm_data, {})
    tokens = tokens_of(tiny_lm_data, "valid")
    model, block, context = loaded.model, 9, 3
    features, log_model = [], []
    for first in range(0, len(tokens), block - context):
        left, end = max(0, first - context), first + block - context
        inputs = torch.cat([torch.tensor([loaded.start]), tokens])[left : min(end, len(tokens))]
        hidden = model.decoder.extract_features(inputs[None], None)[0][:, first - left :]
        features.append(hidden[0])
        log_model.append(torch.log_softmax(model.decoder.output_layer(hidden)[0], -1))
    features, log_model = torch.cat(features), torch.cat(log_model)
    grid = CacheGrid(12, (0.1,), (0.3,))
    for rows in (1, 4):
        reader = BlockReader(model, loaded.padding, loaded.start, block, context, rows)
        found = evaluate(reader, tokens, cache=grid)
        naive = reference.log_with_cache(
            log_model.double(), features.double(), tokens, 12, 0.1, 0.3
        )
        assert found.cached[0][0] == pytest.approx(-sum(naive), rel=1e-5)
        assert found.cached[0][0] != pytest.approx(found.nll, rel=1e-3)


def test_a_block_is_no_longer_than_the_positions_of_the_model():
    loaded = SimpleNamespace(
        settings={"tokens_per_sample": 100}, stateful=False, model=Positions(), arch="any"
    )
    assert choose_layout(loaded, EvaluationOptions()).segment == 50
    assert choose_layout(loaded, EvaluationOptions(segment=30)).segment == 30


def test_blocks_that_cannot_be_are_refused():
    for block, context, match in (
        (51, 0, "--segment to be a whole number <= 50"),
        (5, 5, "context-window"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            BlockReader(Positions(), 1, 2, block, context, 1)


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


def test_texts_that_start_otherwise_are_refused(train, tiny_lm_data):
    with pytest.raises(UnsupportedError, match="add-bos-token.*fairseq-eval-lm"):
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
