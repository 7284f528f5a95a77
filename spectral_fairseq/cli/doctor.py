"""``spectral-fairseq doctor``: what is installed, what was mended, what cannot work."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any, Dict, List

import spectral_fairseq
from spectral_fairseq.compat import Status, mend_host, why_not_importable
from spectral_fairseq.provenance import cuda_devices, resolve_user_dir, versions

USER_DIR = "spectral_fairseq"

UNSUPPORTED = {
    "--ddp-backend fully_sharded": "FSDP shards parameters outside forward, where the penalties "
    "need them whole",
    "--quant-noise-pq, --quant-noise-scalar": "quantisation noise expects a plain embedding table",
    "--adaptive-input, --adaptive-softmax-cutoff": "they split the table into several; in a "
    "transformer_xl_* the second is ours, and stays",
    "--character-embeddings": "they compute vectors instead of looking them up",
}
_REQUIRED = ("fairseq",)


def diagnose() -> Dict[str, Any]:
    """Collect the findings.

    Returns:
        ``versions``, ``cuda_devices``, ``mends``, ``unsupported``, ``user_dir`` (what fairseq
        would import for ``--user-dir spectral_fairseq`` from the working directory, and whether
        that is this package) and ``problems``, empty when everything works.
    """
    mends = mend_host()
    found = versions()
    package = os.path.dirname(os.path.abspath(spectral_fairseq.__file__))
    resolved = resolve_user_dir(USER_DIR)
    problems = [f"{name} is not installed" for name in _REQUIRED if found[name] is None]
    obstacle = why_not_importable()
    if obstacle is not None:
        problems.append(obstacle)
    else:
        cannot = [mend for mend in mends if mend.status is Status.CANNOT]
        problems += [f"{mend.name}: {mend.detail}" for mend in cannot]
    return {
        "versions": found,
        "cuda_devices": cuda_devices(),
        "mends": [
            {
                "name": mend.name,
                "status": mend.status.value,
                "defect": mend.defect,
                "detail": mend.detail,
            }
            for mend in mends
        ],
        "unsupported": UNSUPPORTED,
        "user_dir": {
            "package": package,
            "resolves_to": resolved,
            "is_this_package": resolved is not None and os.path.samefile(resolved, package),
        },
        "problems": problems,
    }


def report() -> str:
    """The findings of :func:`diagnose` as text, for reading or for a problem report."""
    return _as_text(diagnose())


def _as_text(found: Dict[str, Any]) -> str:
    lines: List[str] = ["Versions"]
    for name, version in found["versions"].items():
        lines.append(f"  {name:<18}{version or 'not installed'}")
    devices = found["cuda_devices"]
    lines.append(f"  {'CUDA devices':<18}{', '.join(devices) or 'none'}")
    lines += ["", "Defects of the host"]
    for mend in found["mends"]:
        lines.append(f"  [{mend['status']}] {mend['name']}: {mend['defect']}")
        lines.append(f"      {mend['detail']}")
    lines += ["", "Not supported with our tables and heads (refused before training starts)"]
    lines += [f"  {flag}: {why}" for flag, why in found["unsupported"].items()]
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


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``doctor``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "doctor",
        help="show versions, what was mended in fairseq, and what is not supported",
        description="Show what is installed, which defects of the host were found and mended, "
        "and what is not supported. Exit status 1 if something cannot work.",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings.

    Args:
        args: parsed arguments, with ``format``.

    Returns:
        Exit status: 1 if something cannot work, else 0.
    """
    found = diagnose()
    print(json.dumps(found, indent=2) if args.format == "json" else _as_text(found))
    return 1 if found["problems"] else 0
