"""``spectral-fairseq doctor``: what is installed, how fairseq is patched, what cannot work."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import dataclass
from typing import Any, Dict, List

import spectral_fairseq
from spectral_fairseq.compat import Applied, Status, patch_fairseq, why_not_importable
from spectral_fairseq.options import option
from spectral_fairseq.provenance import cuda_devices, resolve_user_dir, versions
from spectral_fairseq.refusals import REFUSALS, Refusal, unquoted

DESCRIPTION = """\
Show what is installed, which patches of fairseq were applied and why, and what is not supported.
The exit status is 1 if something cannot work.
"""

USER_DIR = "spectral_fairseq"

_TITLES = {
    "defects": "Defects of fairseq",
    "features": "Features that patch fairseq",
}


def diagnose() -> Dict[str, Any]:
    """Collect the findings.

    Returns:
        ``versions``, ``cuda_devices``, ``patches`` (of ``defects`` of fairseq, and for
        ``features`` of this package), ``unsupported`` (what is refused, ``with`` what, what that
        needs, and the remedy), ``user_dir`` (what fairseq would import
        for ``--user-dir spectral_fairseq`` from the working directory, and whether that is this
        package) and ``problems``, empty when everything works.
    """
    obstacle = why_not_importable()
    patches = {"defects": patch_fairseq(), "features": [] if obstacle else _patched_for_features()}
    if obstacle is None:
        applied = patches["defects"] + patches["features"]
        problems = [
            f"{one.patch.name}: {one.detail}" for one in applied if one.status is Status.CANNOT
        ]
    else:
        problems = [obstacle]
    found = versions()
    if found["fairseq"] is None:
        problems.append("fairseq is not installed")
    package = os.path.dirname(os.path.abspath(spectral_fairseq.__file__))
    resolved = resolve_user_dir(USER_DIR)
    return {
        "versions": found,
        "cuda_devices": cuda_devices(),
        "patches": {group: [_as_json(one) for one in all_] for group, all_ in patches.items()},
        "unsupported": [_refusal_as_json(one) for one in REFUSALS],
        "user_dir": {
            "package": package,
            "resolves_to": resolved,
            "is_this_package": resolved is not None and os.path.samefile(resolved, package),
        },
        "problems": problems,
    }


def _patched_for_features() -> List[Applied]:
    from spectral_fairseq.plugin import trainer

    return trainer.patch_for_features()


def _as_json(applied: Applied) -> Dict[str, str]:
    patch = applied.patch
    return {
        "name": patch.name,
        "status": applied.status.value,
        "reason": patch.reason,
        "detail": applied.detail,
    }


def _refusal_as_json(one: Refusal) -> Dict[str, str]:
    found = {"refused": one.refused, "with": one.ours, "needs": one.needs, "remedy": one.remedy}
    return {name: unquoted(text) for name, text in found.items()}


def report() -> str:
    """The findings of :func:`diagnose` as text, for reading or for a problem report."""
    return _as_text(diagnose())


def _as_text(found: Dict[str, Any]) -> str:
    lines: List[str] = ["Versions"]
    for name, version in found["versions"].items():
        lines.append(f"  {name:<18}{version or 'not installed'}")
    devices = found["cuda_devices"]
    lines.append(f"  {'CUDA devices':<18}{', '.join(devices) or 'none'}")
    for group, patches in found["patches"].items():
        lines += ["", _TITLES[group]] if patches else []
        for patch in patches:
            lines.append(f"  [{patch['status']}] {patch['name']}")
            lines += [_indented(patch["reason"]), _indented(patch["detail"])]
    lines += ["", "Not supported (refused before training)"]
    for one in found["unsupported"]:
        lines += [_indented(one["refused"], " " * 2)]
        lines += [_indented(f"with {one['with']}, which needs {one['needs']}. {one['remedy']}")]
    lines += ["", f"--user-dir {USER_DIR}, from this folder"]
    user_dir = found["user_dir"]
    if user_dir["is_this_package"]:
        lines.append(f"  resolves to {user_dir['resolves_to']}")
    else:
        lines.append(
            f"  resolves to {user_dir['resolves_to'] or 'nothing'}; "
            f"give --user-dir {user_dir['package']} instead"
        )
    lines.append("")
    lines += [f"PROBLEM {problem}" for problem in found["problems"]] or ["No problems found."]
    return "\n".join(lines)


def _indented(sentence: str, indent: str = " " * 6) -> str:
    return textwrap.fill(
        sentence,
        96,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


@dataclass
class Arguments:
    """The arguments of ``doctor``."""

    format: str = option("text", "output format", choices=("text", "json"))


def run(args: Arguments) -> int:
    """Print the findings; returns the exit status 1 if something cannot work, else 0."""
    found = diagnose()
    print(json.dumps(found, indent=2) if args.format == "json" else _as_text(found))
    return 1 if found["problems"] else 0
