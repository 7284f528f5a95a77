"""``spectral-fairseq doctor``: what is installed, how fairseq is patched, what cannot work."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from typing import Any, Dict, List

import spectral_fairseq
from spectral_fairseq.commands.arguments import add_format
from spectral_fairseq.commands.importing import INSTALL_FAIRSEQ
from spectral_fairseq.compat import Applied, Status, patch_fairseq, why_not_importable
from spectral_fairseq.errors import printable, wrapped
from spectral_fairseq.provenance import cuda_devices, resolve_user_dir, versions
from spectral_fairseq.refusals import REFUSALS, Refusal, unquoted

DESCRIPTION = """\
Say whether this installation works, with its versions; --all adds which patches of fairseq were
applied and why, and what is not supported. The exit status is 1 if something cannot work.
Example: spectral-fairseq doctor --all
"""

USER_DIR = "spectral_fairseq"
TESTED = {"python": ("3.9", "3.13"), "torch": ("1.12", "2.14")}
"""The oldest and the newest version in which all tests were run; others are not excluded."""

_INDENT = " " * 6
_TITLES = {
    "defects": "Defects of fairseq",
    "features": "Features that patch fairseq",
}


def diagnose() -> Dict[str, Any]:
    """Collect the findings.

    Returns:
        ``versions``, ``cuda_devices``, ``float32_products`` (what ``--float32-products auto`` takes
        on a CPU, and GFLOP/s of a thread through ``mkl`` and ``onednn``), ``patches`` (of
        ``defects`` of fairseq, and for ``features`` of this package), ``unsupported`` (what is
        refused, ``with`` what, what that needs, and the remedy), ``user_dir`` (what fairseq would
        import for ``--user-dir spectral_fairseq`` from the working directory, and whether that is
        this package) and ``problems``, empty when everything works.
    """
    installed = versions()
    patches: Dict[str, List[Applied]] = {"defects": [], "features": []}
    problems: List[str] = []
    obstacle = None if installed["fairseq"] is None else why_not_importable()
    if obstacle is not None:
        problems.append(obstacle)
    elif installed["fairseq"] is not None:
        from spectral_fairseq.plugin import trainer

        patches = {"defects": patch_fairseq(), "features": trainer.patch_for_features()}
        problems += [
            f"{applied.patch.name}: {applied.detail}"
            for group in patches.values()
            for applied in group
            if applied.status is Status.CANNOT
        ]
    package = os.path.dirname(os.path.abspath(spectral_fairseq.__file__))
    resolved = resolve_user_dir(USER_DIR)
    return {
        "versions": installed,
        "cuda_devices": cuda_devices(),
        "float32_products": _products(),
        "patches": {
            group: [_as_json(applied) for applied in all_] for group, all_ in patches.items()
        },
        "unsupported": [_refusal_as_json(refusal) for refusal in REFUSALS],
        "user_dir": {
            "package": package,
            "resolves_to": resolved,
            "is_this_package": resolved is not None and os.path.samefile(resolved, package),
        },
        "problems": problems,
    }


def _products() -> Dict[str, Any]:
    from spectral_fairseq.functional.float32_products import choose_products, timed_products

    mkl, onednn = timed_products() or (None, None)
    return {"auto": str(choose_products()), "mkl": mkl, "onednn": onednn}


def _as_json(applied: Applied) -> Dict[str, str]:
    patch = applied.patch
    return {
        "name": patch.name,
        "status": applied.status.value,
        "reason": patch.reason,
        "detail": applied.detail,
    }


def _refusal_as_json(refusal: Refusal) -> Dict[str, str]:
    texts = {
        "refused": refusal.refused,
        "with": refusal.feature,
        "needs": refusal.needs,
        "remedy": refusal.remedy,
    }
    return {name: unquoted(text) for name, text in texts.items()}


def as_text(findings: Dict[str, Any], whole: bool = False) -> str:
    """The findings of :func:`diagnose` as text, for reading or for a problem report."""
    lines = [_verdict(findings)]
    lines += [wrapped(f"PROBLEM {problem}") for problem in findings["problems"]]
    lines += ["", "Versions"]
    for name, version in findings["versions"].items():
        lines.append(f"  {name:<18}{version or 'not installed'}{_tested(name, version)}")
    lines.append(f"  {'CUDA devices':<18}{', '.join(findings['cuda_devices']) or 'none'}")
    products = findings["float32_products"]
    lines += ["", "Products of float32 matrices on this CPU", f"  {products['auto']}"]
    if products["mkl"]:
        mkl, onednn = products["mkl"], products["onednn"]
        lines.append(f"  a thread: MKL {mkl:.0f} GFLOP/s, oneDNN {onednn:.0f}")
    if any(findings["patches"].values()):
        lines += ["", "fairseq with this package"]
        for group, patches in findings["patches"].items():
            counts = Counter(patch["status"] for patch in patches)
            counted = ", ".join(f"{number} {status}" for status, number in counts.items())
            lines.append(f"  {_TITLES[group]}: {counted}")
        lines.append(f"  Refused before training: {len(findings['unsupported'])} combinations")
        lines.append(
            f"  --user-dir {USER_DIR}, from this folder: {_user_dir(findings['user_dir'])}"
        )
    lines += _details(findings) if whole else ["doctor --all explains each patch and refusal."]
    return "\n".join(lines)


def _verdict(findings: Dict[str, Any]) -> str:
    if findings["problems"]:
        return "Something cannot work."
    if findings["versions"]["fairseq"] is None:
        without = (
            "No problems found. fairseq is not installed: analyze, compare and the torch library "
            "work without it; training with fairseq and the other commands need it. "
        )
        return wrapped(without + INSTALL_FAIRSEQ)
    return "No problems found."


def _tested(name: str, version: str) -> str:
    """What was tested of a package, where its version is not pinned by fairseq's."""
    if name not in TESTED:
        return ""
    installed, oldest, newest = (
        tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (version, *TESTED[name])
    )
    beside = "tested" if oldest <= installed <= newest else "not tested, may work; tested"
    return f" ({beside}: {TESTED[name][0]} to {TESTED[name][1]})"


def _user_dir(entry: Dict[str, Any]) -> str:
    if entry["is_this_package"]:
        return "this package"
    return f"{entry['resolves_to'] or 'nothing'}\n  give --user-dir {entry['package']} instead"


def _details(findings: Dict[str, Any]) -> List[str]:
    lines: List[str] = []
    for group, patches in findings["patches"].items():
        lines += ["", _TITLES[group]] if patches else []
        for patch in patches:
            lines.append(f"  [{patch['status']}] {patch['name']}")
            lines += [wrapped(patch[text], _INDENT) for text in ("reason", "detail")]
    lines += ["", "Not supported (refused before training)"]
    for refusal in findings["unsupported"]:
        needs = f"with {refusal['with']}, which needs {refusal['needs']}. {refusal['remedy']}"
        lines += [wrapped(refusal["refused"], "  "), wrapped(needs, _INDENT)]
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is printed, and how."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="also each patch of fairseq with its reason, and what is refused",
    )
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; returns the exit status 1 if something cannot work, else 0."""
    findings = diagnose()
    text = printable(as_text(findings, args.all))
    print(json.dumps(findings, indent=2) if args.format == "json" else text)
    return 1 if findings["problems"] else 0
