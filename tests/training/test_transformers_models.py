"""Fused losses equal the own ones of tiny models of many architectures."""

import copy
import inspect
import re
from pathlib import Path

import pytest
import torch

from spectral_fairseq.training import fused_loss_, plain_, weight_norm_
from tests.training.models import (
    BERT,
    DIM,
    GPT2,
    IDS,
    LABELS,
    LLAMA,
    MARIAN,
    MARKS,
    T5,
    check_loss,
    gradients,
    made,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "library.md"
_LLAMA = {
    **{**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8},
    "max_position_embeddings": 32,
}
_FALCON = {name: value for name, value in _LLAMA.items() if name != "head_dim"}
_BERT = {**BERT, "max_position_embeddings": 32}
_BART = {
    **{**MARIAN, **MARKS, "decoder_start_token_id": 2},
    **{"attention_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
}
_T5 = {**T5, "num_layers": 1}
_GPT = {**GPT2, "n_layer": 1}
_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
_EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
# Name in the document -> class, settings. The class of the settings follows from the class.
MODELS = {
    "ALBERT": ("AlbertForMaskedLM", {**_BERT, "embedding_size": DIM}),
    "BART": ("BartForConditionalGeneration", _BART),
    "BERT": ("BertForMaskedLM", _BERT),
    "BLOOM": ("BloomForCausalLM", {"hidden_size": DIM, "n_layer": 1, "n_head": 2, **_NO_DROPOUT}),
    "Cohere": ("CohereForCausalLM", _LLAMA),
    "Cohere 2": ("Cohere2ForCausalLM", _LLAMA),
    "DeBERTa": ("DebertaForMaskedLM", _BERT),
    "DeBERTa 2": ("DebertaV2ForMaskedLM", _BERT),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        {"dim": DIM, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "dropout": 0.0,
         "attention_dropout": 0.0, "max_position_embeddings": 32},
    ),
    "ELECTRA": ("ElectraForMaskedLM", {**_BERT, "embedding_size": DIM}),
    "Falcon": ("FalconForCausalLM", {**_FALCON, **_NO_DROPOUT}),
    "Gemma": ("GemmaForCausalLM", _LLAMA),
    "Gemma 2": ("Gemma2ForCausalLM", {**_LLAMA, "final_logit_softcapping": 0.05}),
    "Gemma 3": ("Gemma3ForCausalLM", {**_LLAMA, "final_logit_softcapping": 0.05}),
    "GPT-2": ("GPT2LMHeadModel", _GPT),
    "GPT-J": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        {"hidden_size": DIM, "num_layers": 1, "attention_types": [[["global"], 1]], "num_heads": 2,
         "max_position_embeddings": 32, "resid_dropout": 0.0, "embed_dropout": 0.0,
         "attention_dropout": 0.0},
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {**_LLAMA, **_NO_DROPOUT}),
    "Granite": ("GraniteForCausalLM", {**_LLAMA, "logits_scaling": 3.0}),
    "Llama": ("LlamaForCausalLM", _LLAMA),
    "M2M100": ("M2M100ForConditionalGeneration", _BART),
    "Mamba": ("MambaForCausalLM", {"hidden_size": DIM, "num_hidden_layers": 1, "state_size": 4}),
    "Marian": ("MarianMTModel", _BART),
    "mBART": ("MBartForConditionalGeneration", _BART),
    "Mistral": ("MistralForCausalLM", _LLAMA),
    "Mixtral": (
        "MixtralForCausalLM",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
         "router_aux_loss_coef": 0.5},
    ),
    "ModernBERT": ("ModernBertForMaskedLM", {**_BERT, "sparse_prediction": False,
                                             "cls_token_id": 0, "sep_token_id": 2}),
    "mT5": ("MT5ForConditionalGeneration", _T5),
    "Nemotron": ("NemotronForCausalLM", _LLAMA),
    "OLMo 2": ("Olmo2ForCausalLM", _LLAMA),
    "OPT": (
        "OPTForCausalLM",
        {"hidden_size": DIM, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "max_position_embeddings": 32, "dropout": 0.0, "word_embed_proj_dim": DIM},
    ),
    "Pegasus": ("PegasusForConditionalGeneration", _BART),
    "Phi": ("PhiForCausalLM", {**_LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Phi 3": ("Phi3ForCausalLM", {**_LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Qwen 2": ("Qwen2ForCausalLM", _LLAMA),
    "Qwen 2 MoE": ("Qwen2MoeForCausalLM", {**_LLAMA, **_EXPERTS,
                                           "shared_expert_intermediate_size": 16}),
    "Qwen 3": ("Qwen3ForCausalLM", _LLAMA),
    "Qwen 3 MoE": ("Qwen3MoeForCausalLM", {**_LLAMA, **_EXPERTS}),
    "RoBERTa": ("RobertaForMaskedLM", _BERT),
    "StableLM": ("StableLmForCausalLM", {**_LLAMA, **_NO_DROPOUT}),
    "StarCoder 2": ("Starcoder2ForCausalLM", {**_LLAMA, "residual_dropout": 0.0,
                                              "embedding_dropout": 0.0}),
    "T5": ("T5ForConditionalGeneration", _T5),
    "XLM-RoBERTa": ("XLMRobertaForMaskedLM", _BERT),
}  # fmt: skip


def build(transformers, name):
    kind, settings = MODELS[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    return made(transformers, kind, **{**MARKS, **settings})


def labelled(model):
    names = inspect.signature(model.forward).parameters
    mask = {"attention_mask": torch.ones_like(IDS)} if "attention_mask" in names else {}
    return {"input_ids": IDS, "labels": LABELS, **mask}


@pytest.mark.parametrize("name", MODELS)
def test_the_fused_loss_is_the_models_own(transformers, name):
    model = build(transformers, name)
    plain = copy.deepcopy(model)
    own = plain(**labelled(plain)).loss
    own.backward()
    fused_loss_(model)
    outputs = model(**labelled(model))
    assert type(outputs.logits).__name__ == "HiddenStates"
    check_loss(model, outputs.loss, own, gradients(plain), close=1e-4)
    # A table keeps the matrix, and comes off again.
    weight_norm_(model)
    torch.testing.assert_close(model(**labelled(model)).loss, own, rtol=1e-5, atol=1e-5)
    plain_(model)
    model.eval(), plain.eval()
    with torch.no_grad():
        expected, found = (one(**labelled(one)).logits for one in (plain, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_document_lists_them():
    (line,) = re.findall(r"^Tried are (.*?)\.\s", DOCUMENT.read_text("utf-8"), re.M | re.S)
    listed = [one.strip() for one in " ".join(line.split()).replace(" and ", ", ").split(",")]
    assert sorted(filter(None, listed), key=str.lower) == sorted(MODELS, key=str.lower)
