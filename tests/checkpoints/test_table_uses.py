"""What a report says about the table that it measured."""

from spectral_fairseq.checkpoints.table_uses import describe_choice

ENCODER, DECODER, OUTPUT = "encoder.embed_tokens", "decoder.embed_tokens", "decoder.fc_out"


def test_the_choice_is_described():
    assert describe_choice([DECODER, ENCODER, OUTPUT], [[ENCODER, DECODER, OUTPUT]]) == (
        "Measured: decoder.embed_tokens, the table of the encoder's input and the decoder's input "
        "and the output layer."
    )
    assert describe_choice([OUTPUT], [[ENCODER], [DECODER], [OUTPUT]]) == (
        "Measured: decoder.fc_out, the table of the output layer. Not measured: "
        "encoder.embed_tokens, decoder.embed_tokens (choose with --table)."
    )
