"""The sentences with which a report opens."""

import pytest

from spectral_fairseq.analysis.verdict import verdict, warnings


def checkpoint(cosine, sigma, label="a", remark=None):
    measures = {"mean_cosine": cosine, "effective_rank": 3.25, "share_of_first": 0.4}
    return {
        "label": label,
        "measures": measures,
        "singular_values": sigma,
        "table": {"dimensions": len(sigma)},
        "dictionary": {"path": None if remark else "dict.txt", "remark": remark or "given"},
    }


@pytest.mark.parametrize(
    "cosine, sigma, directions, spectrum, advice",
    [
        (0.6, [9.0, 2.0, 1.0, 1.0], "narrow cone", "One singular value", "spectrum_control"),
        (0.1, [2.5, 2.0, 1.0, 1.0], "to some degree", "No single direction", "mle_cosreg, and"),
        (-0.01, [2.5, 2.0, 1.0, 1.0], "hardly any", "No single direction", "Nothing here"),
        (0.0, [9.0, 2.0, 1.0, 1.0], "hardly any", "One singular value", "spectrum_control"),
        (1.0, [9.0], "narrow cone", "No single direction", "mle_cosreg, and"),
    ],
)
def test_the_sentences_follow_the_figures(cosine, sigma, directions, spectrum, advice):
    first, second, third = verdict(checkpoint(cosine, sigma))
    assert directions in first and f"is {cosine:.2g}," in first
    assert spectrum in second and f"3.25 of {len(sigma)}" in second and "40 %" in second
    assert advice in third


def test_a_missing_dictionary_is_told_once_for_all_that_miss_it():
    found = warnings(
        [
            checkpoint(0.0, [1.0], "a", "none given"),
            checkpoint(0.0, [1.0], "b"),
            checkpoint(0.0, [1.0], "c", "none given"),
            checkpoint(0.0, [1.0], "d", "of 9 words"),
        ]
    )
    assert len(found) == 2 and "for a, c: none given" in found[0] and "for d:" in found[1]
