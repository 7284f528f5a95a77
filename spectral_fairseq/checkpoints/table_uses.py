"""What the tables of a checkpoint are used for: input of the encoder or decoder, output layer."""

from __future__ import annotations

from typing import List, Optional, Sequence

# The output layers over words in fairseq's architectures.
_OUTPUT_LAYERS = frozenset(("output_projection", "fc_out", "fc3", "embed_out", "lm_head"))
_DECODER_INPUT = "decoder.embed_tokens"


def output_tables(tables: Sequence[List[str]]) -> List[List[str]]:
    """Those of several tables that the softmax uses.

    Checkpoints of old versions do not store an output layer that shares the decoder's input table:
    where there is no output layer, it is the decoder's.

    Args:
        tables: for each, the modules that hold it.
    """
    found = [names for names in tables if any(_use(name) == _use("lm_head") for name in names)]
    return found or [names for names in tables if _DECODER_INPUT in names] or list(tables)


def known_name_first(names: Sequence[str]) -> List[str]:
    """The modules that hold one table, first the one by which users of fairseq know it."""
    return sorted(names, key=lambda name: name != _DECODER_INPUT)


def counterpart(names: Sequence[str], tables: Sequence[List[str]]) -> Optional[str]:
    """The decoder's input table for an output table, or the reverse; None if they are one table.

    Args:
        names: modules that hold the chosen table.
        tables: for each table of the checkpoint, the modules that hold it.
    """
    uses = {_use(name) for name in names} & set(_USES[1:])
    wanted = set(_USES[1:]) - uses
    if len(uses) != 1:
        return None
    found = [other[0] for other in tables if {_use(name) for name in other} & wanted]
    return found[0] if len(found) == 1 and found[0] not in names else None


def describe_choice(names: Sequence[str], tables: Sequence[List[str]]) -> str:
    """One or two sentences: what the chosen table does, and which others there are.

    Args:
        names: modules that hold the chosen table.
        tables: for each table of the checkpoint, the modules that hold it.
    """
    uses = [use for use in _USES if use in map(_use, names)]
    text = f"Measured: {names[0]}, the table of the {' and the '.join(uses)}."
    others = [other[0] for other in tables if names[0] not in other]
    if others:
        text += f" Not measured: {', '.join(others)} (choose with --table)."
    return text


_USES = ("encoder's input", "decoder's input", "output layer")


def _use(name: str) -> str:
    if _OUTPUT_LAYERS & set(name.split(".")):
        return _USES[2]
    return _USES[0] if name.startswith("encoder.") else _USES[1]
