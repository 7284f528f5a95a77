"""Small models of transformers in the layouts that share a table in different ways."""

import pytest
import torch
from torch import nn

from spectral_fairseq.training import factor_, weight_norm_

WORDS, DIM = 60, 16
IDS = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
TEXT = torch.randint(3, WORDS, (24, 8), generator=torch.Generator().manual_seed(2))
LABELS = IDS.clone()
LABELS[0, 3] = LABELS[1, :2] = -100
MARKS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
LLAMA = {
    **MARKS,
    "hidden_size": DIM,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GPT2 = {
    **{"n_embd": DIM, "n_layer": 2, "n_head": 2, "n_positions": 32},
    **{f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
T5 = {
    **{"d_model": DIM, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
}
MARIAN = {
    **{**MARKS, "bos_token_id": None, "decoder_start_token_id": 1},
    **{"d_model": DIM, "dropout": 0.0, "max_position_embeddings": 32},
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
}
BERT = {
    **{"hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
OF_MARIAN = ["model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"]

# Layout -> class, the layers that share the output table, and settings.
LAYOUTS = {
    "gpt2": ("GPT2LMHeadModel", ["transformer.wte", "lm_head"], GPT2),
    "llama, tied": (
        "LlamaForCausalLM",
        ["model.embed_tokens", "lm_head"],
        {**LLAMA, "tie_word_embeddings": True},
    ),
    "llama": ("LlamaForCausalLM", ["lm_head"], {**LLAMA, "tie_word_embeddings": False}),
    "t5": (
        "T5ForConditionalGeneration",
        ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"],
        T5,
    ),
    "marian": ("MarianMTModel", OF_MARIAN, MARIAN),
    "marian, scaled": ("MarianMTModel", OF_MARIAN, {**MARIAN, "scale_embedding": True}),
    "bert": (
        "BertForMaskedLM",
        ["bert.embeddings.word_embeddings", "cls.predictions.decoder"],
        BERT,
    ),
}

TABLES = {"plain": lambda model: None, "weight norm": weight_norm_, "factors": factor_}
each_table = pytest.mark.parametrize("table", TABLES)


def made(transformers, kind, seed=0, **settings):
    """A model of a class of transformers in training mode, whose weights a seed decides."""
    torch.manual_seed(seed)
    model = getattr(transformers, kind)
    return model(model.config_class(vocab_size=WORDS, **settings)).train()


def build(transformers, layout="gpt2", seed=0):
    """A model of one of the layouts; that of Marian adds a bias to its logits."""
    kind, _, settings = LAYOUTS[layout]
    model = made(transformers, kind, seed, **settings)
    if kind == "MarianMTModel":
        model.final_logits_bias.copy_(torch.linspace(-1, 1, WORDS))
    return model


def inputs(model, ids=IDS, labels=None):
    """What the model takes, without labels: they go to the loss."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids}
    labels = ids if labels is None else labels
    return {
        "input_ids": ids,
        "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels),
    }


def data():
    """Sequences of :data:`TEXT` with unequal numbers of targets, for a Trainer."""
    rows = []
    for index, row in enumerate(TEXT):
        labels = row.clone()
        labels[: index % 5] = -100
        rows.append({"input_ids": row, "labels": labels})
    return rows


def tokenizer(transformers):
    """Of :data:`WORDS` words w0, w1, ..., for the trainers of TRL; w0 is the padding."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{index}": index for index in range(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", eos_token="w2"
    )


def prompts():
    """The beginnings of :data:`TEXT` as text, for a GRPOTrainer."""
    return [{"prompt": " ".join(f"w{word}" for word in row[:4])} for row in TEXT.tolist()]


def rewards(completions, **_):
    """Rewards that differ between completions."""
    return [float(sum(int(word[1:]) for word in text.split()) % 7) for text in completions]


def gradients(model):
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)  # before torch 2.0 the found gradients would become zero
    return found


def same(found, expected, close=2e-5):
    """Whether two dictionaries of tensors are equal up to rounding."""
    assert set(found) == set(expected)
    for name, one in found.items():
        bound = close * max(float(expected[name].abs().max()), 1e-3)
        torch.testing.assert_close(one, expected[name], rtol=close, atol=bound, msg=name)


def check_loss(model, found, expected, slopes, close=2e-5):
    """A loss of a model is the expected one, and its gradients are these slopes."""
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    same(gradients(model), slopes, close)


def outputs_of_tokens(made, rows, total):
    """What fused losses tell of the tokens of some rows of :data:`IDS`, and the gradients.

    Args:
        made: called with options of ``fused_loss_``, returns the model to be called, the one that
            has the gradients, and the loss.
        rows: a slice.
        total: number of targets by which sums are divided.

    Returns:
        Of weighted losses, of those by probability, and of a function of log-probabilities: the
        measures of each token, the means over all workers, the loss and the gradients.
    """
    ids, labels = IDS[rows], LABELS[rows]
    numbers = torch.linspace(-1, 2, LABELS.numel()).view(LABELS.shape)[rows]
    found = {}

    def note(name, model, loss, value, tokens):
        value.backward()
        slopes = gradients(model)
        found[name] = {
            "tokens": [one.detach() for one in tokens],
            "means": loss.means(of_all_workers=True),
            "loss": value.detach() * total,
            "gradients": {key: getattr(one, "full_tensor", lambda one=one: one)()
                          for key, one in slopes.items()},
        }  # fmt: skip

    for name, options, given in (
        ("weights", {"z_loss": 0.1}, {"weights": numbers}),
        ("by probability", {"by_probability": True, "label_smoothing": 0.1}, {}),
    ):
        called, model, loss = made(measures=True, **options)
        value = loss(called(ids), labels, total, **given)
        note(name, model, loss, value, loss.tokens)
    called, model, loss = made()
    tokens = loss.log_probs(called(ids), labels)
    surrogate = ((tokens.log_probs + 4).exp() * numbers).sum() / total
    note("log-probabilities", model, loss, surrogate, tokens)
    return found


def same_outputs_of_tokens(workers, expected):
    """Whether those of two workers with a row each are those of one process with both.

    The gradients of each are the mean over workers, each of which counts half of the tokens.
    """
    for name, whole in expected.items():
        first, second = (found[name] for found in workers)
        for one, other, both in zip(first["tokens"], second["tokens"], whole["tokens"]):
            together = torch.cat([one, other])
            assert together.dtype == both.dtype and bool(both.any())
            torch.testing.assert_close(together, both, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            first["loss"] + second["loss"], whole["loss"], rtol=1e-5, atol=1e-6
        )
        for found in (first, second):
            assert found["means"] == pytest.approx(whole["means"], rel=1e-5)
            same(found["gradients"], whole["gradients"])
    assert set(expected["weights"]["means"]) == {"z_loss", "entropy", "token_accuracy"}


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
