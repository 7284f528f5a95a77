"""Beams that share a sentence: translations equal fairseq's, and models are left as they were."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, current_thread

import pytest
import torch
from fairseq.models import FairseqEncoder, FairseqEncoderDecoderModel
from fairseq.models.bart import BARTModel
from fairseq.models.wav2vec.wav2vec2_asr import TransformerDecoder
from fairseq.modules import MultiheadAttention
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from spectral_fairseq.plugin import beam_search
from spectral_fairseq.plugin.beam_search import SHARED_SENTENCES
from tests.plugin.conftest import LONGEST_FIRST, any_model, build_host_model, make_sample

pytestmark = pytest.mark.skipif(
    SHARED_SENTENCES.unneeded() is not None, reason=str(SHARED_SENTENCES.unneeded())
)


@pytest.fixture(autouse=True)
def _every_batch_is_large(monkeypatch):
    monkeypatch.setattr(beam_search, "SHARED_FROM", 1)


def translator(task, *names, beams=3, attends=False, **options):
    models = [any_model(task, name, seed=seed).eval() for seed, name in enumerate(names, 3)]
    for model in models:
        model.prepare_for_inference_(Settings(beams, attends))
        with torch.no_grad():  # probabilities that differ, so that sentences end at their time
            for parameter in model.parameters():
                parameter.mul_(1.5)
    options = {"max_len_b": 12, "min_len": 1, **options}
    return SequenceGenerator(models, task.target_dictionary, beam_size=beams, **options)


class Settings:
    """What ``prepare_for_inference_`` asks of a command's configuration."""

    def __init__(self, beams, attends):
        self.common = type("", (), {"bf16": False})
        self.generation = type("", (), {"beam": beams, "print_alignment": attends})


def translated(generate, generator, sample, **more):
    """Sentence -> its hypotheses, and the sizes of the batches between which rows were copied."""
    copies = []
    encoder = generator.model.single_model.encoder
    reorder = encoder.reorder_encoder_out
    encoder.reorder_encoder_out = lambda out, order: (
        copies.append(len(order)) or reorder(out, order)
    )
    try:
        with torch.no_grad():
            return generate(generator, generator.model.models, sample, **more), copies
    finally:
        del encoder.reorder_encoder_out


@pytest.mark.parametrize("names", [
    ("svd",), ("weight-norm",), ("mos",), ("capped",),
    ("transformer shared",), ("adaptive softmax",), ("lstm shared",), ("fconv",),
    ("svd", "transformer separate"),
], ids=" and ".join)  # fmt: skip
@pytest.mark.parametrize("beams, prefix", [(3, False), (4, True), (1, False)])
def test_translations_equal_fairseqs(names, beams, prefix, task):
    generator = translator(task, *names, beams=beams, attends=True)
    sample = make_sample(task, (*LONGEST_FIRST, (2, 3)))
    more = {"prefix_tokens": sample["target"][:, :1]} if prefix else {}
    bare = inspect.unwrap(SequenceGenerator.generate)
    expected, every_step = translated(bare, generator, sample, **more)
    found, copies = translated(SequenceGenerator.generate, generator, sample, **more)
    for ours, theirs in zip(found, expected):
        assert len(ours) == len(theirs) == beams
        for one, other in zip(ours, theirs):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            torch.testing.assert_close(one["score"], other["score"], rtol=1e-5, atol=1e-6)
            if other["attention"] is not None:
                torch.testing.assert_close(one["attention"], other["attention"])
    # Copied when beams are made, and when the batch has become smaller.
    assert copies == [len(sample["id"]) * beams, *sorted({*every_step} - {every_step[0]})[::-1]]
    assert len(every_step) > len(copies)


def test_some_sentences_end_before_others(task):
    _, sizes = translated(
        SequenceGenerator.generate,
        translator(task, "svd"),
        make_sample(task, (*LONGEST_FIRST, (2, 3))),
    )
    assert len(sizes) > 1


def attentions_of(generator):
    return [one for one in generator.model.modules() if isinstance(one, MultiheadAttention)]


@pytest.mark.parametrize("fails, shared_from, rows", [
    (False, 288, 3), (True, 288, 3), (False, 289, 9),
])  # fmt: skip
def test_large_batches_share_and_the_models_are_left_as_they_were(
    fails, shared_from, rows, task, monkeypatch
):
    """Three sentences of six words, three beams and 16 features are 864 numbers."""
    monkeypatch.setattr(beam_search, "SHARED_FROM", 3 * shared_from)
    generator = translator(task, "svd")
    attentions = attentions_of(generator)
    before = [dict(vars(module)) for module in (generator, generator.model, *attentions)]
    projected = []

    def look(_, inputs):
        projected.append(inputs[0].size(1))
        if fails:
            raise RuntimeError("out of memory")

    for attention in attentions:
        if attention.encoder_decoder_attention:
            attention.k_proj.register_forward_pre_hook(look)
    try:
        generator.generate(generator.model.models, make_sample(task))
    except RuntimeError as error:
        assert fails, error
    assert set(projected) == {rows}
    assert [dict(vars(one)) for one in (generator, generator.model, *attentions)] == before


def hypotheses(found):
    return [[each["tokens"].tolist() for each in one] for one in found]


def test_threads_translate_with_one_model(task):
    """Beside each other, in the main thread and in another, and with different beams."""
    few = translator(task, "svd", beams=2)
    (model,) = few.model.models
    many = SequenceGenerator([model], task.target_dictionary, beam_size=4, max_len_b=12, min_len=1)
    sample = make_sample(task, (*LONGEST_FIRST, (2, 3)))
    bare = inspect.unwrap(SequenceGenerator.generate)
    with torch.no_grad():
        expected = [hypotheses(bare(each, [], sample)) for each in (few, many)]
    together, reorder, started = Barrier(2), model.encoder.reorder_encoder_out, set()

    def wait_once(*args):
        if current_thread() not in started:
            started.add(current_thread())
            together.wait(timeout=60)
        return reorder(*args)

    model.encoder.reorder_encoder_out = wait_once
    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(SequenceGenerator.generate, many, [], sample)
        found = [SequenceGenerator.generate(few, [], sample), beside.result()]
    assert [hypotheses(one) for one in found] == expected


class Meanwhile(BeamSearch):
    """A search that does something else with the model in each of its steps."""

    def __init__(self, dictionary, act):
        super().__init__(dictionary)
        self.act = act

    def step(self, step, *args, **kwargs):
        if step < 3:
            self.act()
        return super().step(step, *args, **kwargs)


def test_a_model_that_translates_is_used_for_something_else(task):
    """A forward pass with targets, as a thread makes that scores, and a search within a search."""
    outer, inner = translator(task, "svd"), translator(task, "svd", beams=2)
    (model,) = outer.model.models
    inner.model.models[0] = inner.model.single_model = model
    sample = make_sample(task, (*LONGEST_FIRST, (2, 3)))
    bare = inspect.unwrap(SequenceGenerator.generate)
    with torch.no_grad():
        scores = model(**sample["net_input"])[0]
        expected = [hypotheses(bare(each, [], sample)) for each in (outer, inner)]
    found = []

    def act():
        assert torch.equal(model(**sample["net_input"])[0], scores)
        found.append(hypotheses(inner.generate([], sample)))

    outer.search = Meanwhile(task.target_dictionary, act)
    assert hypotheses(outer.generate([], sample)) == expected[0]
    assert found == [expected[1]] * 3


def copy_of_bart(self, beams):
    """What several plugins have made of BART's function."""
    self.told = beams
    inspect.unwrap(BARTModel.set_beam_size)(self, beams)


@pytest.mark.parametrize("copied", [False, True])
def test_a_bart_that_has_translated_is_trained_as_before(copied, task):
    """fairseq leaves the number of beams on its attention as soon as a generator is made."""
    sizes = {"max_source_positions": 64, "max_target_positions": 64, "dropout": 0.0}
    model = build_host_model(task, "bart_base", share_all_embeddings=True, **sizes).train()
    if copied:
        model.__class__ = type("Other", (type(model),), {"set_beam_size": copy_of_bart})
    sample = make_sample(task, (*LONGEST_FIRST, (2, 3)))
    scores = model(**sample["net_input"])[0]
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=2, max_len_b=8)
    assert not copied or model.told == 2
    assert torch.equal(model.train()(**sample["net_input"])[0], scores)
    bare = inspect.unwrap(SequenceGenerator.generate)
    found = hypotheses(generator.generate([], sample))
    assert found == hypotheses(bare(generator, [], sample))
    assert torch.equal(model.train()(**sample["net_input"])[0], scores)
    again = SequenceGenerator([model], task.target_dictionary, beam_size=1, max_len_b=8)
    assert len(again.generate([], sample)) == len(found)


def test_a_model_of_another_plugin_is_told_its_beams(task):
    model = build_host_model(task, "transformer")
    model.set_beam_size = lambda beams: setattr(model, "told", beams)
    SequenceGenerator([model], task.target_dictionary, beam_size=2)
    assert model.told == 2


def test_an_encoder_that_returns_one_tensor(task):
    """wav2vec_seq2seq, hubert_seq2seq and AV-HuBERT."""

    class Encoder(FairseqEncoder):
        def forward(self, source, padding_mask):
            features = source.view(*source.shape[:2], 16).transpose(0, 1)
            return {"encoder_out": features, "padding_mask": padding_mask}

        def reorder_encoder_out(self, encoder_out, new_order):
            return {
                "encoder_out": encoder_out["encoder_out"].index_select(1, new_order),
                "padding_mask": encoder_out["padding_mask"].index_select(0, new_order),
            }

    torch.manual_seed(3)
    words = task.target_dictionary
    sizes = {f"decoder_{name}": 16 for name in ("embed_dim", "ffn_embed_dim", "output_dim")}
    rates = ("dropout", "layerdrop", "attention_dropout", "activation_dropout")
    config = OmegaConf.create(
        {
            **sizes,
            **{f"decoder_{name}": 0.0 for name in rates},
            **{name: 0.0 for name in rates},
            "encoder_embed_dim": 16,
            "decoder_layers": 1,
            "decoder_attention_heads": 2,
            "decoder_input_dim": 16,
            "share_decoder_input_output_embed": False,
            "max_target_positions": 64,
            "no_token_positional_embeddings": False,
            "decoder_learned_pos": False,
            "decoder_normalize_before": False,
            "adaptive_softmax_cutoff": None,
        }
    )
    table = torch.nn.Embedding(len(words), 16, words.pad())
    model = FairseqEncoderDecoderModel(Encoder(None), TransformerDecoder(config, words, table))
    generator = SequenceGenerator([model.eval()], words, beam_size=3, max_len_b=8, max_len=20)
    sample = {
        "net_input": {
            "source": torch.randn(2, 7, 16),
            "padding_mask": torch.zeros(2, 7, dtype=torch.bool),
        }
    }
    expected = inspect.unwrap(SequenceGenerator.generate)(generator, [], sample)
    found = generator.generate([], sample)
    assert hypotheses(found) == hypotheses(expected)


@pytest.mark.skipif(
    not hasattr(torch, "_nested_tensor_from_mask_left_aligned"),
    reason="fairseq's encoder calls what this torch does not have",
)
def test_torchscript_compiles_the_generator(task):
    generator = translator(task, "transformer shared")
    torch.jit.script(generator)
