"""What ``--criterion spectrum_control`` does where its flags are not given: one of two methods.

An SVD table has the penalties of the paper on its factors, which are renewed so that they stay
the singular value decomposition that the penalties are meant for. Any other output table is
controlled outside the optimiser; whoever asks for a penalty on its true spectrum has that
instead.
"""

from __future__ import annotations

import copy
from typing import Any, Dict

from spectral_fairseq.methods.control import ControlRule

# The paper gives grids and no values; these are the ones studies/spectrum arrives at.
FACTOR_PENALTIES: Dict[str, Any] = {
    "spectrum_weight": 0.0001,
    "orthogonality_weights": "0.001,0.001,0,0",
    "svd_interval": 10,
    "spectrum_decay": 0.0,
    "table_centering": 0.0,
}
DECOUPLED_CONTROL: Dict[str, Any] = {
    "spectrum_weight": 0.0,
    "orthogonality_weights": "0,0,0,0",
    "svd_interval": 0,
    "spectrum_decay": ControlRule.decay,
    "table_centering": ControlRule.centering,
}
# The flags that a criterion may leave unset.
NAMES = tuple(FACTOR_PENALTIES)


def with_method(cfg: Any, has_svd: bool) -> Any:
    """A copy of a criterion's configuration, in which the flags not given are those of the method.

    The method depends on whether the model has an SVD table.
    """
    values = dict(FACTOR_PENALTIES if has_svd else DECOUPLED_CONTROL)
    if cfg.spectrum_weight and not has_svd:  # a penalty on the true spectrum
        values.update(spectrum_decay=0.0, table_centering=0.0)
    if cfg.spectrum_weight == 0:
        values.update(svd_interval=0)
    cfg = copy.copy(cfg)
    for name, value in values.items():
        if getattr(cfg, name) is None:
            setattr(cfg, name, value)
    return cfg
