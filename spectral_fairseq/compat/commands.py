"""What is in force while a command of fairseq runs: around its ``main``, where it computes.

Every command hands its ``main`` to ``call_main``, which runs it in this process or in workers that
it starts; ``fairseq-generate`` alone calls its ``main`` itself.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from typing import Any, Callable, Dict

from spectral_fairseq.compat.patching import wrapping


def around_main(run: Callable[..., Any]) -> Dict[str, Callable[..., Any]]:
    """The functions of fairseq to wrap, so that every command's ``main`` is run by ``run``.

    Args:
        run: called with ``main``, the configuration and further arguments of ``main``. It goes to
            workers, so it is a function of a module.

    Returns:
        Place, as :func:`spectral_fairseq.compat.patching.replaces` has it -> wrapper.
    """

    @wrapping
    def calling(
        cfg: Any, main: Callable[..., Any], *args: Any, original: Callable[..., Any], **kwargs: Any
    ) -> Any:
        return original(cfg, partial(run, main), *args, **kwargs)

    @wrapping
    def generating(cfg: Any, *, original: Callable[..., Any]) -> Any:
        if isinstance(cfg, Namespace):
            from fairseq.dataclass.utils import convert_namespace_to_omegaconf

            cfg = convert_namespace_to_omegaconf(cfg)
        return run(original, cfg)

    for wrap in (calling, generating):  # a place is wrapped once by each of these names
        wrap.__qualname__ = f"{run.__module__}.{run.__qualname__}:{wrap.__name__}"
    places = {
        "fairseq.distributed.utils:call_main": calling,
        "fairseq_cli.generate:main": generating,
    }
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if getattr(spec, "name", "") == "fairseq_cli.generate":  # python -m fairseq_cli.generate
        places["__main__:main"] = generating
    return places
