"""Models of transformers: the output table is found, from their folders and in memory."""

import pytest
import torch

from spectral_fairseq.formats.config import ModelConfig
from spectral_fairseq.formats.memory import open_memory
from spectral_fairseq.formats.opening import open_model
from spectral_fairseq.formats.table import read_table
from spectral_fairseq.formats.which_table import choose
from tests.training.models import BERT, GPT2, LLAMA, MARIAN, T5, made

SEQUENCE = {name: value for name, value in MARIAN.items() if not name.endswith("token_id")}
MARKED = {**SEQUENCE, "pad_token_id": 49, "decoder_start_token_id": 49, "eos_token_id": 0}
UNTIED = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
STACK = {name: value for name, value in LLAMA.items() if not name.endswith("token_id")}

# Class, its settings, name of the table in the file, row of the padding symbol.
KINDS = [
    ("T5ForConditionalGeneration", T5, "shared", [0]),
    ("BartForConditionalGeneration", SEQUENCE, "model.shared", [1]),
    ("MarianMTModel", MARKED, "model.shared", [49]),
    ("MarianMTModel", {**MARKED, **UNTIED, "decoder_vocab_size": 50}, "lm_head", [49]),
    ("GPT2LMHeadModel", GPT2, "transformer.wte", []),
    ("LlamaForCausalLM", STACK, "lm_head", []),
    ("BertForMaskedLM", BERT, "bert.embeddings.word_embeddings", [0]),
    ("RobertaForMaskedLM", BERT, "roberta.embeddings.word_embeddings", [1]),
]


@pytest.mark.parametrize(
    "kind, settings, name, padding", KINDS, ids=[f"{kind[0]}-{kind[2]}" for kind in KINDS]
)
def test_the_output_table_is_found(transformers, kind, settings, name, padding, tmp_path):
    model = made(transformers, kind, **settings)
    model.save_pretrained(tmp_path)
    expected = model.get_output_embeddings().weight.detach()
    for opened in (open_model(tmp_path), open_memory(model)):
        assert opened.arch == kind and opened.uncounted == padding
        chosen = choose(opened)
        assert name in chosen.names
        table = read_table(chosen, opened.uncounted)
        assert torch.equal(table.weight, expected[table.rows])
        assert table.rows.tolist() == [n for n in range(len(expected)) if n not in padding]


def test_a_model_in_several_files(transformers, tmp_path):
    model = made(transformers, "LlamaForCausalLM", **STACK)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    opened = open_model(tmp_path)
    assert torch.equal(opened.tensors["lm_head.weight"], model.lm_head.weight)
    assert opened.file_of("lm_head") != opened.file_of("model.embed_tokens")


# Classes of which some share the output layer by their own default, and some do not.
CLASSES = (
    "Bart Bert Bloom Falcon Flaubert GPT2 GPTJ GPTNeo GPTNeoX Gemma Llama MBart Marian Mistral "
    "Mixtral OPT Pegasus Phi3 Qwen2 Roberta StableLm T5 XGLM XLM"
).split()
ENDS = (
    *("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration"),
    *("MTModel", "WithLMHeadModel"),
)


@pytest.mark.parametrize("stem", CLASSES)
def test_silent_settings_have_the_default_of_the_class(transformers, stem):
    if not hasattr(transformers, f"{stem}Config"):
        pytest.skip("this transformers has no such class")
    config = getattr(transformers, f"{stem}Config")()
    names = [f"{stem}{end}" for end in ENDS if hasattr(transformers, f"{stem}{end}")]
    for name in names:
        by_default = ModelConfig.of({"architectures": [name]}).by_default
        assert by_default is config.tie_word_embeddings, name
    assert ModelConfig.of({"architectures": names}).shares is None
