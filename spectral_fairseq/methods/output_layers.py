"""The names that output layers over words have, and where each is looked for."""

from __future__ import annotations

from typing import Dict, Tuple

# name -> its roles:
#   fairseq    a decoder of fairseq keeps its output layer, or the weight alone, under this name
#   attribute  a model without get_output_embeddings() has its output layer as this attribute
#   inside     in a file, a module of this name is an output layer or contains one
#   alone      in a file, other modules have this name as well: only the module itself is one, not
#              what is inside it, and only if it has more rows than columns
#   certain    in a file it is an output layer whatever the shapes of other tables
# The names are those of fairseq, of the architectures of transformers, of OpenNMT, Marian and
# Nematus, and of the usual LSTM language models. Each role is looked for in this order.
_ROLES: Dict[str, str] = {
    "lm_head": "attribute inside certain",
    "output_projection": "fairseq attribute inside certain",  # transformer and most others
    "fc_out": "fairseq inside",  # lstm
    "fc3": "fairseq inside",  # fconv
    "embed_out": "fairseq inside certain",  # lightconv; GPT-NeoX
    "generator_lm_head": "inside certain",
    "vocab_projector": "inside certain",
    "proj_out": "inside",
    "output_layer": "inside",
    "generator": "inside",
    "unembed": "alone certain",
    "decoder_ff_logit_out_W": "alone certain",
    "ff_logit_W": "alone certain",
    "decoder": "alone",
    "output": "attribute alone",
    "head": "attribute alone",
    # In a file these are usually classifiers of sentences; a model that is trained may tie them.
    "classifier": "attribute",
    "score": "attribute",
}


def output_names(role: str) -> Tuple[str, ...]:
    """The names with a role, in the order in which they are looked for."""
    return tuple(name for name, roles in _ROLES.items() if role in roles.split())
