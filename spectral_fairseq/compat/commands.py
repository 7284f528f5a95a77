"""What is in force while a command of fairseq runs: around its ``main``, where it computes.

The commands that train or use a model hand their ``main`` to ``call_main``, which runs it in this
process or in workers that it starts; ``fairseq-generate`` alone calls its ``main`` itself.
``fairseq-hydra-train`` does so before the plugin is there: nothing of this is in force in it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from typing import Any, Callable, ContextManager, Dict

from spectral_fairseq.compat.patching import wrapping

Within = Callable[[Any], ContextManager[Any]]


def around_main(within: Within) -> Dict[str, Callable[..., Any]]:
    """The functions of fairseq to wrap, so that every command's ``main`` runs within a context.

    Args:
        within: makes the context for a configuration. It goes to workers, so it is a function of a
            module.

    Returns:
        Place, as :func:`spectral_fairseq.compat.patching.replaces` has it -> wrapper.
    """

    @wrapping
    def calling(
        cfg: Any, main: Callable[..., Any], *args: Any, original: Callable[..., Any], **kwargs: Any
    ) -> Any:
        return original(cfg, partial(_run, within, main), *args, **kwargs)

    @wrapping
    def generating(cfg: Any, *, original: Callable[..., Any]) -> Any:
        if isinstance(cfg, Namespace):
            from fairseq.dataclass.utils import convert_namespace_to_omegaconf

            cfg = convert_namespace_to_omegaconf(cfg)
        return _run(within, original, cfg)

    for wrap in (calling, generating):  # a place is wrapped once by each of these names
        wrap.__qualname__ = f"{within.__module__}.{within.__qualname__}:{wrap.__name__}"
    places = {
        "fairseq.distributed.utils:call_main": calling,
        "fairseq_cli.generate:main": generating,
    }
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if getattr(spec, "name", "") == "fairseq_cli.generate":  # python -m fairseq_cli.generate
        places["__main__:main"] = generating
    return places


def _run(within: Within, main: Callable[..., Any], cfg: Any, *args: Any, **kwargs: Any) -> Any:
    with within(cfg):
        return main(cfg, *args, **kwargs)
