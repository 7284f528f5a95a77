"""Transformers: presets, sharing, restoring plain checkpoints, and language models."""

import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.options import get_training_parser, parse_args_and_arch

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.plugin.find import find_svd_tables
from tests.plugin import conftest
from tests.plugin.conftest import (
    SCRIPTS,
    any_model,
    build_model,
    make_sample,
    parameters_in_use,
)

KINDS = {"sc": "svd", "wn": "weight-norm", "mos": "plain"}
SIZES = ("", "_iwslt_de_en", "_wmt_en_de", "_vaswani_wmt_en_de_big", "_wmt_en_de_big_t2t")
SAME_SIZES = [
    *((f"transformer_{kind}{size}", f"transformer{size}") for kind in KINDS for size in SIZES),
    *((f"transformer_lm_{kind}", "transformer_lm") for kind in KINDS),
    *((f"transformer_lm_{kind}_gpt", "transformer_lm_gpt") for kind in ("sc", "wn")),
]


@pytest.mark.parametrize("ours, theirs", SAME_SIZES)
def test_presets_have_the_sizes_of_the_hosts(ours, theirs):
    filled = {}
    for arch in (ours, theirs):
        args = SimpleNamespace()
        ARCH_CONFIG_REGISTRY[arch](args)
        filled[arch] = vars(args)
    assert {k: v for k, v in filled[ours].items() if k != "embedding_type"} == filled[theirs]
    model = ARCH_MODEL_NAME_REGISTRY[ours]
    assert model == re.match("transformer(_lm)?_(sc|wn|mos)", ours).group()
    assert ARCH_MODEL_REGISTRY[ours].config().embedding_type == KINDS[model.rpartition("_")[2]]


@pytest.mark.slow
@pytest.mark.parametrize("arch, sigma", [
    *((arch, 0.1) for arch in ("transformer_sc_iwslt_de_en", "transformer_lm_mos")),
    *((arch, 0.1) for arch in ("transformer_lm_sc", "transformer_xl_wt103_small")),
    *((arch, 0.5) for arch in ("awd_lstm_wt2", "lstm_mos")),
])  # fmt: skip
def test_how_long_vectors_are_at_first_depends_on_the_model(arch, sigma):
    argv = ["data", "--task", "stateful_language_modeling", "--arch", arch]
    for given, expected in (((), sigma), (("--weight-norm-init-sigma", "0.3"), 0.3)):
        parsed = parse_args_and_arch(get_training_parser(), [*argv, *given])
        assert convert_namespace_to_omegaconf(parsed).model.weight_norm_init_sigma == expected


def test_decoder_follows_the_encoder_width_as_in_the_host():
    args = SimpleNamespace(encoder_embed_dim=64)
    ARCH_CONFIG_REGISTRY["transformer_sc"](args)
    assert args.decoder_embed_dim == 64


@pytest.mark.parametrize("options, count, encoder_is_svd", [
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
])  # fmt: skip
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


@pytest.mark.parametrize("sharing", [
    {"share_all_embeddings": True},
    {"share_all_embeddings": False, "share_decoder_input_output_embed": True},
    {"share_all_embeddings": False},
])  # fmt: skip
@pytest.mark.parametrize("tables", ["output", "all"])
@pytest.mark.parametrize("kind", ["svd", "weight-norm"])
def test_a_plain_checkpoint_restores_exactly(task, sharing, tables, kind):
    plain = build_model(task, "transformer_sc", embedding_type="plain", **sharing).eval()
    with torch.no_grad():  # after training the padding row of a tied plain table is not zero
        plain.decoder.output_projection.weight[task.target_dictionary.pad()] += 0.5
    options = {"embedding_type": kind, "embedding_tables": tables, **sharing}
    model = build_model(task, seed=2, **options).eval()
    model.load_state_dict(plain.state_dict(), strict=True)
    sample = make_sample(task)
    expected, actual = (m(**sample["net_input"])[0] for m in (plain, model))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, table", [
    ("svd", {}), *(("mos", {"embedding_type": kind}) for kind in conftest.KINDS),
])  # fmt: skip
def test_a_checkpoint_of_ours_restores_bit_for_bit(task, name, table):
    model, other = (any_model(task, name, seed=seed, **table).eval() for seed in (1, 2))
    model.load_state_dict(model.state_dict())  # which changes fairseq 0.12.2's rounding
    other.load_state_dict(model.state_dict(), strict=True)
    sample = make_sample(task)
    assert torch.equal(model(**sample["net_input"])[0], other(**sample["net_input"])[0])


@pytest.mark.parametrize("name", conftest.OUR_MODELS)
def test_a_model_can_be_pickled(task, name):
    """As ``torch.save(model)`` and processes that are started anew do."""
    model = any_model(task, name)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    expected, actual = model.state_dict(), again.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


def test_pickle_finds_every_model():
    ours = [kind for kind in ARCH_MODEL_REGISTRY.values() if "spectral_fairseq" in kind.__module__]
    assert len(ours) > 20
    assert all(pickle.loads(pickle.dumps(kind)) is kind for kind in ours)


@pytest.mark.slow
@SCRIPTS
@pytest.mark.parametrize("name", ["svd", "mos"])
def test_torchscript_compiles_and_agrees(task, name):
    model = any_model(task, name).eval()
    sample = make_sample(task)
    inputs = sample["net_input"]
    scripted = torch.jit.script(model)
    expected = model(**inputs)[0]
    actual = scripted(inputs["src_tokens"], inputs["src_lengths"], inputs["prev_output_tokens"])[0]
    torch.testing.assert_close(actual, expected)


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


def test_importing_and_registering_again_changes_nothing():
    import spectral_fairseq

    before = dict(ARCH_MODEL_REGISTRY)
    spectral_fairseq.plugin.register()
    assert before == ARCH_MODEL_REGISTRY
