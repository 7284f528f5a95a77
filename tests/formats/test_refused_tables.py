"""No other table is measured than the one that was asked for: it is found, or refused by name."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from spectral_fairseq.analysis import analyze
from spectral_fairseq.errors import CheckpointError, DataError
from tests.formats.test_several import INPUT, OUTPUT, is_table, measured, refused
from tests.formats.test_untrusted import entry, safetensors_bytes

DECODER = "decoder.embeddings.make_embedding.emb_luts.0.weight"
NONE_STORED = "No output layer is stored"

# What training loops save: the output layer lies in a dictionary of its own.
HOLDERS = {
    "OpenNMT-py": {"model": {DECODER: INPUT}, "generator": {"0.weight": OUTPUT}, "optim": {}},
    "nested": {
        "model": {"decoder": {"embed_tokens": {"weight": INPUT}}},
        "head": {"weight": OUTPUT},
    },
    "without a holder": {"decoder": {"embed.weight": INPUT}, "generator": {"weight": OUTPUT}},
    "in a list": {"state_dict": {"embed.weight": INPUT}, "heads": [{"lm_head.weight": OUTPUT}]},
    "bare": {"state_dict": {"wte.weight": INPUT}, "lm_head": OUTPUT},
    "arrays": {"params": {"wte": INPUT.numpy(), "lm_head": OUTPUT.numpy()}, "words": np.array("a")},
    "in one holder": {"model": {"embed_tokens.weight": INPUT}, "module": {"output.weight": OUTPUT}},
}


@pytest.mark.parametrize("form", HOLDERS)
def test_the_output_layer_in_a_second_dictionary(form, tmp_path):
    torch.save(HOLDERS[form], tmp_path / "file.pt")
    for model in (tmp_path / "file.pt", HOLDERS[form]):
        found = measured(model)
        assert is_table(found, OUTPUT) and NONE_STORED not in found["table"]["choice"]


def test_copies_and_moments_are_no_second_tables():
    weights = {"module.wte.weight": INPUT}
    saved = {
        "model": weights,
        "model_ema": {"wte.weight": OUTPUT},
        "optimizer": {"state": {0: {"exp_avg": OUTPUT}}},
        "loss": torch.tensor(0.4),
    }
    found = measured(saved)
    assert found["table"]["name"] == "module.wte" and is_table(found, INPUT)
    assert "Not measured" not in found["table"]["choice"]


def packed(*shape):
    return torch.randint(0, 99, shape, dtype=torch.int32)


# What torch 1.12 makes of some layers is no tensor at all, and is refused as such.
OLD_TORCH = "" if hasattr(torch, "float8_e4m3fn") else "the object|"
BYTES = torch.zeros(600, 1, dtype=torch.uint8)
FOUR_BITS = torch.zeros(200, 6, dtype=torch.complex64)
if hasattr(torch, "float4_e2m1fn_x2"):
    FOUR_BITS = torch.zeros(200, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
QUANTIZED = {
    "GPTQ": {"lm_head.qweight": packed(1, 200), "lm_head.scales": torch.ones(1, 200)},
    "AWQ": {"lm_head.qweight": packed(6, 25), "lm_head.qzeros": packed(1, 25)},
    "bitsandbytes, 4 bits": {"lm_head.weight": BYTES, "lm_head.weight.absmax": torch.ones(19)},
    "bitsandbytes, 8 bits": {
        "lm_head.weight": packed(200, 6).to(torch.int8),
        "lm_head.SCB": torch.ones(200),
    },
    "quanto": {"output.weight._data": packed(200, 6).to(torch.int8)},
    "compressed-tensors": {"lm_head.weight_packed": packed(200, 1)},
    "eight bits": {"lm_head.weight": OUTPUT.to(getattr(torch, "float8_e4m3fn", torch.complex64))},
    "four bits": {"lm_head.weight": FOUR_BITS},
    "weight normalisation": {
        "output.parametrizations.weight.original0": torch.ones(200, 1),
        "output.parametrizations.weight.original1": OUTPUT,
    },
    "torch's older weight normalisation": {"generator.0.weight_v": OUTPUT},
    "sparse": {"lm_head.weight": OUTPUT.to_sparse()},
    "a codebook": {"lm_head.codes": packed(200, 2, 1), "lm_head.codebooks": torch.ones(2, 9, 3)},
}


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("where", ["file", "safetensors", "memory"])
def test_an_output_layer_that_cannot_be_read_is_named(where, form, tmp_path):
    model = {"model.embed_tokens.weight": INPUT.half(), **QUANTIZED[form]}
    name = next(iter(QUANTIZED[form])).split(".")[0]
    path = tmp_path / ("model.safetensors" if where == "safetensors" else "file.pt")
    if where == "safetensors":
        if form == "sparse":
            pytest.skip("safetensors has no sparse tensors")
        pytest.importorskip("safetensors.torch").save_file(model, path)
    elif where == "file":
        if form == "sparse" and OLD_TORCH:
            pytest.skip("this torch stores no sparse tensor that is read safely")
        torch.save(model, path)
    model = model if where == "memory" else path
    with pytest.raises((CheckpointError, DataError), match=name):
        analyze(model)
    found = measured(model, table="model.embed_tokens")
    assert is_table(found, INPUT.half()) and NONE_STORED not in found["table"]["choice"]


@pytest.mark.parametrize("by_index", [True, False])
def test_numbers_of_a_type_that_torch_lacks_are_named(by_index, tmp_path):
    pytest.importorskip("safetensors", minversion="0.6")
    content = entry([200, 6], 0, 900), {**entry([200, 6], 900, 5700), "dtype": "F32"}
    header = {"lm_head.weight": {**content[0], "dtype": "F6_E2M3"}, "wte.weight": content[1]}
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(header, data=bytes(900) + INPUT.numpy().tobytes()))
    if by_index:
        path = path.rename(tmp_path / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(header, path.name)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path, "lm_head.weight: numbers of type F6_E2M3")
    assert is_table(measured(tmp_path, table="wte"), INPUT)


def with_config(folder, tensors, **config):
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_settings_that_say_that_the_tables_are_not_shared(tmp_path):
    tensors = {"model.embed_tokens.weight": INPUT}
    folder = with_config(
        tmp_path, tensors, architectures=["LlamaForCausalLM"], tie_word_embeddings=False
    )
    refused(folder, "the output layer of LlamaForCausalLM")
    # A model without its head has none; nor may the report say that it shares the table.
    with_config(tmp_path, tensors, architectures=["LlamaModel"], tie_word_embeddings=False)
    choice = measured(tmp_path)["table"]["choice"]
    assert "a table of its own, which is not stored" in choice and NONE_STORED not in choice
    with_config(tmp_path, tensors, architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    assert "the output layer shares it" in measured(tmp_path)["table"]["choice"]


@pytest.mark.parametrize("nested", [True, False])
def test_copies_of_a_tied_table_that_differ(nested, tmp_path):
    """transformers takes the one, the other, or does not share them, depending on its version."""
    names = "model.embed_tokens.weight", "lm_head.weight"

    def folder(output, tied):
        config = {"tie_word_embeddings": tied, "vocab_size": 200}
        config = {"text_config": config} if nested else config
        return with_config(tmp_path, dict(zip(names, (INPUT, output))), **config)

    found = measured(folder(INPUT.clone(), True))
    assert is_table(found, INPUT)
    folder(OUTPUT, True)
    with pytest.raises(CheckpointError, match="lm_head to equal model.embed_tokens.*tie_word"):
        analyze(tmp_path)
    assert is_table(measured(tmp_path, table="lm_head"), OUTPUT)
    # Of other sizes it is no copy, and two parameters of a model in memory are two.
    assert is_table(measured(folder(OUTPUT[:, :5].clone(), True)), OUTPUT[:, :5])
    assert is_table(measured(folder(OUTPUT, False)), OUTPUT)


def quantized(layer):
    return torch.ao.quantization.quantize_dynamic(
        nn.Sequential(layer), {nn.Linear}, dtype=torch.qint8
    )[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "form",
    [nn.utils.spectral_norm, nn.utils.weight_norm, quantized],
    ids=lambda form: form.__name__,
)
def test_an_output_layer_in_memory_that_cannot_be_read_is_named(form, tmp_path):
    model = nn.ModuleDict({"wte": nn.Embedding(200, 6), "lm_head": form(nn.Linear(6, 200))})
    torch.save(model.state_dict(), tmp_path / "file.pt")
    for one in (model, tmp_path / "file.pt"):
        refused(one, f"found ({OLD_TORCH}lm_head)")


@pytest.mark.parametrize(
    "name", ["to_logits.weight", "linear_out.weight", "fc.weight", "W_out", "decoder.logits.weight"]
)
def test_an_output_layer_of_another_name(name):
    others = {
        "layers.0.fc.weight": torch.randn(200, 6),  # as wide as there are words
        "pos_emb.weight": torch.randn(200, 6),
        "norm.weight": torch.ones(6),
    }
    found = measured({"embed_tokens.weight": INPUT, name: OUTPUT, **others})
    assert is_table(found, OUTPUT) and "the table of the output layer" in found["table"]["choice"]
    alone = measured({"embed_tokens.weight": INPUT, **others})
    assert is_table(alone, INPUT) and NONE_STORED in alone["table"]["choice"]


GPT_J = {f"transformer.h.{n}.mlp.fc_out.weight": torch.randn(6, 24) for n in range(3)}
OPT_LIKE = {f"decoder.layers.{n}.output_layer.weight": torch.randn(24, 6) for n in range(2)}
OTHERS = {
    "GPT-J": GPT_J,
    "one layer": {"transformer.h.0.mlp.fc_out.weight": torch.randn(6, 24)},
    "tall": OPT_LIKE,
    "of an image": {"vision.proj_out.weight": torch.randn(30, 6)},
    "a classifier": {"decoder.weight": torch.randn(12, 6), "head.weight": torch.randn(9, 6)},
}


@pytest.mark.parametrize("form", OTHERS)
@pytest.mark.parametrize("tied", [True, False])
def test_layers_that_share_a_name_with_output_layers(tied, form):
    model = {"transformer.wte.weight": INPUT, **OTHERS[form]}
    if not tied:
        model["lm_head.weight"] = OUTPUT
    found = measured(model)
    assert is_table(found, INPUT if tied else OUTPUT)
    assert not any(key in found["table"]["choice"] for key in ("mlp", "layers", "vision", "head."))


def test_arrays_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "file.npz"
    half = INPUT.numpy().astype(np.float16).view("V2")
    np.savez(path, large=half, small=OUTPUT[:50].numpy())
    refused(path, r"large: numbers of .*V2")
    found = measured(path, table="small")
    assert is_table(found, OUTPUT[:50]) and "Not readable: large." in found["table"]["choice"]
    refused(path, "large: numbers of", table="large")
    np.savez(path, wte=INPUT.numpy(), lm_head=half)
    refused(path, "lm_head: numbers of")
    np.savez(path, wte=OUTPUT.numpy(), lm_head=INPUT.numpy().astype(">f4"))
    refused(path, "lm_head: numbers of >f4")
    words = np.array([["a", 1]] * 200, dtype=object)
    np.savez(path, words=words[:, 0], table=INPUT.numpy())
    assert is_table(measured(path), INPUT)
    np.savez(path, words=words, table=INPUT.numpy())
    refused(path, "words: Python objects, which are never read")


LORA = {"lm_head.lora_A.weight": torch.randn(8, 6), "lm_head.lora_B.weight": torch.randn(200, 8)}
ADAPTED = {
    "a file of peft": {f"base_model.model.{name}": one for name, one in LORA.items()},
    "of the embedding": {"model.embed_tokens.lora_embedding_A": torch.randn(8, 200)},
    "beside a saved input": {**LORA, "embed_tokens.weight": INPUT},
    "not merged": {
        **{name.replace(".weight", ".default.weight"): one for name, one in LORA.items()},
        "lm_head.base_layer.weight": OUTPUT,
        "embed_tokens.weight": INPUT,
    },
    "in the layer itself": {"lm_head.weight": OUTPUT, "lm_head.lora_A": torch.randn(2, 6)},
    "trainable tokens": {
        "lm_head.base_layer.weight": OUTPUT,
        "lm_head.trainable_tokens_delta.default": torch.randn(3, 6),
    },
}


@pytest.mark.parametrize("form", ADAPTED)
def test_adapters_are_refused_by_name(form, tmp_path):
    path = tmp_path / "adapter_model.bin"
    torch.save(ADAPTED[form], path)
    for model in (path, ADAPTED[form]):
        refused(model, "an adapter.*(lm_head|embed_tokens).*Merge it")
    if "lm_head.base_layer.weight" in ADAPTED[form]:
        assert is_table(measured(path, table="lm_head.base_layer"), OUTPUT)


def test_adapters_of_other_layers_change_no_table():
    layers = {f"layers.0.q_proj.lora_{side}.weight": torch.randn(8, 6) for side in "AB"}
    assert is_table(measured({**layers, "lm_head.weight": OUTPUT}), OUTPUT)


class Adapted(nn.Module):
    """A layer as peft wraps it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 200, bias=False)})
        self.lora_embedding_A = nn.ParameterDict()
        self.active_adapters, self.merged, self.disable_adapters = ["default"], False, False

    def get_delta_weight(self, adapter):
        return 2.0 * self.lora_B[adapter].weight @ self.lora_A[adapter].weight


def test_a_table_that_lora_changes_is_measured_as_it_is_used():
    model = nn.ModuleDict({"lm_head": Adapted(nn.Linear(6, 200))})
    layer = model["lm_head"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    base = layer.base_layer.weight.detach()
    assert is_table(measured(model), base + layer.get_delta_weight("default").detach())
    layer.disable_adapters = True
    assert is_table(measured(model), base)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    del layer.lora_A, layer.lora_B  # as LoHa, whose change is computed otherwise
    layer.disable_adapters = False
    layer.trainable_tokens_delta = nn.Parameter(torch.randn(3, 6))
    refused(model, "an adapter")


@pytest.mark.parametrize("form", ["safetensors", "torch", "npz", "memory"])
def test_a_static_table_in_clusters_is_refused(form, tmp_path):
    """model2vec stores the centres of clusters of words, and the cluster of each word."""
    model = {"embeddings": INPUT[:60].clone(), "mapping": torch.arange(400) * 7 % 60}
    path = tmp_path / "model.safetensors"
    if form == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(model, path)
    elif form == "torch":
        path = tmp_path / "file.pt"
        torch.save(model, path)
    elif form == "npz":
        path = tmp_path / "file.npz"
        np.savez(path, **{name: one.numpy() for name, one in model.items()})
    for table in (None, "embeddings"):
        refused(model if form == "memory" else path, "centres of clusters", table=table)
