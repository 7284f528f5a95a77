"""No string of a setting is run as code: fairseq's ``eval`` takes literals only.

Note [A global named eval]
--------------------------
fairseq calls ``eval`` on settings in about twenty modules, many of them while it builds a model,
so that the settings of a checkpoint would run code. A name is looked up among the globals of its
module before the builtins. So each module of fairseq gets a global ``eval``, those that are
loaded now and, by a finder on ``sys.meta_path``, those that will be. Python's own ``eval`` stays
as it is, also for a plugin that begins with ``from fairseq.tasks import *``: a module without
``__all__`` gets one, which names what would be taken otherwise.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from importlib.abc import MetaPathFinder
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

from spectral_fairseq.checkpoints.literals import literal
from spectral_fairseq.compat.patching import Patch
from spectral_fairseq.errors import ConfigurationError

PACKAGES = ("fairseq", "fairseq_cli")


def _modules() -> Iterator[types.ModuleType]:
    """The modules of fairseq that are loaded, also one that runs as the main program."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)  # python -m fairseq_cli.train is __main__
        if (spec.name if spec is not None else name).partition(".")[0] in PACKAGES:
            yield module


class _PublicNames(Sequence[str]):
    """What ``import *`` takes of a module without ``__all__``, at the time, but for ``eval``.

    Args:
        space: the module's globals, to which an import of a submodule adds its name.
    """

    def __init__(self, space: Dict[str, Any]) -> None:
        self._space = space

    def _names(self) -> List[str]:
        return [name for name in self._space if not name.startswith("_") and name != "eval"]

    def __len__(self) -> int:
        return len(self._names())

    def __getitem__(self, index: Union[int, slice]) -> Any:
        return self._names()[index]


def _give_eval(module: types.ModuleType) -> None:
    space = module.__dict__
    space["eval"] = literal
    space.setdefault("__all__", _PublicNames(space))


class _LiteralEval(MetaPathFinder):
    """Finds modules of fairseq as the other finders do, and gives each its global ``eval``."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[types.ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _LiteralEval))
        # One of the older protocol, such as that of six before 1.16, has no such method.
        finds = (getattr(finder, "find_spec", None) for finder in others)
        specs = (find(fullname, path, target) for find in finds if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _give_eval_before_running(spec.loader)
        return spec


def _give_eval_before_running(loader: Any) -> None:
    run = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        _give_eval(module)
        run(module)

    loader.exec_module = exec_module


def _install_literal_settings() -> str:
    for module in _modules():
        _give_eval(module)
    if not any(isinstance(finder, _LiteralEval) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LiteralEval())
    from fairseq import utils

    try:
        utils.eval_str_list("[len('')]")
    except ConfigurationError:
        return f"eval takes literals only, in all modules of {' and '.join(PACKAGES)}"
    raise RuntimeError("it evaluates settings in a way that is not known here")


LITERAL_SETTINGS = Patch(
    name="literal settings",
    reason="fairseq evaluates strings of its settings as Python code, also those that a checkpoint "
    "brings, so that building a model from a checkpoint would run its author's code.",
    install=_install_literal_settings,
)
