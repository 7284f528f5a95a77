"""What a report says about the choice of a table."""

from __future__ import annotations

from typing import List

from spectral_fairseq.errors import listed
from spectral_fairseq.formats.roles import uses_of
from spectral_fairseq.formats.stored import Stored
from spectral_fairseq.formats.which_table import (
    BY_DEFAULT,
    MOST_NAMED,
    OWN,
    SHARED,
    STORED,
    UNREAD,
    Choice,
)


def choice_in_words(choice: Choice, model: Stored) -> str:
    """What the chosen table does, which others there are, and where its numbers are from."""
    rows, dim = choice.shape
    sentences = [f"Measured: {choice.names[0]}."]
    if choice.is_known:
        used_for = " and the ".join(uses_of(choice.names))
        sentences = [f"Measured: {choice.names[0]}, the table of the {used_for}."]
        sentences += _on_the_output(choice, model)
    others = [names[0] for names in choice.tables if choice.names[0] not in names]
    if others:
        sentences.append(f"Not measured: {listed(others, MOST_NAMED)} (choose with --table).")
    if choice.unread:
        sentences.append(f"Not readable: {', '.join(choice.unread[:4])}.")
    if model.remark:
        sentences.append(model.remark)
    if choice.lies:
        sentences.append(f"It is stored as {dim} x {rows}, with a column for each word.")
    if choice.declared:
        sentences.append(f"It is {rows} x {dim}, and the settings say {choice.declared}.")
    return " ".join(sentences)


def _on_the_output(choice: Choice, model: Stored) -> List[str]:
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
        return [f"By the default of {model.arch} the output layer shares it."]
    if choice.possible_outputs:
        named = listed(choice.possible_outputs)
        return [f"No output layer is known by its name; it may be {named} (choose with --table)."]
    if model.beside:
        return [f"No output layer is stored here; {listed(model.beside)} beside it may hold one."]
    return ["No output layer is stored: it shares a table, or there is none."]
