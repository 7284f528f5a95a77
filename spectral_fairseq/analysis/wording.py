"""All sentences of a report: on the choice of the table, and on what was found, before any figure.

The values are those of ``formats/which_table.py`` and of ``verdict.py``.

Note [Origins]
--------------
What is normal, and what one might try, depends on where a table comes from (``origin`` in the
document): for fairseq's checkpoints it is flags, for models of other frameworks the functions of
``spectral_fairseq.training``. Biś, Podkorytov, Liu (NAACL 2021,
https://aclanthology.org/2021.naacl-main.403/) found in GPT-2, BERT, RoBERTa and others that the
vectors drift in a common direction, without which they are far more isotropic. Vectors without a
model are not trained any more, but can be processed: Mu, Viswanath (ICLR 2018,
https://openreview.net/forum?id=HkuGJ3kCb) take the mean and the first principal components out of
word2vec's and GloVe's. :data:`ADVICE` is what gained in this project's own trainings
(docs/evidence.md), in the words of README and of the quickstart; a language model has another,
since nothing gained there. What is known of how a table was trained is not advised again.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from spectral_fairseq.analysis.catalogue import cosine_shown, shown
from spectral_fairseq.analysis.measures import BEYOND
from spectral_fairseq.analysis.verdict import STANDS_OUT, Finding, findings_of
from spectral_fairseq.errors import listed
from spectral_fairseq.formats.matrices import MOST_NAMED
from spectral_fairseq.formats.roles import uses_of
from spectral_fairseq.formats.which_table import (
    BY_DEFAULT,
    OWN,
    SHARED,
    STORED,
    UNREAD,
    Choice,
)

ADVICE = (
    "Tune the weight decay first. Then give a small translation model the weight-norm "
    "initialisation, train it with Muon, and tune the weight decay and the rate again"
)
OF_LANGUAGE_MODELS = (
    "Tune the weight decay, over which no method of this package has a proven gain in language "
    "models (docs/evidence.md)"
)
# Note [Origins]
_NORMAL = {
    "fairseq": "",
    "model": " Pretrained Transformers usually share a direction (Biś et al., NAACL 2021).",
    "vectors": " Those of word2vec and GloVe usually have a mean (Mu and Viswanath, ICLR 2018).",
}
_MORE_DIRECTIONS = {
    "fairseq": "To use more directions, train with --arch {arch} and --criterion spectrum_control",
    "model": "To use more directions, train with SpectrumControl(model) of "
    "spectral_fairseq.training (docs/library.md)",
    "vectors": "Before you compare words by their cosines, you might subtract the mean and the "
    "first principal components, as Mu and Viswanath do; if the table belongs to a model, "
    "docs/library.md has methods for its training",
}
_NO_MEAN = {
    "fairseq": "--criterion spectrum_control takes it out of a plain table",
    "model": "SpectrumControl(model) of spectral_fairseq.training takes it out (docs/library.md)",
    "vectors": "Before you compare words by their cosines, you might subtract the mean; if the "
    "table belongs to a model, docs/library.md has methods for its training",
}
_HOW = {
    "fairseq": "--optimizer muon, and --arch transformer_wn_iwslt_de_en or another transformer_wn*",
    "model": "weight_norm_(model, counts) before the optimiser, Muon, is made",
}
_CONTROLLED = (
    "the table was trained with spectrum control, and what is left follows from the strength of "
    "that control"
)
# What follows "The word vectors".
_FOUND = {
    Finding.NARROW_CONE: "lie in a narrow cone",
    Finding.COMMON_DIRECTION: "share a direction",
    Finding.LONG_ROW: "have one among them that dwarfs the others",
    Finding.ONE_DIRECTION: "stretch along one direction, which is not their mean",
    Finding.FEW_DIRECTIONS: "use few directions",
    Finding.NO_MEAN: "share no direction in their mean",
    Finding.EVEN: "are spread evenly, and share no direction that stands out",
}
_REPAIR = {
    "fairseq": "repair_(model.{table}) of spectral_fairseq.training gives them new vectors",
    "model": "repair_(model) of spectral_fairseq.training gives them new vectors",
    "vectors": "leave them out, or take the mean of the others for them",
}


def choice_in_words(choice: Choice) -> str:
    """What the chosen table does, which others there are, and where its numbers are from."""
    rows, dim = choice.shape
    sentences = [f"Measured: {choice.names[0]}."]
    if choice.is_known:
        used_for = " and the ".join(uses_of(choice.names))
        sentences = [f"Measured: {choice.names[0]}, the table of the {used_for}."]
        sentences += _on_the_output(choice)
    others = [names[0] for names in choice.tables if choice.names[0] not in names]
    if others:
        sentences.append(f"Not measured: {listed(others, MOST_NAMED)} (choose with --table).")
    if choice.unread:
        sentences.append(f"Not readable: {', '.join(choice.unread[:4])}.")
    if choice.model.remark:
        sentences.append(choice.model.remark)
    if choice.lies:
        sentences.append(f"It is stored as {dim} x {rows}, with a column for each word.")
    if choice.declared:
        sentences.append(f"It is {rows} x {dim}, and the settings say {choice.declared}.")
    return " ".join(sentences)


def _on_the_output(choice: Choice) -> List[str]:
    if choice.output == STORED:
        return []
    if choice.output == UNREAD:
        return [f"The output layer is not measured: {', '.join(choice.unread_outputs)}."]
    if choice.output == OWN:
        own = "The settings say that the output layer has a table of its own, which is not stored"
        return [f"{own} here."]
    if choice.output == SHARED:
        return ["The settings say that the output layer shares it."]
    if choice.output == BY_DEFAULT:
        return [f"By the default of {choice.model.arch} the output layer shares it."]
    if choice.possible_outputs:
        named = listed(choice.possible_outputs)
        return [f"No output layer is known by its name; it may be {named} (choose with --table)."]
    if choice.model.beside:
        beside = listed(choice.model.beside)
        return [f"No output layer is stored here; {beside} beside it may hold one."]
    return ["No output layer is stored: it shares a table, or there is none."]


def headline_with_figures(checkpoint: Mapping[str, Any]) -> str:
    """What stands out most, with the figures that tell one table from another, for a page."""
    measures = checkpoint["measures"]
    rank = shown(measures["effective_rank_centred"], 3)
    return (
        f"The word vectors {_FOUND[findings_of(checkpoint).finding]}: mean cosine "
        f"{measures['mean_cosine'] + 0.0:.2f}, effective rank {rank} of "
        f"{checkpoint['table']['dimensions']}."
    )


def verdict(checkpoint: Mapping[str, Any]) -> List[str]:
    """Three paragraphs on one table, the headline first: findings, what is normal, what to try."""
    shared, few, edges, finding = findings_of(checkpoint)
    return [
        f"The word vectors {_FOUND[finding]}. {_meaning(checkpoint, few, edges)}",
        _normal(checkpoint["measures"], checkpoint["origin"]),
        _advice(checkpoint, shared, few or edges >= STANDS_OUT),
    ]


def warnings(checkpoints: Sequence[Mapping[str, Any]]) -> List[str]:
    """What makes figures doubtful: missing dictionaries, each kind once, and untrained rows."""
    labels: Dict[str, List[str]] = {}
    for checkpoint in checkpoints:
        if checkpoint["dictionary"]["path"] is None:
            labels.setdefault(checkpoint["dictionary"]["remark"], []).append(checkpoint["label"])
    messages = [
        f"No dictionary was used for {', '.join(names)}: {remark}. Filler rows that stand for no "
        "word, if any, are measured too, and words are ordered by row instead of frequency. Name a "
        "dictionary, a tokenizer or the data folder with --dict."
        for remark, names in labels.items()
    ]
    return messages + [
        _untrained(checkpoint) for checkpoint in checkpoints if checkpoint["untrained"]
    ]


def _untrained(checkpoint: Mapping[str, Any]) -> str:
    count = int(checkpoint["measures"]["untrained_rows"])
    first = ", ".join(map(_name, checkpoint["untrained"][:5]))
    rows = "1 row looks" if count == 1 else f"{count:,} rows look"
    return (
        f"{rows} never trained in {checkpoint['label']} (zero, equal to another row, or unusually "
        f"short), for example {first}. They are measured like the others; "
        f"{_REPAIR[checkpoint['origin']].format(table=checkpoint['table']['name'])}."
    )


def _name(row: Mapping[str, Any]) -> str:
    return row["word"] or f"row {row['row']}"


def _percent(share: float) -> str:
    return f"{shown(100 * share, 2 if share < 0.95 else 4)} %"


def _meaning(checkpoint: Mapping[str, Any], few: bool, edges: float) -> str:
    measures, random = checkpoint["measures"], checkpoint["random"]
    row, dim = checkpoint["dominant_row"], checkpoint["table"]["dimensions"]
    if not few and measures["effective_rank_centred"] < 1.01:  # of one dimension, or two words
        rest = "all of them lie on one line,"
    elif row is not None:
        rest = f"{_name(row)} alone holds {_percent(row['share'])}, at"
    elif edges >= BEYOND:
        rest = (
            f"the first of {'few' if few else 'the'} directions holds "
            f"{_percent(1 / measures['stable_rank_centred'])} of the rest (random "
            f"{_percent(1 / random['stable_rank_centred'])}), at"
        )
    else:
        rest = f"they use {'few' if few else 'many'} directions,"
    return (
        f"Their mean holds {_percent(measures['mean_share'] ** 2)} of "
        f"their squared length (in a random table {_percent(random['mean_share'] ** 2)}), and "
        f"apart from it {rest} an effective rank of "
        f"{shown(measures['effective_rank_centred'], 3)} of {dim} (random "
        f"{shown(random['effective_rank_centred'], 3)})."
    )


def _normal(measures: Mapping[str, Any], origin: str) -> str:
    return (
        f"Two words have a mean cosine of {cosine_shown(measures['mean_cosine'], 2)} (random "
        f"vectors 0), and of {cosine_shown(measures['mean_cosine_centred'], 2)} without the "
        f"mean.{_NORMAL[origin]}"
    )


def _advice(checkpoint: Mapping[str, Any], shared: bool, few: bool) -> str:
    row, origin = checkpoint["dominant_row"], checkpoint["origin"]
    trained_with, of_language = checkpoint["trained_with"], checkpoint["language_model"]
    if row is not None:
        return f"Look at {_name(row)} first, and measure the table again without it."
    if not shared and not few:
        if checkpoint["untrained"]:
            return (
                "Apart from the rows that look never trained, nothing here indicates a degenerate "
                "table."
            )
        return "Nothing here indicates a degenerate table, so there is nothing to repair."
    if "spectrum control" in trained_with:
        remedy = _CONTROLLED
    else:
        arch = "transformer_lm_sc" if of_language else "transformer_sc"
        remedy = (_MORE_DIRECTIONS if few else _NO_MEAN)[origin].format(arch=arch)
    if origin == "vectors":
        return f"{remedy}."
    if few:
        remedy = remedy[0].upper() + remedy[1:]
    else:
        why = (
            "The mean changes no probability of an output layer, so it is harmless there in itself"
            if checkpoint["table"]["is_output"]
            else "The mean of an input table acts like a bias, which the layers above can remove"
        )
        remedy = f"{why}; {remedy}"
    gains = f"{ADVICE}: {_HOW[origin]}"
    if of_language:
        gains = OF_LANGUAGE_MODELS
    elif "weight norm" in trained_with:
        gains = "Muon gains beside the weight-norm initialisation. Tune the weight decay"
    return f"{remedy}. A more even table is not by itself a better model. {gains}."
