"""Architectures built in the process: presets, sharing, restoring plain checkpoints, refusals."""

import re
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.options import get_training_parser, parse_args_and_arch

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.plugin.find import find_svd_tables
from tests.plugin.conftest import SCRIPTS, build_model, make_sample, parameters_in_use, words

KINDS = {"sc": "svd", "wn": "weight-norm"}
LM_SIZES = ("", "_gpt")
SIZES = ("", "_iwslt_de_en", "_wmt_en_de", "_vaswani_wmt_en_de_big", "_wmt_en_de_big_t2t")
SAME_SIZES = [
    *((f"transformer_{kind}{size}", f"transformer{size}") for kind in KINDS for size in SIZES),
    *((f"transformer_lm_{k}{size}", f"transformer_lm{size}") for k in KINDS for size in LM_SIZES),
]


@pytest.mark.parametrize("ours, theirs", SAME_SIZES)
def test_presets_have_the_sizes_of_the_hosts(ours, theirs):
    filled = {}
    for arch in (ours, theirs):
        args = SimpleNamespace()
        ARCH_CONFIG_REGISTRY[arch](args)
        filled[arch] = vars(args)
    shared = {k: v for k, v in filled[ours].items() if k != "embedding_type"}
    if theirs == "transformer_lm":  # a dataclass arch: fairseq fills nothing in
        from fairseq.models.transformer_lm import base_lm_architecture

        args = SimpleNamespace()
        base_lm_architecture(args)
        filled[theirs] = vars(args)
    assert shared == filled[theirs]
    model = ARCH_MODEL_NAME_REGISTRY[ours]
    assert model == re.match("transformer(_lm)?_(sc|wn)", ours).group()
    assert ARCH_MODEL_REGISTRY[ours].config().embedding_type == KINDS[model[-2:]]


@pytest.mark.parametrize(
    "arch, sigma",
    [
        *((arch, 0.1) for arch in ("transformer_sc_iwslt_de_en", "transformer_lm_mos")),
        *((arch, 0.1) for arch in ("transformer_lm_sc", "transformer_xl_wt103_small")),
        *((arch, 0.5) for arch in ("awd_lstm_wt2", "lstm_mos")),
    ],
)
def test_how_long_vectors_are_at_first_depends_on_the_model(arch, sigma):
    argv = ["data", "--task", "stateful_language_modeling", "--arch", arch]
    for given, expected in (((), sigma), (("--weight-norm-init-sigma", "0.3"), 0.3)):
        parsed = parse_args_and_arch(get_training_parser(), [*argv, *given])
        assert convert_namespace_to_omegaconf(parsed).model.weight_norm_init_sigma == expected


def test_decoder_follows_the_encoder_width_as_in_the_host():
    args = SimpleNamespace(encoder_embed_dim=64)
    ARCH_CONFIG_REGISTRY["transformer_sc"](args)
    assert args.decoder_embed_dim == 64


@pytest.mark.parametrize(
    "options, count, encoder_is_svd",
    [
        ({"share_all_embeddings": True}, 1, True),
        ({"share_all_embeddings": False, "share_decoder_input_output_embed": True}, 1, False),
        ({"share_all_embeddings": False}, 1, False),
        (
            {
                "share_all_embeddings": False,
                "share_decoder_input_output_embed": True,
                "embedding_tables": "all",
            },
            2,
            True,
        ),
        ({"share_all_embeddings": False, "embedding_tables": "all"}, 3, True),
    ],
)
def test_sharing(task, options, count, encoder_is_svd):
    model = build_model(task, **options).eval()
    assert len(find_svd_tables(model)) == count
    assert isinstance(model.encoder.embed_tokens, SVDEmbedding) == encoder_is_svd
    tied = options["share_all_embeddings"] or "share_decoder_input_output_embed" in options
    assert (model.decoder.output_projection.table is model.decoder.embed_tokens) == tied
    if options["share_all_embeddings"]:
        assert model.encoder.embed_tokens is model.decoder.embed_tokens
    sample = make_sample(task)
    logits, _ = model(**sample["net_input"])
    assert logits.shape == (3, 7, len(task.target_dictionary))
    # Every parameter takes part in the forward pass, as data-parallel training demands.
    model.train()
    model(**sample["net_input"])[0].logsumexp(-1).sum().backward()
    unused = [n for n, p in parameters_in_use(model).items() if p.grad is None]
    assert not unused


def test_output_layer_multiplies_by_the_shared_table(task):
    model = build_model(task).eval()
    sample = make_sample(task)
    features, _ = model(**sample["net_input"], features_only=True)
    expected = features.double() @ model.decoder.embed_tokens.weight.double().t()
    logits, _ = model(**sample["net_input"])
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "sharing",
    [
        {"share_all_embeddings": True},
        {"share_all_embeddings": False, "share_decoder_input_output_embed": True},
        {"share_all_embeddings": False},
    ],
)
@pytest.mark.parametrize("tables", ["output", "all"])
def test_a_plain_checkpoint_restores_exactly(task, sharing, tables):
    plain = build_model(task, "transformer_sc", embedding_type="plain", **sharing).eval()
    with torch.no_grad():  # after training the padding row of a tied plain table is not zero
        plain.decoder.output_projection.weight[task.target_dictionary.pad()] += 0.5
    model = build_model(task, seed=2, embedding_tables=tables, **sharing).eval()
    model.load_state_dict(plain.state_dict(), strict=True)
    sample = make_sample(task)
    expected, actual = (m(**sample["net_input"])[0] for m in (plain, model))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_ours_restores_bit_for_bit(task):
    model, other = build_model(task).eval(), build_model(task, seed=2).eval()
    model.load_state_dict(model.state_dict())  # which changes fairseq 0.12.2's rounding
    other.load_state_dict(model.state_dict(), strict=True)
    sample = make_sample(task)
    assert torch.equal(model(**sample["net_input"])[0], other(**sample["net_input"])[0])


@pytest.mark.slow
@SCRIPTS
def test_torchscript_compiles_and_agrees(task):
    model = build_model(task).eval()
    sample = make_sample(task)
    inputs = sample["net_input"]
    scripted = torch.jit.script(model)
    expected = model(**inputs)[0]
    actual = scripted(inputs["src_tokens"], inputs["src_lengths"], inputs["prev_output_tokens"])[0]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "options, flag",
    [
        ({"quant_noise_pq": 0.1}, "--quant-noise-pq"),
        ({"quant_noise_scalar": 0.1}, "--quant-noise-scalar"),
        ({"adaptive_input": True}, "--adaptive-input"),
        ({"adaptive_softmax_cutoff": [10, 20]}, "--adaptive-softmax-cutoff"),
    ],
)
def test_what_a_factored_table_cannot_take_is_refused(task, options, flag):
    with pytest.raises(UnsupportedError, match=flag):
        build_model(task, **options)


def test_a_separate_dictionary_cannot_be_shared(task):
    task.target_dictionary = words(30)
    with pytest.raises(
        ValueError, match="one dictionary for --share-all-embeddings.*--joined-dictionary"
    ):
        build_model(task)


def test_fewer_words_than_dimensions_is_refused(task):
    wide = {"encoder_embed_dim": 64, "decoder_embed_dim": 64, "decoder_output_dim": 64}
    with pytest.raises(ConfigurationError, match="N >= d"):
        build_model(task, **wide, decoder_input_dim=64)


@pytest.mark.parametrize("c1", ["large", "-1", "0"])
def test_bad_c1_is_refused(task, c1):
    with pytest.raises(ConfigurationError, match="--spectrum-c1"):
        build_model(task, spectrum_c1=c1)


def test_pretrained_vectors_fill_the_table(task, tmp_path):
    """--encoder-embed-path writes into ``weight.data`` on fairseq: a silent no-op on a product."""
    path = tmp_path / "vectors.txt"
    row = [float(i) for i in range(16)]
    path.write_text("1 16\nw3 " + " ".join(map(str, row)) + "\n")
    model = build_model(task, encoder_embed_path=str(path))
    index = task.source_dictionary.index("w3")
    torch.testing.assert_close(
        model.encoder.embed_tokens.weight[index], torch.tensor(row), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shared", [True, False])
def test_language_model(task, shared):
    options = {"share_decoder_input_output_embed": shared, "decoder_layers": 1}
    model = build_model(task, "transformer_lm_sc", **options).eval()
    assert len(find_svd_tables(model)) == 1
    tokens = make_sample(task)["target"]
    logits, _ = model(tokens)
    assert logits.shape == (*tokens.shape, len(task.target_dictionary))
    plain = build_model(task, "transformer_lm", **options).eval()
    model.load_state_dict(plain.state_dict(), strict=True)
    torch.testing.assert_close(model(tokens)[0], plain(tokens)[0], rtol=1e-4, atol=1e-5)


def test_language_model_shared_table_of_another_width_is_refused(task):
    with pytest.raises(ConfigurationError, match="--decoder-input-dim"):
        build_model(
            task, "transformer_lm_sc", share_decoder_input_output_embed=True, decoder_output_dim=8
        )


def test_importing_and_registering_again_changes_nothing():
    import spectral_fairseq

    before = dict(ARCH_MODEL_REGISTRY)
    spectral_fairseq.plugin.register()
    assert before == ARCH_MODEL_REGISTRY
