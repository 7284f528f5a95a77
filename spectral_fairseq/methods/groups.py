"""Which parameters weight decay acts on.

Matrices decay and vectors do not, as usual. Of a table that is stored as factors some are left
alone and some decay although they are vectors, so that decay acts once on W: an SVD table
W = U diag(sigma) V' would shrink three times as fast as a plain one if all three decayed, and it is
linear in sigma, so decay of sigma alone is decay of W, be it L2 or decoupled.
"""

from __future__ import annotations

from typing import Iterator, List

from torch import nn

from spectral_fairseq.embeddings.table import Table


def _tables(model: nn.Module) -> Iterator[Table]:
    return (module for module in model.modules() if isinstance(module, Table))


def undecayed_parameters(model: nn.Module) -> List[nn.Parameter]:
    """The parameters of tables that weight decay should leave alone, each once.

    Args:
        model: whose tables declare them as :attr:`Table.undecayed`.
    """
    found = [getattr(table, name) for table in _tables(model) for name in table.undecayed]
    return list({id(parameter): parameter for parameter in found}.values())


def decaying_parameters(model: nn.Module) -> List[nn.Parameter]:
    """The trained parameters that decay: matrices, and what tables do not declare as undecayed."""
    undecayed = {id(parameter) for parameter in undecayed_parameters(model)}
    of_tables = {id(one) for table in _tables(model) for one in table.parameters(recurse=False)}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad
        and id(parameter) not in undecayed
        and (parameter.dim() > 1 or id(parameter) in of_tables)
    ]
