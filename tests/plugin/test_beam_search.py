"""Beams that share a sentence: translations equal fairseq's, and models are left as they were."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator

from spectral_fairseq.plugin import beam_search
from spectral_fairseq.plugin.beam_search import SHARED_SENTENCES
from tests.plugin.conftest import LONGEST_FIRST, any_model, make_sample

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


@pytest.mark.parametrize("fails, shared_from, beams", [
    (False, 288, 3), (True, 288, 3), (False, 289, 1),
])  # fmt: skip
def test_the_models_are_left_as_they_were(fails, shared_from, beams, task, monkeypatch):
    """Three sentences of six words, three beams and 16 features are 864 numbers."""
    monkeypatch.setattr(beam_search, "SHARED_FROM", 3 * shared_from)
    generator = translator(task, "svd")
    attentions = [
        module for module in generator.model.modules() if isinstance(module, MultiheadAttention)
    ]
    seen = []

    def decode(*args, **kwargs):
        seen.append([module.beam_size for module in attentions])
        if fails:
            raise RuntimeError("out of memory")
        return decode_in_beams(*args, **kwargs)

    decode_in_beams = generator.model.forward_decoder
    monkeypatch.setattr(generator.model, "forward_decoder", decode)
    try:
        generator.generate(generator.model.models, make_sample(task))
    except RuntimeError as error:
        assert fails, error
    expected = [beams if module.encoder_decoder_attention else 1 for module in attentions]
    assert seen and all(sizes == expected for sizes in seen)
    assert all(module.beam_size == 1 for module in attentions)
    assert "reorder_encoder_out" not in vars(generator.model)


def test_threads_translate_with_one_model_as_in_fairseq(task):
    few = translator(task, "svd", beams=2)
    many = SequenceGenerator(
        few.model.models, task.target_dictionary, beam_size=4, max_len_b=12, min_len=1
    )
    sample = make_sample(task, (*LONGEST_FIRST, (2, 3)))
    bare = inspect.unwrap(SequenceGenerator.generate)
    with torch.no_grad():
        expected = [bare(each, [], sample) for each in (few, many)]
    together = Barrier(2)

    def translate(generator):
        reorder, started = generator.model.reorder_encoder_out, []

        def wait_once(*args):
            if not started:
                started.append(together.wait(timeout=60))
            return reorder(*args)

        generator.model.reorder_encoder_out = wait_once
        return SequenceGenerator.generate(generator, [], sample)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(translate, (few, many)))
    for ours, theirs in zip(found, expected):
        assert [[each["tokens"].tolist() for each in one] for one in ours] == [
            [each["tokens"].tolist() for each in one] for one in theirs
        ]
    attentions = [each for each in few.model.modules() if isinstance(each, MultiheadAttention)]
    assert all(attention.beam_size == 1 for attention in attentions)


@pytest.mark.skipif(
    not hasattr(torch, "_nested_tensor_from_mask_left_aligned"),
    reason="fairseq's encoder calls what this torch does not have",
)
def test_torchscript_compiles_the_generator(task):
    generator = translator(task, "transformer shared")
    torch.jit.script(generator)
