"""Models of transformers: the output table is found, from their folders and in memory."""

import pytest
import torch

from spectral_fairseq.checkpoints.opening import open_memory, open_model

WORDS, DIM = 60, 16
SEQUENCE = {
    "d_model": DIM,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": DIM,
    "decoder_ffn_dim": DIM,
    "vocab_size": WORDS,
    "max_position_embeddings": 70,
}
MARIAN = {**SEQUENCE, "pad_token_id": 49, "decoder_start_token_id": 49, "eos_token_id": 0}
UNTIED = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
STACK = {
    "vocab_size": WORDS,
    "hidden_size": DIM,
    "intermediate_size": DIM,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
T5 = {"vocab_size": WORDS, "d_model": DIM, "d_kv": 8, "d_ff": DIM, "num_layers": 1, "num_heads": 2}
GPT2 = {"vocab_size": WORDS, "n_positions": 70, "n_embd": DIM, "n_layer": 1, "n_head": 2}

# Class, configuration, its settings, name of the table in the file, row of the padding symbol.
LAYOUTS = [
    ("T5ForConditionalGeneration", "T5Config", T5, "shared", [0]),
    ("BartForConditionalGeneration", "BartConfig", SEQUENCE, "model.shared", [1]),
    ("MarianMTModel", "MarianConfig", MARIAN, "model.shared", [49]),
    (
        "MarianMTModel",
        "MarianConfig",
        {**MARIAN, **UNTIED, "decoder_vocab_size": 50},
        "lm_head",
        [49],
    ),
    ("GPT2LMHeadModel", "GPT2Config", GPT2, "transformer.wte", []),
    ("LlamaForCausalLM", "LlamaConfig", STACK, "lm_head", []),
    ("BertForMaskedLM", "BertConfig", STACK, "bert.embeddings.word_embeddings", [0]),
    ("RobertaForMaskedLM", "RobertaConfig", STACK, "roberta.embeddings.word_embeddings", [1]),
]


@pytest.mark.parametrize(
    "model, config, settings, name, padding",
    LAYOUTS,
    ids=[f"{layout[0]}-{layout[3]}" for layout in LAYOUTS],
)
def test_the_output_table_is_found(transformers, model, config, settings, name, padding, tmp_path):
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    made.save_pretrained(tmp_path)
    expected = made.get_output_embeddings().weight.detach()
    for opened in (open_model(tmp_path), open_memory(made)):
        assert opened.arch == model and opened.uncounted == padding
        chosen = opened.choose(None)
        assert name in chosen
        table = opened.extract(None, opened.uncounted)
        assert torch.equal(table.weight, expected[table.rows])
        assert table.rows.tolist() == [n for n in range(len(expected)) if n not in padding]


def test_a_model_in_several_files(transformers, tmp_path):
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**STACK))
    made.save_pretrained(tmp_path, max_shard_size="5KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    opened = open_model(tmp_path)
    assert torch.equal(opened.tensors["lm_head.weight"], made.lm_head.weight)
    assert opened.files_of("lm_head") != opened.files_of("model.embed_tokens")
