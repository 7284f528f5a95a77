"""Which table a checkpoint has, read from every form of storage."""

import json

import pytest
import torch
from torch import nn

from spectral_fairseq.analysis import analyze
from spectral_fairseq.embeddings import TABLES, PlainEmbedding
from spectral_fairseq.embeddings.entries import same_table
from spectral_fairseq.errors import CheckpointError, DataError
from spectral_fairseq.heads import MixtureOfSoftmaxes
from spectral_fairseq.training import mixture_
from tests.checkpoints.made import (
    NAME,
    chosen,
    cone,
    entries,
    extracted,
    matrices,
    save,
    with_padding,
)


@pytest.mark.parametrize("kind", [table.kind for table in TABLES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_kind_of_storage_gives_the_same_table(kind, dtype):
    rows = cone(53, 7)
    stored = {
        key: value.to(dtype) if value.dim() else value
        for key, value in entries(with_padding(rows), kind).items()
    }
    table = extracted(stored)
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(table.weight.float(), rows, rtol=tolerance, atol=tolerance)
    assert table.weight.dtype == (dtype if kind == "plain" else torch.float32)
    assert table.kind == kind
    assert table.dtype == str(dtype)[6:]
    assert table.rows.tolist() == [0, *range(2, 54)]


def test_factors_of_an_svd_table():
    stored = entries(with_padding(cone(53, 7)), "svd")
    table = extracted(stored)
    assert all(0 <= value < 1e-4 for value in table.orthogonality.values())
    expected = torch.linalg.svdvals(table.weight.double())
    torch.testing.assert_close(table.stored_sigma, expected, rtol=1e-4, atol=1e-6)
    # U'U = 4 I, V'V = I - e1 e1': known distances.
    stored[f"{NAME}.U"] *= 2
    stored[f"{NAME}.V"][:, 0] = 0
    found = extracted(stored).orthogonality
    assert found["u_frobenius"] == pytest.approx(3 * 7**0.5, rel=1e-4)
    assert found["u_spectral"] == pytest.approx(3, rel=1e-4)
    assert found["v_frobenius"] == pytest.approx(1, rel=1e-4)
    assert found["v_spectral"] == pytest.approx(1, rel=1e-4)


def test_bare_matrices_beside_each_other():
    """Marian's files have no modules, and all matrices in one place."""
    names = ("encoder_Wemb", "decoder_Wemb", "decoder_ff_logit_out_W")
    model = {name: cone(seed=seed) for seed, name in enumerate(names)}
    assert matrices(model).tables == [[name] for name in names]
    assert chosen(model) == ["decoder_ff_logit_out_W"]


def test_shared_tables_are_one():
    weight = with_padding(cone())
    model = {
        "encoder.embed_tokens.weight": weight,
        "encoder.embed_positions.weight": torch.randn(99, 6),
        "encoder.layers.0.fc1.weight": torch.randn(24, 6),
        "decoder.embed_tokens.weight": weight,
        "decoder.output_projection.weight": weight.clone(),
    }
    names = ["encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"]
    assert matrices(model).tables == [names]
    assert chosen(model)[0] == "decoder.embed_tokens"  # which users know
    model["decoder.output_projection.weight"][5] += 1
    assert len(matrices(model).tables) == 2


@pytest.mark.parametrize(
    "key", ["decoder.embed_out", "decoder.fc_out.weight", "encoder.lm_head.weight", "fc3.weight"]
)
def test_names_of_other_architectures(key):
    rows = cone()
    table = extracted({key: with_padding(rows), "bias": torch.ones(3)})
    assert torch.equal(table.weight, rows)


def several():
    return {
        **entries(with_padding(cone(seed=1)), "svd", "encoder.embed_tokens"),
        **entries(with_padding(cone(seed=2)), "plain", "decoder.embed_tokens"),
        "decoder.output_projection.weight": with_padding(cone(seed=3)),
        "encoder.other.weight": with_padding(cone(seed=4)),
    }


def test_a_mixture_has_one_table():
    table = PlainEmbedding(30, 5, 1)
    model = {f"decoder.embed_tokens.{k}": v for k, v in table.state_dict().items()}
    head = MixtureOfSoftmaxes(table, 7, 3, bias=True)
    model.update({f"decoder.output_projection.{k}": v for k, v in head.state_dict().items()})
    names = ["decoder.embed_tokens", "decoder.output_projection.table"]
    assert chosen(model) == names


def test_prior_and_contexts_of_a_mixture_are_no_tables():
    """They were found beside the table, so that a model with ``mixture_`` could not be measured."""
    model = nn.Module()
    model.embed, model.lm_head = nn.Embedding(60, 4), nn.Linear(4, 60, bias=False)
    mixture_(model, 20, shift=True)  # contexts of 80 x 4: more rows than columns
    state = {name: one.detach() for name, one in model.state_dict().items()}
    assert chosen(state) == ["lm_head"]


def test_the_output_table_is_the_default():
    model = several()
    assert chosen(model) == ["decoder.output_projection"]
    # Tied, as with --share-decoder-input-output-embed.
    model["decoder.output_projection.weight"] = model["decoder.embed_tokens.weight"]
    tied = ["decoder.embed_tokens", "decoder.output_projection"]
    assert chosen(model) == tied
    # Tied, but saved by an old version, which does not store the output layer.
    del model["decoder.output_projection.weight"]
    assert chosen(model) == ["decoder.embed_tokens"]


def test_several_tables_need_a_choice():
    model = several()
    model["second.output_projection.weight"] = with_padding(cone(seed=5))
    with pytest.raises(CheckpointError) as caught:
        chosen(model)
    message = str(caught.value)
    assert "--table" in message and "encoder.embed_tokens, svd, 61 x 6" in message
    for wanted, seed in (
        ("encoder", 1),
        ("decoder.embed_tokens", 2),
        ("decoder.output", 3),
        ("encoder.other", 4),
        ("encoder.other.weight", 4),
    ):
        table = extracted(model, wanted)
        torch.testing.assert_close(table.weight, cone(seed=seed), rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="--table"):
        chosen(model, "decoder")
    with pytest.raises(CheckpointError, match="'nothing'"):
        chosen(model, "nothing")


def test_no_table():
    with pytest.raises(CheckpointError, match="--table NAME.*matrices are some.0.weight"):
        chosen({f"some.{n}.weight": torch.ones(3, 2) for n in range(2)})


def test_tables_that_cannot_be_measured():
    with pytest.raises(DataError, match="N = 5 words.*d = 6"):
        extracted(entries(torch.randn(6, 6)))
    for bad in (float("nan"), float("inf")):
        weight = with_padding(cone())
        weight[4, 2] = bad
        with pytest.raises(DataError, match="NaN in 1 of 60 rows"):
            extracted(entries(weight))
    weight[4, 2] = 0
    weight[1] = float("nan")  # padding does not count
    assert torch.isfinite(extracted(entries(weight)).weight).all()


@pytest.mark.parametrize("excluded, first", [([], 0), ([0, 1], 2), ([18, 19], 0), ([0, 19], 1)])
def test_a_plain_table_is_not_copied(excluded, first):
    stored = cone(20, 3).bfloat16()
    table = extracted({f"{NAME}.weight": stored}, excluded=excluded)
    assert table.weight.data_ptr() == stored[first].data_ptr()
    assert len(table.weight) == 20 - len(excluded)


def test_excluded_rows():
    table = extracted(entries(cone(20, 3)), excluded=[1, 18, 19, 25])
    assert table.rows.tolist() == [0, *range(2, 18)]


def _lying(inputs, outputs):
    """Models whose output layer is stored as d x N, as flax, Marian and Conv1D have it."""
    across = outputs.t().contiguous()
    return {
        "flax": {"transformer": {"wte": {"embedding": inputs}}, "lm_head": {"kernel": across}},
        "flax with parameters": {
            "params": {"shared": {"embedding": inputs}, "lm_head": {"kernel": across}}
        },
        "marian": {"Wemb": inputs, "decoder_ff_logit_out_W": across},
        "known name": {"wte.weight": inputs, "lm_head.weight": across},
        "common name": {"wte.weight": inputs, "output.weight": across},
        "kernel of a common name": {"wte.embedding": inputs, "head.kernel": across},
        "name not listed": {
            "shared.embedding": inputs,
            "decoder.logits_dense.kernel": across,
            "decoder.logits_dense.bias": torch.zeros(len(outputs)),
        },
    }


@pytest.mark.parametrize("stored", sorted(_lying(torch.zeros(2, 1), torch.zeros(2, 1))))
def test_an_output_layer_that_lies_the_other_way_round_is_measured(stored, tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = torch.randn(2, 300, 16, generator=generator).unbind()
    model = _lying(inputs, outputs + 0.7)[stored]
    torch.save(model, tmp_path / "model.pt")
    expected = analyze(outputs + 0.7).scalars()["mean_cosine"]
    for source in (model, tmp_path / "model.pt"):
        found = analyze(source)
        assert found.scalars()["mean_cosine"] == pytest.approx(expected, rel=1e-4)
        assert "stored as 16 x 300" in " ".join(str(found).split())


@pytest.mark.parametrize("name", ["fc.weight", "h.0.mlp.fc_out.weight", "lm_head.dense.weight"])
def test_other_matrices_are_not_turned(name):
    model = {"wte.weight": torch.randn(300, 16), name: torch.randn(16, 64)}
    model["lm_head.weight"] = torch.randn(300, 16)
    assert matrices(model).lying == []
    del model["lm_head.weight"]
    assert matrices(model).lying == []


def test_a_table_of_whole_numbers_is_refused():
    with pytest.raises(DataError, match="floating-point numbers.*lm_head.*int8"):
        extracted({"lm_head.weight": torch.zeros(30, 4, dtype=torch.int8)})


@pytest.mark.parametrize("length", [6, 60, 62, 0])
def test_lengths_that_do_not_fit_their_directions(length):
    stored = entries(with_padding(cone(60, 7)), "weight-norm")
    stored[f"{NAME}.g"] = torch.ones(length)
    with pytest.raises(CheckpointError, match="factors of a weight-norm table that fit together"):
        extracted(stored)


def test_copies_with_the_same_broken_rows_are_one_table():
    weight = with_padding(cone())
    weight[5, 1] = float("nan")
    names = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
    copies = {name: weight.clone() for name in names}
    assert len(matrices(copies).tables) == 1
    with pytest.raises(DataError, match="NaN in 1 of"):
        extracted(copies)


_FURTHER = [
    "model.layers.2.shared_head.head.weight",  # of DeepSeek-V3
    "model.layers.2.lm_head.weight",
    "mtp.0.output_layer.weight",
]


@pytest.mark.parametrize("further", _FURTHER)
def test_a_head_inside_a_layer_is_a_further_table(further):
    inputs, main, other = torch.randn(3, 120, 8).unbind()
    model = {
        "model.embed_tokens.weight": inputs,
        "model.layers.2.embed_tokens.weight": inputs + 1,
        further: other,
    }
    # Where no output layer stands beside the layers, the head is the only one known.
    assert chosen(model) == [further[: -len(".weight")]]
    assert chosen({**model, "lm_head.weight": main}) == ["lm_head"]
    assert len(matrices({**model, "lm_head.weight": main}).tables) == 4
    # Nor does it stand for an output layer that is not read.
    packed = {**model, "lm_head.qweight": torch.zeros(1, 120, dtype=torch.int32)}
    assert "lm_head.qweight" in matrices(packed).unread_outputs()


def test_the_tables_that_are_listed_are_those_that_are_counted():
    model = {f"{name}.weight": torch.randn(120, 8) for name in ("wte", "lm_head", "embed_out")}
    with pytest.raises(CheckpointError) as error:
        chosen(model)
    assert error.value.found == (
        "2: lm_head, plain, 120 x 8; embed_out, plain, 120 x 8 (others: wte, plain, 120 x 8)"
    )


def rows(seed, count=120, dim=8):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


# Matrices of models, the one that is measured, and what the report says of the output layer.
_NONE = "No output layer is stored: it shares a table, or there is none."
_BY_NAME = {
    "Nematus": (
        {"Wemb": rows(0), "Wemb_dec": rows(1), "ff_logit_W": rows(2).t(), "ff_logit_b": rows(3)[0]},
        "ff_logit_W",
        "the table of the output layer",
    ),
    "Nematus, of other sizes": (
        {"Wemb": rows(0, 90), "Wemb_dec": rows(1), "ff_logit_W": rows(2).t()},
        "ff_logit_W",
        "the table of the output layer",
    ),
    "Nematus, tied": (
        {"Wemb": rows(0), "Wemb_dec": rows(1), "ff_logit_b": rows(3)[0]},
        "Wemb_dec",
        "the table of the decoder's input. " + _NONE,
    ),
    "Nematus by TensorFlow": (
        {
            "encoder/embedding/embeddings": rows(0),
            "decoder/embedding/embeddings": rows(1),
            "decoder/next_word_predictor/hidden_to_logits/W": rows(2).t(),
        },
        "decoder.next_word_predictor.hidden_to_logits.W",
        "the table of the output layer",
    ),
    "t5x": (
        {
            "target/token_embedder/embedding": rows(0),
            "target/decoder/logits_dense/kernel": rows(1).t(),
        },
        "target.decoder.logits_dense.kernel",
        "the table of the output layer",
    ),
    "BERT of TensorFlow": (
        {"bert/embeddings/word_embeddings": rows(0), "bert/pooler/dense/kernel": rows(1, 8)},
        "bert.embeddings.word_embeddings",
        "the table of the input. " + _NONE,
    ),
    "a transducer": (
        {"predictor.embed.weight": rows(0), "joint_net.2.weight": rows(1, 125)},
        "predictor.embed",
        "it may be joint_net.2 (choose with --table)",
    ),
}


@pytest.mark.parametrize("form", _BY_NAME)
def test_the_table_and_what_is_said_of_the_output_layer(form):
    tensors, name, said = _BY_NAME[form]
    (found,) = analyze(tensors).to_dict()["checkpoints"]
    assert found["table"]["name"] == name and said in found["table"]["choice"]


@pytest.mark.parametrize("name", ["bert/embeddings/word_embeddings", "embeddings/word", "bert"])
def test_a_name_with_slashes_is_chosen_by_either_spelling(name):
    tensors = _BY_NAME["BERT of TensorFlow"][0]
    for wanted in (name, name.replace("/", ".")):
        assert chosen(tensors, wanted) == ["bert.embeddings.word_embeddings"]


def test_a_file_beside_may_hold_the_output_layer(tmp_path):
    """MLX numbers its files so, without an index."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"model.embed_tokens.weight": rows(0)}, tmp_path / "weights.00.safetensors")
    save_file({"lm_head.weight": rows(1)}, tmp_path / "weights.01.safetensors")
    (found,) = analyze(tmp_path / "weights.00.safetensors").to_dict()["checkpoints"]
    assert "weights.01.safetensors beside it may hold one" in found["table"]["choice"]
    (found,) = analyze(tmp_path / "weights.01.safetensors").to_dict()["checkpoints"]
    assert found["table"]["choice"] == "Measured: lm_head, the table of the output layer."


_TYPES = [(torch.bfloat16, torch.float32), (torch.float16, torch.float64)]


@pytest.mark.parametrize("narrow, wide", _TYPES)
@pytest.mark.parametrize("tied", [True, None])
def test_a_copy_in_another_type_with_the_same_numbers_is_the_same_table(
    tied, narrow, wide, tmp_path
):
    """peft's prepare_model_for_kbit_training writes the output layer of a tied model in float32."""
    table = rows(0).to(narrow)
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": table.to(wide)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    (found,) = analyze(tmp_path).to_dict()["checkpoints"]
    assert found["table"]["names"] == ["model.embed_tokens", "lm_head"]
    # Rounded numbers are others.
    tensors["lm_head.weight"] = rows(0).to(wide)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    if tied:
        with pytest.raises(CheckpointError, match="different values"):
            analyze(tmp_path)


def test_fairseqs_shared_copies_may_have_several_types(tmp_path):
    table = rows(0).half()
    names = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
    model = {"_name": "transformer_lm", "share_decoder_input_output_embed": True}
    path = save(tmp_path / "a.pt", dict(zip(names, (table, table.float()))), model=model)
    assert len(analyze(path).to_dict()["checkpoints"][0]["table"]["names"]) == 2


def test_many_tables_are_compared_only_where_they_may_be_equal(monkeypatch):
    """Each of 30,000 was compared with all others."""
    compared = []

    def counted(table, other):
        compared.append(1)
        return same_table(table, other)

    monkeypatch.setattr("spectral_fairseq.formats.matrices.same_table", counted)
    tensors = {f"block_{n}.embed_tokens.weight": rows(n, 8, 2) for n in range(600)}
    tensors["copy.embed_tokens.weight"] = tensors["block_7.embed_tokens.weight"].clone()
    found = matrices(tensors).tables
    assert len(found) == 600 and ["block_7.embed_tokens", "copy.embed_tokens"] in found
    assert len(compared) < 50
