"""What a report says about the table that it measured."""

from spectral_fairseq.checkpoints.table_uses import counterpart, describe_choice

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


def test_the_input_table_of_an_output_table():
    untied = [[ENCODER], [DECODER], [OUTPUT]]
    assert counterpart([OUTPUT], untied) == DECODER
    assert counterpart([DECODER], untied) == OUTPUT
    assert counterpart([ENCODER], untied) is None
    assert counterpart([ENCODER, DECODER], [[ENCODER, DECODER], [OUTPUT]]) == OUTPUT
    assert counterpart([DECODER, OUTPUT], [[ENCODER], [DECODER, OUTPUT]]) is None
    assert counterpart([DECODER], [[ENCODER], [DECODER]]) is None
