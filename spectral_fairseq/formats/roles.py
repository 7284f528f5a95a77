"""Whether a matrix of a model is an input table or an output layer, by its name and its shape.

The names are those of fairseq, of the architectures of transformers, of OpenNMT, Marian and
Nematus, and of the usual LSTM language models. Other modules have some of these names too, so that
the shape and the place of each count as well. Several ``tables`` are given by the names of the
modules that hold each.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import List, Mapping, NamedTuple, Optional, Sequence

from spectral_fairseq.methods.output_layers import output_names

INPUT, OUTPUT, PIECE = "input", "output layer", "piece"


class Role(NamedTuple):
    """What the modules of a name are.

    Attributes:
        use: an input table, an output layer, or a piece of one, of which none has all words.
        inside: what is inside such a module has the role too. Where other modules have the name as
            well, only the module itself has it, and only with more rows than columns.
        sure: no other layer has the name, so that it is an output layer whatever the shapes of
            other tables.
    """

    use: str
    inside: bool = True
    sure: bool = False


# Several rules ask for the same name, and a model may have tens of thousands.
_remembered = lru_cache(maxsize=1 << 16)

# Modules that are, or contain, an input table, and names that other modules have as well.
_INPUTS = (
    "embed_tokens embed_in word_emb word_embedding word_embeddings wte shared emb_luts "
    "token_embedding token_embeddings tok_embeddings tokens_embed"
).split()
_OWN_INPUTS = (
    "embedding embeddings embed emb encoder encoder_emb Wemb encoder_Wemb decoder_Wemb Wemb_dec"
).split()
_CERTAIN = output_names("certain")

ROLES: Mapping[str, Role] = {
    **dict.fromkeys(_INPUTS, Role(INPUT)),
    **dict.fromkeys(_OWN_INPUTS, Role(INPUT, inside=False)),
    **{name: Role(OUTPUT, sure=name in _CERTAIN) for name in output_names("inside")},
    **{name: Role(OUTPUT, False, name in _CERTAIN) for name in output_names("alone")},
    "adaptive_softmax": Role(PIECE),
}
"""Name of a module, or of a matrix without one -> its role."""

USES = ("encoder's input", "decoder's input", INPUT, OUTPUT)
"""What a report calls the uses of a table."""

# Names of matrices with a row for each word that are no output layers, and what overrules that.
_NO_OUTPUT = re.compile("emb|wpe|wte|pos|type|segment|lang|src|source|encod|look_?up|lut|teacher")
_SURELY_OUTPUT = re.compile("out|logit|head|softmax|classif|predict|unembed|scor")
_ADAPTER = re.compile(
    "(^|_)(lora|dora|hada|lokr|oft|boft|ia3|vera|trainable_tokens|adapters?)(_|$)", re.IGNORECASE
)
_DECODER_INPUT = "decoder.embed_tokens"
# Names of matrices in one place, without modules, by the side that they are of.
_SIDES = {"encoder_Wemb": USES[0], "decoder_Wemb": USES[1], "Wemb_dec": USES[1]}


def _is_place(part: str) -> bool:
    """Whether a module of this name gives what is inside it the role of a table."""
    role = ROLES.get(part)
    return role is not None and role.inside and role.use != PIECE


def _is_own(part: str) -> bool:
    role = ROLES.get(part)
    return role is not None and not role.inside


@_remembered
def role_of(name: str) -> Optional[Role]:
    """The role of a module or a bare matrix by the parts of its name; None for other names."""
    *outer, last = name.split(".")
    roles = [ROLES[part] for part in (*outer, last) if part in ROLES]
    outputs = [role for role in roles if role.use == OUTPUT and role.inside]
    if last in ROLES and ROLES[last].use == OUTPUT:
        outputs.append(ROLES[last])
    if outputs:
        return max(outputs, key=lambda role: role.sure)
    return next((role for role in roles if role.use == INPUT), None)


def may_be_table(name: str, rows: int, columns: int) -> bool:
    """Whether a matrix of this shape is a table over words, by its module's name or its own."""
    *outer, last = name.split(".")
    if outer[-1:] == ["mixture"] and last in ("prior", "latent"):  # of a mixture of softmaxes
        return False
    inside = any(map(_is_place, outer))
    if _is_place(last) or (last == "table" and inside):
        return True
    # A head may hold further matrices, such as the dense layer of lm_head in RoBERTa, d x d.
    return rows > columns and (_is_own(last) or inside)


def may_hold_table(key: str, shape: Sequence[int]) -> bool:
    """Whether an entry of a state dict may be a table over words, by its name and its shape."""
    return len(shape) == 2 and may_be_table(key.removesuffix(".weight"), *shape)


@_remembered
def in_layers(name: str) -> bool:
    """Whether a module is a part of a numbered one, by its name: ``h.3.mlp.fc_out`` is."""
    *outer, _ = name.split(".")
    place = next((i for i, part in enumerate(outer) if _is_place(part)), len(outer))
    return any(part.isdigit() for part in outer[:place])


def may_be_output(name: str) -> bool:
    """Whether a matrix with a row for each word may be the output layer, by a name not listed."""
    lower = name.lower()
    if in_layers(name) or adapted(name) or any(map(_is_place, name.split("."))):
        return False
    return not _NO_OUTPUT.search(lower) or bool(_SURELY_OUTPUT.search(lower))


def is_output_name(name: str) -> bool:
    """Whether a table is that of an output layer.

    One without a name of tables is, since it was found by its shape.
    """
    role = role_of(name)
    return role is None or role.use == OUTPUT


def is_output_entry(key: str) -> bool:
    """Whether an entry of a state dict belongs to an output layer with one of the known names."""
    module, _, entry = key.rpartition(".")
    if entry in ROLES and ROLES[entry].use == OUTPUT:
        module = key
    parts = module.split(".")
    while len(parts) > 1 and parts[-1] in ("weight", "parametrizations"):
        parts.pop()
    if in_layers(module) or adapted(key):
        return False
    outputs = [ROLES[part] for part in parts if part in ROLES and ROLES[part].use != INPUT]
    last = ROLES.get(parts[-1])
    return any(role.inside for role in outputs) or (last is not None and last.use == OUTPUT)


def is_surely_output(key: str) -> bool:
    """Whether a module with a name of output layers alone holds an entry of a state dict."""
    return any(_is_place(part) and ROLES[part].use == OUTPUT for part in key.split("."))


def is_in_pieces(key: str) -> bool:
    """Whether an entry of a state dict is a piece of an adaptive softmax."""
    return any(part in ROLES and ROLES[part].use == PIECE for part in key.split("."))


@_remembered
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
    outputs = [names for names in tables if any(map(is_output_name, names))]
    return outputs or [
        names
        for names in tables
        if any(name.endswith(_DECODER_INPUT) or USES[1] in _uses(name) for name in names)
    ]


def has_output(tables: Sequence[List[str]]) -> bool:
    """Whether one of the tables is known to be that of an output layer."""
    return any(is_output_name(name) for known in tables for name in known)


def has_output_beside(tables: Sequence[List[str]]) -> bool:
    """Whether one of the tables is that of an output layer outside of the numbered layers."""
    return any(is_output_name(name) and not in_layers(name) for known in tables for name in known)


def uses_of(names: Sequence[str]) -> List[str]:
    """What a model uses a table for, in words, by the names of the modules that hold it."""
    used = {use for name in names for use in _uses(name)}
    return [use for use in USES if use in used]


def _uses(name: str) -> Sequence[str]:
    *outer, last = name.split(".")
    if last == "shared":
        return USES[:2]
    if is_output_name(name):
        return (OUTPUT,)
    if last in _SIDES:
        return (_SIDES[last],)
    sides = (use for side, use in (("encoder", USES[0]), ("decoder", USES[1])) if side in outer)
    return (next(sides, INPUT),)
