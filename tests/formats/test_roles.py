"""What a report says about the table that it measured."""

import pytest
import torch

from spectral_fairseq.analysis.wording import choice_in_words
from spectral_fairseq.formats.config import ModelConfig
from spectral_fairseq.formats.roles import is_output, may_be_table
from spectral_fairseq.formats.stored import Stored
from spectral_fairseq.formats.which_table import choose

ENCODER, DECODER, OUTPUT = "encoder.embed_tokens", "decoder.embed_tokens", "decoder.fc_out"


@pytest.mark.parametrize(
    "chosen, tables, expected",
    [
        ([DECODER, ENCODER, OUTPUT], [[ENCODER, DECODER, OUTPUT]], True),
        ([DECODER], [[ENCODER], [DECODER], [OUTPUT]], False),
        ([DECODER], [[ENCODER], [DECODER]], True),  # it shares the decoder's input table
        ([ENCODER], [[ENCODER], [DECODER]], False),
        (["shared"], [["shared"]], True),
        (["decoder_Wemb"], [["encoder_Wemb"], ["decoder_Wemb"]], True),
        (["embeddings"], [["embeddings"]], False),
        (["fc1.weight"], [[OUTPUT]], False),
    ],
)
def test_whether_the_softmax_uses_a_table(chosen, tables, expected):
    assert is_output(chosen, tables) is expected


def describe_choice(chosen, tables, **settings):
    """What is said of one of several tables of 9 words, of which each is held under some names."""
    held = {name: number for number, names in enumerate(tables) for name in names}
    tensors = {f"{name}.weight": torch.full((9, 4), float(held[name])) for name in held}
    tensors.update({name: torch.ones(9, 4) for name in chosen if name not in held})
    model = Stored("model", tensors, config=ModelConfig.of(settings))
    return choice_in_words(choose(model, chosen[0]))


def test_the_choice_is_described():
    assert describe_choice([DECODER, ENCODER, OUTPUT], [[ENCODER, DECODER, OUTPUT]]) == (
        "Measured: decoder.embed_tokens, the table of the encoder's input and the decoder's input "
        "and the output layer."
    )
    assert describe_choice([OUTPUT], [[ENCODER], [DECODER], [OUTPUT]]) == (
        "Measured: decoder.fc_out, the table of the output layer. Not measured: "
        "encoder.embed_tokens, decoder.embed_tokens (choose with --table)."
    )
    assert describe_choice(["transformer.wte"], [["transformer.wte"]]) == (
        "Measured: transformer.wte, the table of the input. No output layer is stored: it shares a "
        "table, or there is none."
    )
    assert describe_choice(
        ["transformer.wte"], [["transformer.wte"]], tie_word_embeddings=True
    ).endswith("the table of the input. The settings say that the output layer shares it.")
    assert describe_choice(["shared"], [["shared"]]).startswith(
        "Measured: shared, the table of the encoder's input and the decoder's input."
    )
    assert describe_choice(["fc1"], [[OUTPUT]]) == (
        "Measured: fc1. Not measured: decoder.fc_out (choose with --table)."
    )


@pytest.mark.parametrize(
    "name, shape, expected",
    [
        ("lm_head", (9, 4), True),
        ("lm_head.decoder", (9, 4), True),
        ("lm_head.dense", (4, 4), False),  # of RoBERTa
        ("cls.predictions.decoder", (9, 4), True),
        ("cls.predictions.transform.dense", (4, 4), False),
        ("bert.embeddings.word_embeddings", (9, 4), True),
        ("bert.embeddings.position_embeddings", (9, 4), False),
        ("transformer.token_embeddings", (9, 4), True),  # of OpenELM
        ("transformer.wpe", (9, 4), False),
        ("encoder", (9, 4), True),  # of PyTorch's LSTM language model
        ("encoder.layers.0.fc1", (9, 4), False),
        ("embed_tokens.embeddings.0.1", (4, 4), False),  # of an adaptive input
        ("decoder.output_projection.table", (4, 4), True),
    ],
)
def test_names_of_tables(name, shape, expected):
    assert may_be_table(name, *shape) is expected
