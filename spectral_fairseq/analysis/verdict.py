"""What a report says in words about one table, before any figure.

The bounds separate the cases seen in this project's own trainings (docs/papers.md): tied tables of
plain Transformers have a mean cosine of 0.1 to 0.5, regularised ones stay below 0.05.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from spectral_fairseq.analysis.catalogue import shown

# Of more checkpoints, such as the epochs of a run, some are described, evenly spaced.
MOST_VERDICTS = 3
NARROW, SLIGHTLY_NARROW = 0.25, 0.05
# sigma_1 / sigma_2 of a random table is close to 1.
DOMINANT_RATIO = 2.0


def verdict(checkpoint: Mapping[str, Any]) -> List[str]:
    """Three sentences on one checkpoint's table: its directions, its spectrum, what one might try.

    Args:
        checkpoint: its entry in the document.
    """
    measures, dim = checkpoint["measures"], checkpoint["table"]["dimensions"]
    cosine, sigma = measures["mean_cosine"], checkpoint["singular_values"]
    narrow = cosine >= SLIGHTLY_NARROW
    dominant = len(sigma) > 1 and sigma[0] >= DOMINANT_RATIO * sigma[1]
    return [
        _directions(cosine),
        _spectrum(measures["effective_rank"], dim, measures["share_of_first"], dominant),
        _advice(narrow, dominant),
    ]


def warnings(checkpoints: Sequence[Mapping[str, Any]]) -> List[str]:
    """What makes figures doubtful: each kind of missing dictionary once, with its checkpoints.

    Args:
        checkpoints: the entries of the document.
    """
    labels: Dict[str, List[str]] = {}
    for one in checkpoints:
        if one["dictionary"]["path"] is None:
            labels.setdefault(one["dictionary"]["remark"], []).append(one["label"])
    return [
        f"No dictionary was used for {', '.join(names)}: {remark}. Filler rows that stand for no "
        "word, if any, are measured too, and words are ordered by row instead of frequency. Name a "
        "dictionary, a tokenizer or the data folder with --dict."
        for remark, names in labels.items()
    ]


def _directions(cosine: float) -> str:
    if cosine >= NARROW:
        finding = "The word vectors lie in a narrow cone"
    elif cosine >= SLIGHTLY_NARROW:
        finding = "The word vectors share a direction to some degree"
    else:
        finding = "The word vectors share hardly any direction"
    return f"{finding}: the mean cosine of two words is {shown(cosine, 2)}, where 0 means none."


def _spectrum(effective_rank: float, dim: int, share: float, dominant: bool) -> str:
    finding = "One singular value dominates" if dominant else "No single direction dominates"
    return (
        f"{finding}: sigma_1 has {shown(100 * share, 2)} % of the sum of singular values (a flat "
        f"spectrum: {shown(100 / dim, 2)} %), and the effective rank is "
        f"{shown(effective_rank, 3)} of {dim}."
    )


def _advice(narrow: bool, dominant: bool) -> str:
    if not narrow and not dominant:
        return (
            "Nothing here indicates a degenerate table. Regularised tables and untied output "
            "layers often look like this."
        )
    usual = "This is common in models trained with a tied softmax, and is not harmful in itself."
    remedy = "--criterion mle_cosreg"
    if dominant:
        remedy += " or an SVD table with --criterion spectrum_control"
    return f"{usual} To change it, train with {remedy}, and compare."
