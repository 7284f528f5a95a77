"""Small models of transformers in the layouts that share a table in different ways."""

import torch
from torch import nn

WORDS, DIM = 60, 16
IDS = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
_MARKS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def _llama(tied):
    def build(transformers):
        sizes = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=DIM, tie_word_embeddings=tied, **sizes, **_MARKS
        )
        return transformers.LlamaForCausalLM(config)

    return build


def _gpt2(transformers):
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=DIM, n_layer=2, n_head=2, n_positions=32, **dropout
    )
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def _t5(transformers):
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=DIM,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _marian(transformers, **more):
    layers = {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    widths = {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
    config = transformers.MarianConfig(
        vocab_size=WORDS,
        d_model=DIM,
        dropout=0.0,
        max_position_embeddings=32,
        decoder_start_token_id=1,
        **layers,
        **heads,
        **widths,
        **{**_MARKS, "bos_token_id": None},
        **more,
    )
    model = transformers.MarianMTModel(config)
    model.final_logits_bias.copy_(torch.linspace(-1, 1, WORDS))
    return model


def _scaled_marian(transformers):
    return _marian(transformers, scale_embedding=True)


def _bert(transformers):
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=DIM,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


# Layout -> how to build it, and the layers that share the output table.
LAYOUTS = {
    "gpt2": (_gpt2, ["transformer.wte", "lm_head"]),
    "llama, tied": (_llama(True), ["model.embed_tokens", "lm_head"]),
    "llama": (_llama(False), ["lm_head"]),
    "t5": (_t5, ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]),
    "marian": (
        _marian,
        ["model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"],
    ),
    "marian, scaled": (
        _scaled_marian,
        ["model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"],
    ),
    "bert": (_bert, ["bert.embeddings.word_embeddings", "cls.predictions.decoder"]),
}


def build(transformers, layout="gpt2", seed=0):
    """A model in training mode, whose weights a seed decides."""
    torch.manual_seed(seed)
    return LAYOUTS[layout][0](transformers).train()


def inputs(model, ids=IDS, labels=None):
    """What the model takes, without labels: they go to the loss."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids}
    labels = ids if labels is None else labels
    return {
        "input_ids": ids,
        "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels),
    }


class Straight(nn.Module):
    """A look-up and an output layer, for which no package beside torch is needed."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.lm_head = nn.Linear(DIM, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        return self.lm_head(torch.tanh(self.embed(tokens)))
