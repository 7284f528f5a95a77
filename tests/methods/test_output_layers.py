"""The one list of names of output layers, and the order in which each place looks for them."""

from spectral_fairseq.methods.output_layers import output_names


def test_each_role_has_its_names_in_order():
    assert output_names("fairseq") == ("output_projection", "fc_out", "fc3", "embed_out")
    names = ("lm_head", "output_projection", "output", "head", "classifier", "score")
    assert output_names("attribute") == names


def test_a_name_in_a_file_stands_for_the_module_alone_or_for_what_is_inside_it():
    inside, alone = set(output_names("inside")), set(output_names("alone"))
    assert not inside & alone and set(output_names("certain")) <= inside | alone
    assert {"decoder", "output", "head"} <= alone
