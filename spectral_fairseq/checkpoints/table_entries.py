"""Which entries of a model are tables over words, and what each is used for.

This is told by names and shapes. The names are those of fairseq, of the architectures of
transformers, of OpenNMT and Marian, and of the usual LSTM language models. Other modules have some
of these names too, so that :func:`fitting_tables` asks for the shape and the place of each. Several
``tables`` are given by the names of the modules that hold each.
"""

from __future__ import annotations

import re
from typing import List, Mapping, Sequence, Tuple

from spectral_fairseq.methods.output_layers import output_names

# Modules that are, or contain, an input table or an output layer over words.
INPUT_TABLES = frozenset(
    "embed_tokens embed_in word_emb word_embedding word_embeddings wte shared emb_luts "
    "token_embedding tok_embeddings tokens_embed".split()
)
OUTPUT_LAYERS = frozenset(output_names("inside"))
# Names that other modules have as well: only the module itself is a table, not what is inside it,
# and only if it has more rows than columns.
_OWN_INPUT = frozenset(
    "embedding embeddings embed emb encoder encoder_emb Wemb encoder_Wemb decoder_Wemb".split()
)
_OWN_OUTPUT = frozenset(output_names("alone"))
PLACES = INPUT_TABLES | OUTPUT_LAYERS
# These are output layers over words, whatever the shapes of other tables.
_SURE_OUTPUT = frozenset(output_names("certain"))
# An output layer in pieces, of which none is a table over all words.
_IN_PIECES = frozenset(("adaptive_softmax",))
# Names of matrices with a row for each word that are no output layers, and what overrules that.
_NO_OUTPUT = re.compile("emb|wpe|wte|pos|type|segment|lang|src|source|encod|look_?up|lut|teacher")
_SURELY_OUTPUT = re.compile("out|logit|head|softmax|classif|predict|unembed|scor")

_ADAPTER = re.compile(
    "(^|_)(lora|dora|hada|lokr|oft|boft|ia3|vera|trainable_tokens|adapters?)(_|$)", re.IGNORECASE
)

_DECODER_INPUT = "decoder.embed_tokens"
_USES = ("encoder's input", "decoder's input", "input", "output layer")


def may_be_table(name: str, rows: int, columns: int) -> bool:
    """Whether a matrix of this shape is a table over words, by its module's name or its own."""
    *outer, last = name.split(".")
    if outer[-1:] == ["mixture"] and last in ("prior", "latent"):  # of a mixture of softmaxes
        return False
    if last in PLACES or (last == "table" and PLACES & set(outer)):
        return True
    # A head may hold further matrices, such as the dense layer of lm_head in RoBERTa, d x d.
    return rows > columns and (last in _OWN_INPUT | _OWN_OUTPUT or bool(PLACES & set(outer)))


def may_hold_table(key: str, shape: Sequence[int]) -> bool:
    """Whether an entry of a state dict may be a table over words, by its name and its shape."""
    return len(shape) == 2 and may_be_table(key.removesuffix(".weight"), *shape)


def fitting_tables(shapes: Mapping[str, Tuple[int, int]], words: Sequence[int] = ()) -> List[str]:
    """Those of several matrices with names of tables whose shapes and places are those of tables.

    A table stands beside the layers of a model, and its output layer has a row for each word that
    its input has. So ``mlp.fc_out`` of each layer of GPT-J, d x 4d, is none.

    Args:
        shapes: name -> rows and columns of the matrices that :func:`may_be_table` lets pass.
        words: sizes of the vocabularies, if the settings of the model say them.
    """
    beside = {name: shape for name, shape in shapes.items() if not in_layers(name)}
    sizes = {rows for rows, _ in beside.values()}
    inputs = {rows for name, (rows, _) in beside.items() if _use(name) != _USES[3]} | {*words}
    fitting = []
    for name, (rows, columns) in shapes.items():
        if name not in beside:
            fits = rows > columns and (not sizes or rows in sizes)
        else:
            unsure = _use(name) == _USES[3] and not _SURE_OUTPUT & {*name.split(".")}
            fits = not (unsure and inputs and rows not in inputs)
        if fits:
            fitting.append(name)
    return fitting


def in_layers(name: str) -> bool:
    """Whether a module is a part of a numbered one, by its name: ``h.3.mlp.fc_out`` is."""
    *outer, _ = name.split(".")
    place = next((i for i, part in enumerate(outer) if part in PLACES), len(outer))
    return any(part.isdigit() for part in outer[:place])


def may_be_output(name: str) -> bool:
    """Whether a matrix with a row for each word may be the output layer, by a name not listed."""
    lower = name.lower()
    if in_layers(name) or adapted(name) or PLACES & {*name.split(".")}:
        return False
    return not _NO_OUTPUT.search(lower) or bool(_SURELY_OUTPUT.search(lower))


def is_output_entry(key: str) -> bool:
    """Whether an entry of a state dict belongs to an output layer with one of the known names."""
    module, _, entry = key.rpartition(".")
    if entry in OUTPUT_LAYERS | _OWN_OUTPUT:
        module = key
    parts = module.split(".")
    while len(parts) > 1 and parts[-1] in ("weight", "parametrizations"):
        parts.pop()
    if in_layers(module) or adapted(key):
        return False
    return bool((OUTPUT_LAYERS | _IN_PIECES) & {*parts}) or parts[-1] in _OWN_OUTPUT


def is_surely_output(key: str) -> bool:
    """Whether no other layer has the name to which an entry of a state dict belongs."""
    return bool(OUTPUT_LAYERS & {*key.split(".")})


def is_in_pieces(key: str) -> bool:
    """Whether an entry of a state dict is a piece of an adaptive softmax."""
    return bool(_IN_PIECES & {*key.split(".")})


def adapted(name: str) -> str:
    """The module that an entry of an adapter, such as LoRA's, changes; empty for other entries."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if _ADAPTER.search(part)), 0)
    module = parts[:first]
    return ".".join(module[:-1] if module and module[-1] == "base_layer" else module)


def output_tables(tables: Sequence[List[str]]) -> List[List[str]]:
    """Those of several tables that the softmax uses, or all if their names do not tell.

    A head inside a numbered layer, as those that predict further words have it, is not the one that
    is asked for where another stands beside the layers.
    """
    known = _known_outputs(tables)
    beside = [names for names in known if has_output_beside([names])]
    return beside or known or list(tables)


def is_output(names: Sequence[str], tables: Sequence[List[str]]) -> bool:
    """Whether the softmax is known to use a table."""
    return any(names[0] in known for known in _known_outputs(tables))


def _known_outputs(tables: Sequence[List[str]]) -> List[List[str]]:
    """The tables of output layers.

    Checkpoints of old versions do not store an output layer that shares the decoder's input table:
    where there is no output layer, it is the decoder's.
    """
    outputs = [names for names in tables if any(_use(name) == _USES[3] for name in names)]
    return outputs or [
        names
        for names in tables
        if any(name.endswith(_DECODER_INPUT) or _USES[1] in _uses(name) for name in names)
    ]


def has_output(tables: Sequence[List[str]]) -> bool:
    """Whether one of the tables is known to be that of an output layer."""
    return any(_use(name) == _USES[3] for known in tables for name in known)


def has_output_beside(tables: Sequence[List[str]]) -> bool:
    """Whether one of the tables is that of an output layer outside of the numbered layers."""
    return any(_use(name) == _USES[3] and not in_layers(name) for known in tables for name in known)


def uses_of(names: Sequence[str]) -> List[str]:
    """What a model uses a table for, in words, by the names of the modules that hold it."""
    used = {use for name in names for use in _uses(name)}
    return [use for use in _USES if use in used]


def _uses(name: str) -> Sequence[str]:
    return _USES[:2] if name.split(".")[-1] == "shared" else (_use(name),)


def _use(name: str) -> str:
    *outer, last = name.split(".")
    if OUTPUT_LAYERS & {*outer, last} or last in _OWN_OUTPUT:
        return _USES[3]
    if not (INPUT_TABLES | _OWN_INPUT) & {*outer, last}:
        return _USES[3]  # without a name of tables, it was found by its shape
    for side, use in (("encoder", _USES[0]), ("decoder", _USES[1])):
        if side in outer or last == f"{side}_Wemb":
            return use
    return _USES[2]
