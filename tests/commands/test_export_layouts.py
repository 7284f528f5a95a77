"""Small random Transformers of fairseq of every kind: the layout, and that its logits are equal."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from fairseq import models
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import OmegaConf

from spectral_fairseq.commands import export_ctranslate2, export_huggingface
from spectral_fairseq.commands.export_huggingface import write_huggingface
from spectral_fairseq.commands.export_plain import export_checkpoint, plain_checkpoint
from spectral_fairseq.commands.logit_check import task_like
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.plugin.flat_transformer import FlatTransformerConfig
from spectral_fairseq.provenance import distribution_version

pytestmark = pytest.mark.usefixtures("transformers")

WIDTHS = {"decoder_embed_dim": 16, "decoder_input_dim": 16, "decoder_output_dim": 16}
DECODER = {**WIDTHS, "decoder_ffn_embed_dim": 24, "decoder_layers": 1, "decoder_attention_heads": 2}
ENCODER = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "max_source_positions": 30,
    "max_target_positions": 40,
}
BEFORE = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
EMBEDDING_NORM = {"layernorm_embedding": True}
TIED = {"share_all_embeddings": True}
TIED_LM = {"share_decoder_input_output_embed": True}
UNSCALED = {"no_scale_embedding": True}
KEEPS_TABLES_APART = pytest.mark.xfail(
    distribution_version("transformers") is not None
    and int(distribution_version("transformers").split(".")[0]) < 5,
    raises=UnsupportedError,
    strict=True,
    reason="transformers shares the tables of a translation model before version 5",
)


def checkpoint_of(arch, flags, source, target):
    """A checkpoint of random weights, every tensor off its start."""
    kind = TransformerLanguageModelConfig if arch == "transformer_lm" else FlatTransformerConfig
    defaults = OmegaConf.to_container(OmegaConf.structured(kind), resolve=False, enum_to_str=True)
    # Interpolations name nodes that are not here.
    cfg = {key: value for key, value in defaults.items() if "${" not in str(value)}
    cfg.update(flags, _name=arch)
    sizes = {"encoder.embed_tokens.weight": source, "decoder.embed_tokens.weight": target}
    task = task_like({key: torch.zeros(size, 16) for key, size in sizes.items()})
    if arch == "transformer_lm":
        task = SimpleNamespace(
            source_dictionary=task.target_dictionary, target_dictionary=task.target_dictionary
        )
    model = models.build_model(OmegaConf.create({"model": cfg}).model, task)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    nodes = {"model": cfg, "task": {"_name": "translation"}, "common": {}, "criterion": None}
    return {"cfg": nodes, "model": model.state_dict()}


def translation(source, target, *flags):
    merged = {key: value for some in flags for key, value in some.items()}
    return checkpoint_of("transformer", {**DECODER, **ENCODER, **merged}, source, target)


def language_model(*flags):
    merged = {key: value for some in flags for key, value in some.items()}
    limits = {"max_target_positions": 30, "decoder_normalize_before": True}
    return checkpoint_of("transformer_lm", {**DECODER, **limits, **merged}, 37, 37)


@pytest.mark.parametrize(
    "layout, make",
    [
        pytest.param("FSMT", lambda: translation(30, 37), marks=KEEPS_TABLES_APART),
        ("FSMT", lambda: translation(30, 37, TIED_LM, UNSCALED, {"activation_fn": "gelu"})),
        ("FSMT", lambda: translation(37, 37, TIED, {"activation_fn": "gelu_fast"})),
        ("M2M100", lambda: translation(37, 37, BEFORE, TIED)),
        pytest.param("M2M100", lambda: translation(37, 37, BEFORE), marks=KEEPS_TABLES_APART),
        ("Bart", lambda: translation(37, 37, EMBEDDING_NORM, LEARNED, TIED)),
        pytest.param("Bart", lambda: translation(37, 37, EMBEDDING_NORM), marks=KEEPS_TABLES_APART),
        ("MBart", lambda: translation(37, 37, EMBEDDING_NORM, BEFORE, LEARNED, TIED)),
        ("XGLM", lambda: language_model()),
        ("XGLM", lambda: language_model(TIED_LM, UNSCALED)),
        ("OPT", lambda: language_model({"decoder_normalize_before": False})),
        ("OPT", lambda: language_model(TIED_LM, {"decoder_learned_pos": True})),
        ("OPT", lambda: language_model(TIED_LM, UNSCALED, {"no_decoder_final_norm": True})),
        ("OPT", lambda: language_model({"decoder_input_dim": 8, "decoder_output_dim": 8})),
    ],
)
def test_the_layout_keeps_the_logits(layout, make, tmp_path):
    name, check = write_huggingface(make(), tmp_path)
    assert name.startswith(layout)
    assert 1 < check.max_logit and check.max_difference < 1e-5 * check.max_logit


@pytest.mark.parametrize(
    "settings, named",
    [
        *(({"_name": arch}, arch) for arch in ("awd_lstm_wt2", "transformer_xl_wt103", "fconv")),
        ({"_name": "transformer_mos", "output_head": "mos"}, "--output-head mos"),
        ({"_name": "transformer_lm", "adaptive_softmax_cutoff": "9"}, "adaptive-softmax-cutoff"),
    ],
)
def test_other_architectures_and_heads(settings, named, tmp_path):
    with pytest.raises(UnsupportedError, match=named):
        write_huggingface({"cfg": {"model": settings}, "model": {}}, tmp_path)


@pytest.mark.parametrize("arch", ["lstm", "lstm_lm", "roberta", "transformer_align"])
def test_a_model_of_another_kind_is_refused_by_its_architecture(arch, tmp_path):
    """LSTMs have clusters of an adaptive softmax among their settings, whatever their loss is."""
    settings = {"_name": arch, "adaptive_softmax_cutoff": "9"}
    checkpoint = {"cfg": {"model": settings}, "model": {}}
    refusing = [lambda: write_huggingface(checkpoint, tmp_path)]
    refusing.append(lambda: export_ctranslate2.check_model(checkpoint))
    for refuse in refusing:
        with pytest.raises(UnsupportedError, match=f"{arch!r}") as caught:
            refuse()
        assert "--to" not in caught.value.remedy


def fewer_words_written():
    """As with ``--output-dictionary-size``."""
    checkpoint = language_model()
    name = "decoder.output_projection.weight"
    model = {**checkpoint["model"], name: checkpoint["model"][name][:30]}
    return {**checkpoint, "model": model}


HEADS = {"encoder_attention_heads": 2}
# Property -> a model that has it, and what names it where transformers has no layout for it.
PROPERTIES = {
    "no decoder final norm": (
        lambda: translation(37, 37, BEFORE, {"no_decoder_final_norm": True}, HEADS),
        "no-decoder-final-norm",
    ),
    "mixed norms": (lambda: translation(37, 37, {"encoder_normalize_before": True}, HEADS), ""),
    "mixed kinds": (
        lambda: translation(37, 37, {"decoder_learned_pos": True}, HEADS),
        "different kinds",
    ),
    "learned positions": (lambda: translation(37, 37, LEARNED, HEADS), "learned positions"),
    "dictionaries": (lambda: translation(30, 37, BEFORE, HEADS), "different sizes"),
    "no positions": (
        lambda: translation(37, 37, {"no_token_positional_embeddings": True}, HEADS),
        "",
    ),
    "attention heads": (lambda: translation(37, 37, LEARNED), "learned positions"),
    "tanh": (lambda: translation(37, 37, {"activation_fn": "tanh"}, HEADS, TIED), ""),
    "cross and self attention": (
        lambda: translation(37, 37, {"cross_self_attention": True}, HEADS),
        "",
    ),
    "no cross attention": (lambda: translation(37, 37, {"no_cross_attention": True}, HEADS), ""),
    "language model's norms": (lambda: language_model(EMBEDDING_NORM), "layernorm-embedding"),
    "language model's input": (
        lambda: language_model({"decoder_input_dim": 8}),
        "output-dim that differ",
    ),
    "language model's positions": (
        lambda: language_model({"no_token_positional_embeddings": True}),
        "",
    ),
    "adaptive softmax": (
        lambda: language_model({"adaptive_softmax_cutoff": "9,20"}),
        "adaptive-softmax-cutoff",
    ),
    "fewer words": (fewer_words_written, "output-dictionary-size"),
    "language model's tanh": (lambda: language_model({"activation_fn": "tanh"}), ""),
}


OF_FAIRSEQ_ALONE = (
    *("cross and self attention", "no cross attention", "adaptive softmax", "fewer words"),
)


def write_ctranslate2(checkpoint, folder):
    """With dictionaries that are made up."""
    export_ctranslate2.check_model(checkpoint)
    task = task_like(plain_checkpoint(checkpoint)["model"])
    translates = any(key.startswith("encoder.") for key in checkpoint["model"])
    data, languages = folder / "data", ("source", "target") if translates else None
    data.mkdir()
    task.source_dictionary.save(str(data / ("dict.source.txt" if translates else "dict.txt")))
    task.target_dictionary.save(str(data / "dict.target.txt"))
    (folder / "model").mkdir()
    export_ctranslate2.write_ctranslate2(checkpoint, folder / "model", data, languages)


TARGETS = {"huggingface": export_huggingface.write_huggingface, "ctranslate2": write_ctranslate2}


def as_trained(checkpoint, ours):
    """The settings of a training, by an arch of this package or by fairseq's own."""
    model = checkpoint["cfg"]["model"]
    translates = model["_name"] == "transformer"
    limits = {"add_bos_token": False, "tokens_per_sample": 30, "max_target_positions": 30}
    name = "translation" if translates else "language_modeling"
    checkpoint["cfg"].update(task={"_name": name, **limits}, common={"tpu": False})
    if ours:
        model.update(embedding_type="plain", output_head="softmax")
        model["_name"] += "_sc"
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("refused", PROPERTIES)
def test_a_refusal_lists_the_other_formats(refused, ours, tmp_path):
    pytest.importorskip("ctranslate2")
    if "weights_only" not in inspect.signature(torch.load).parameters:
        pytest.skip("ctranslate2 reads fairseq's checkpoints with torch 1.13 or newer")
    make, named = PROPERTIES[refused]
    checkpoint = as_trained(make(), ours)
    refusing = []
    if ours:
        export_checkpoint(checkpoint)
    for target, converter in TARGETS.items():
        folder = tmp_path / target
        folder.mkdir()
        try:
            converter(checkpoint, folder)
        except UnsupportedError as error:
            refusing.append(target)
            assert target != "huggingface" or named in str(error)
            assert target != "huggingface" or not list(folder.iterdir())
            others = {*TARGETS, "fairseq"} - {target}
            if refused in OF_FAIRSEQ_ALONE:
                others = {"fairseq"}
            assert {
                other for other in (*TARGETS, "fairseq") if f"--to {other}" in error.remedy
            } == others
    assert refusing  # a property that nothing refuses is none for this test
    assert not named or "huggingface" in refusing


@pytest.mark.parametrize("flag", ["scale_fc", "scale_attn", "scale_heads", "scale_resids"])
def test_flags_that_language_models_ignore_are_no_obstacle_to_ctranslate2(flag, tmp_path):
    """fairseq has no such weights there; the converter asked for them: "Missing key(s)"."""
    pytest.importorskip("ctranslate2")
    if "weights_only" not in inspect.signature(torch.load).parameters:
        pytest.skip("ctranslate2 reads fairseq's checkpoints with torch 1.13 or newer")
    write_ctranslate2(as_trained(language_model({flag: True}), ours=False), tmp_path)
    assert (tmp_path / "model" / "model.bin").exists()
