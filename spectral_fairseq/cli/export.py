"""``spectral-fairseq export``: a checkpoint that plain fairseq loads without this package."""

from __future__ import annotations

import argparse
import json

from spectral_fairseq.checkpoints.saved import checkpoint_file
from spectral_fairseq.cli.fairseq_plugin import import_plugin
from spectral_fairseq.cli.output import check_output, save_atomically

DESCRIPTION = """\
Collapse the factored tables of a transformer_sc* or transformer_lm_sc* checkpoint to a plain
transformer or transformer_lm checkpoint, which fairseq loads without --user-dir and which
decodes at plain fairseq's speed. Both models are run on the same random input first, and
nothing is written unless their logits are equal.

The result holds no optimiser state: it serves fairseq-generate, fairseq-interactive,
fairseq-eval-lm, --finetune-from-model and converters, for example

  ct2-fairseq-converter --model_path OUT --data_dir DATA --source_lang de --target_lang en \\
      --output_dir FOLDER
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``.

    Args:
        parser: of the subcommand.
    """
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint saved by fairseq-train")
    parser.add_argument("output", metavar="OUT", help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")


def run(args: argparse.Namespace) -> int:
    """Export one checkpoint.

    Args:
        args: parsed arguments, with ``checkpoint``, ``output`` and ``overwrite``.

    Returns:
        Exit status 0; every failure is an error.
    """
    checkpoint_file(args.checkpoint)
    out = check_output(args.output, [args.checkpoint], args.overwrite)
    import_plugin()
    from spectral_fairseq.checkpoints.reading import load_checkpoint
    from spectral_fairseq.tools.export.plain import export_checkpoint

    plain, check = export_checkpoint(load_checkpoint(args.checkpoint))
    save_atomically(plain, out)
    figures = {
        "output": str(out),
        "arch": plain["cfg"]["model"]["_name"],
        "max_logit_difference": check.max_difference,
        "max_logit": check.max_logit,
    }
    print(
        f"{out}: a plain {figures['arch']} checkpoint; its logits differ by at most "
        f"{check.max_difference:.2e} (greatest logit {check.max_logit:.3g})"
    )
    print(json.dumps(figures))
    return 0
