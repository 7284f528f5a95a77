"""What ``--criterion spectrum_control`` does depends on the table, where its flags are not given.

An SVD table has the penalties of the paper on its factors, which are renewed so that they stay the
singular value decomposition that the penalties are meant for. Any other output table is controlled
outside the optimiser; whoever asks for a penalty on its true spectrum has that instead.
"""

from __future__ import annotations

from typing import Any, Dict

_NO_CONTROL = {"spectrum_decay": 0.0, "table_centering": 0.0}
_NO_RENEWAL = {"svd_interval": 0}
SVD: Dict[str, Any] = {
    # The paper gives grids and no values; these are the ones docs/spectrum.md arrives at.
    "spectrum_weight": 0.0001,
    "orthogonality_weights": "0.001,0.001,0,0",
    "svd_interval": 10,
    **_NO_CONTROL,
}
PLAIN: Dict[str, Any] = {
    "spectrum_weight": 0.0,
    "orthogonality_weights": "0,0,0,0",
    # The gentlest values that hold the bound: docs/spectrum.md. With an interval of ten updates
    # they go a tenth of the way at the full learning rate.
    "spectrum_decay": 0.01,
    "table_centering": 0.01,
    **_NO_RENEWAL,
}
# The flags that a criterion may leave unset.
NAMES = tuple(SVD)


def has_unset(cfg: Any) -> bool:
    """Whether a configuration leaves anything to the kind of table."""
    return any(getattr(cfg, name) is None for name in NAMES)


class Completed:
    """A configuration in which nothing is unset.

    Args:
        cfg: a criterion's configuration.
        has_svd: whether the model has an SVD table.
        renewable: whether the way of training lets factors be renewed.
    """

    def __init__(self, cfg: Any, has_svd: bool, renewable: bool) -> None:
        self._cfg = cfg
        self._unset = dict(SVD if has_svd else PLAIN)
        if not has_svd and cfg.spectrum_weight:
            self._unset.update(_NO_CONTROL)
        if cfg.spectrum_weight == 0 or not renewable:
            self._unset.update(_NO_RENEWAL)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cfg, name)
        return self._unset.get(name) if value is None else value
