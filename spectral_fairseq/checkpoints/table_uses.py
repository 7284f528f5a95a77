"""By their names: which modules are tables over words, and what each table is used for.

The names are those of fairseq, of the architectures of transformers, of OpenNMT and Marian, and of
the usual LSTM language models.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

# Modules that are, or contain, an input table or an output layer over words.
INPUT_TABLES = frozenset(
    "embed_tokens embed_in word_emb word_embedding word_embeddings wte shared emb_luts "
    "token_embedding tok_embeddings tokens_embed".split()
)
OUTPUT_LAYERS = frozenset(
    "output_projection fc_out fc3 embed_out lm_head generator_lm_head vocab_projector "
    "proj_out output_layer generator".split()
)
# Names that other modules have as well: only the module itself is a table, not what is inside it,
# and only if it has more rows than columns.
_OWN_INPUT = frozenset(
    "embedding embeddings embed emb encoder encoder_emb Wemb encoder_Wemb decoder_Wemb".split()
)
_OWN_OUTPUT = frozenset("decoder output head unembed decoder_ff_logit_out_W".split())
PLACES = INPUT_TABLES | OUTPUT_LAYERS

_DECODER_INPUT = "decoder.embed_tokens"
_USES = ("encoder's input", "decoder's input", "input", "output layer")


def may_be_table(name: str, rows: int, columns: int) -> bool:
    """Whether a matrix of this shape is a table over words, by the name of its module.

    Args:
        name: of the module, or of the matrix where it is a module's own parameter.
        rows: of the matrix.
        columns: of the matrix.
    """
    *outer, last = name.split(".")
    if last in PLACES or (last == "table" and PLACES & set(outer)):
        return True
    # A head may hold further matrices, such as the dense layer of lm_head in RoBERTa, d x d.
    return rows > columns and (last in _OWN_INPUT | _OWN_OUTPUT or bool(PLACES & set(outer)))


def output_tables(tables: Sequence[List[str]]) -> List[List[str]]:
    """Those of several tables that the softmax uses, or all if their names do not tell.

    Args:
        tables: for each, the modules that hold it.
    """
    return _known_outputs(tables) or list(tables)


def is_output(names: Sequence[str], tables: Sequence[List[str]]) -> bool:
    """Whether the softmax is known to use a table.

    Args:
        names: modules that hold the table.
        tables: for each table of the checkpoint, the modules that hold it.
    """
    return any(names[0] in known for known in _known_outputs(tables))


def _known_outputs(tables: Sequence[List[str]]) -> List[List[str]]:
    """The tables of output layers.

    Checkpoints of old versions do not store an output layer that shares the decoder's input table:
    where there is no output layer, it is the decoder's.
    """
    found = [names for names in tables if any(_use(name) == _USES[3] for name in names)]
    return found or [names for names in tables if any(_is_decoder_input(name) for name in names)]


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
    if not any(names[0] in known for known in tables):
        text = f"Measured: {names[0]}."
    else:
        used = {use for name in names for use in _uses(name)}
        uses = [use for use in _USES if use in used]
        text = f"Measured: {names[0]}, the table of the {' and the '.join(uses)}."
        if not any(_use(name) == _USES[3] for known in tables for name in known):
            text += " No output layer is stored: it shares a table, or there is none."
    others = [other[0] for other in tables if names[0] not in other]
    if others:
        text += f" Not measured: {', '.join(others)} (choose with --table)."
    return text


def _is_decoder_input(name: str) -> bool:
    return name.endswith(_DECODER_INPUT) or _USES[1] in _uses(name)


def _uses(name: str) -> Sequence[str]:
    return _USES[:2] if name.split(".")[-1] == "shared" else (_use(name),)


def _use(name: str) -> str:
    *outer, last = name.split(".")
    if OUTPUT_LAYERS & {*outer, last} or last in _OWN_OUTPUT:
        return _USES[3]
    for side, use in (("encoder", _USES[0]), ("decoder", _USES[1])):
        if side in outer or last == f"{side}_Wemb":
            return use
    return _USES[2]
