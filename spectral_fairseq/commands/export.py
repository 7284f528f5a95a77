"""``spectral-fairseq export``: a checkpoint for plain fairseq, transformers or CTranslate2."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from spectral_fairseq.checkpoints.saved import checkpoint_file
from spectral_fairseq.commands.arguments import add_format, add_no_verify
from spectral_fairseq.commands.importing import import_plugin
from spectral_fairseq.commands.shared import (
    check_output,
    check_output_folder,
    naming_full_disk,
    save_atomically,
)
from spectral_fairseq.errors import (
    ConfigurationError,
    MissingDataError,
    NoEquivalentError,
    arguments_as_flags,
    clashing_flags,
    printable,
)
from spectral_fairseq.files import check_directory, check_file, making_folder
from spectral_fairseq.options import flag_of

DESCRIPTION = """\
Collapse the tables of a checkpoint of transformer_sc*, transformer_wn*, transformer_lm_sc* or
transformer_lm_wn* to a plain transformer or transformer_lm checkpoint, which fairseq loads without
--user-dir and which decodes at plain fairseq's speed. A checkpoint of fairseq's own Transformers is
saved anew, so that fairseq alone loads it under torch >= 2.6, which refuses fairseq's own files.
Both models are run on the same random input first, and nothing is written unless their logits agree
within 1e-4 of the largest one.

The result holds no optimiser state: it serves fairseq-generate, fairseq-interactive,
fairseq-eval-lm, --finetune-from-model and converters.

With --to huggingface or ctranslate2, OUT is a folder:

  AutoModelForSeq2SeqLM.from_pretrained(OUT), AutoModelForCausalLM of an LM
  ctranslate2.Translator(OUT), Generator of an LM

A model for transformers is loaded again, and nothing is left unless its logits are fairseq's. What
CTranslate2 makes is not compared.
Example: spectral-fairseq export checkpoint_best.pt plain.pt
"""

Printed = Tuple[str, Dict[str, Any]]  # what is printed as text, and as JSON

_FORMATS = ("fairseq", "huggingface", "ctranslate2")
# What each format's folders hold, in any version of its library.
_NAMES = {
    "huggingface": (
        *("config.json", "generation_config.json", "model*.safetensors*", "tokenizer*.json"),
        *("special_tokens_map.json", "vocab*.json", "target_vocab.json", "merges.txt"),
        *("source.spm", "target.spm", "target", "bpe.codes", "sentencepiece.model"),
    ),
    "ctranslate2": ("model.bin", "config.json", "*vocabulary.json", "*vocabulary.txt"),
}
# Flags of some formats only.
_ONLY = {
    "data": ("huggingface", "ctranslate2"),
    "bpe_codes": ("huggingface",),
    "sentencepiece_model": ("huggingface",),
    "quantization": ("ctranslate2",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, the output and the options of the formats."""
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="checkpoint saved by fairseq-train")
    add("output", metavar="OUT", help="file to write, or folder to make for another format")
    add("--to", choices=_FORMATS, default=_FORMATS[0], help="format")
    add(
        "--data",
        metavar="DIR",
        help="folder of the dictionaries (default: the one that the checkpoint was trained on)",
    )
    add(
        "--bpe-codes",
        metavar="FILE",
        help="codes of subword-nmt, with which the tokenizer cuts words (huggingface)",
    )
    add(
        "--sentencepiece-model",
        metavar="FILE",
        help="model of sentencepiece, with which the tokenizer cuts text (huggingface)",
    )
    add("--quantization", metavar="TYPE", help="type of the weights, such as int8 (ctranslate2)")
    add("--overwrite", action="store_true", help="replace OUT if it exists in that format")
    add_format(parser)
    add_no_verify(parser)


def run(args: argparse.Namespace) -> int:
    """Export one checkpoint; returns the exit status 0."""
    checkpoint_file(args.checkpoint)
    _check_flags(args)
    text, figures = _to_file(args) if args.to == "fairseq" else _to_folder(args)
    print(json.dumps(figures) if args.format == "json" else printable(text))
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    for name, formats in _ONLY.items():
        if getattr(args, name) is not None and args.to not in formats:
            flag = flag_of(name)
            wanted = f"--to {' or '.join(formats)} with {flag}"
            remedy = f"Remove {flag}, or choose another --to."
            raise ConfigurationError(wanted, f"--to {args.to}", remedy)
    if args.bpe_codes and args.sentencepiece_model:
        raise clashing_flags("--bpe-codes", "--sentencepiece-model")
    if args.data:
        check_directory(args.data, "a folder of dictionaries", "Correct --data.")
    for file in (args.bpe_codes, args.sentencepiece_model):
        if file:
            check_file(file, "a file", "Correct its name.")


def _loaded(args: argparse.Namespace) -> Dict[str, Any]:
    """The checkpoint to export, with a configuration."""
    import_plugin()
    from spectral_fairseq.checkpoints.reading import load_checkpoint
    from spectral_fairseq.commands.export_plain import with_configuration

    return with_configuration(load_checkpoint(args.checkpoint, args.verify), args.checkpoint)


def _to_file(args: argparse.Namespace) -> Printed:
    out = check_output(args.output, [args.checkpoint], args.overwrite)
    checkpoint = _loaded(args)
    from spectral_fairseq.commands.export_plain import export_checkpoint

    plain, check = export_checkpoint(checkpoint)
    save_atomically(plain, out)
    arch = plain["cfg"]["model"]["_name"]
    text = (
        f"{out}: a plain {arch} checkpoint; its logits differ by at most "
        f"{check.max_difference:.2e} (largest logit {check.max_logit:.3g})"
    )
    return text, {"output": str(out), "arch": arch, **_figures(check)}


def _to_folder(args: argparse.Namespace) -> Printed:
    names = (args.checkpoint, args.data, args.bpe_codes, args.sentencepiece_model)
    inputs = [path for path in names if path]
    out = check_output_folder(args.output, inputs, _NAMES[args.to], args.overwrite)
    checkpoint = _loaded(args)
    with naming_full_disk(out, "choose another folder"):
        _refuse_language_pairs(checkpoint, args.to)
        with making_folder(out) as folder, arguments_as_flags(quantization="--quantization"):
            if args.to == "huggingface":
                return _fill_huggingface(args, checkpoint, folder, out)
            return _fill_ctranslate2(args, checkpoint, folder, out)


def _refuse_language_pairs(checkpoint: Dict[str, Any], target: str) -> None:
    """Refuse tasks that append their languages to the dictionaries of the training data."""
    from spectral_fairseq.checkpoints.settings import checkpoint_settings

    task = checkpoint_settings(checkpoint, "task")
    if task.get("lang_pairs"):
        wanted = f"a model of one language pair, for --to {target}"
        raise NoEquivalentError(wanted, f"one of --task {task.get('_name')}")


def _fill_huggingface(
    args: argparse.Namespace, checkpoint: Dict[str, Any], folder: Path, out: Path
) -> Printed:
    from spectral_fairseq.commands.export_huggingface import write_huggingface
    from spectral_fairseq.commands.export_tokenizer import write_tokenizer

    name, check = write_huggingface(checkpoint, folder)
    source, target, languages = _dictionaries(args, checkpoint)
    takes = write_tokenizer(
        folder,
        source.symbols,
        target.symbols,
        languages,
        Path(args.bpe_codes) if args.bpe_codes else None,
        Path(args.sentencepiece_model) if args.sentencepiece_model else None,
    )
    text = (
        f"{out}: a model of class {name}; its logits differ from fairseq's by at most "
        f"{check.max_difference:.2e} (largest logit {check.max_logit:.3g}). {takes}."
    )
    return text, {"output": str(out), "class": name, **_figures(check)}


def _fill_ctranslate2(
    args: argparse.Namespace, checkpoint: Dict[str, Any], folder: Path, out: Path
) -> Printed:
    from spectral_fairseq.commands.export_ctranslate2 import check_model, write_ctranslate2

    check_model(checkpoint)
    source, _, languages = _dictionaries(args, checkpoint)
    write_ctranslate2(checkpoint, folder, source.path.parent, languages, args.quantization)
    text = f"{out}: a model of CTranslate2, in {args.quantization or 'float32'}"
    return text, {"output": str(out), "quantization": args.quantization}


def _dictionaries(
    args: argparse.Namespace, checkpoint: Dict[str, Any]
) -> Tuple[Any, Any, Optional[Tuple[str, str]]]:
    """Dictionaries of source and target, and their languages; None for a language model."""
    from spectral_fairseq.checkpoints.collapse import collapse_tables
    from spectral_fairseq.checkpoints.dictionary import (
        dictionary_files,
        find_dictionary,
        fitting_dictionary,
    )
    from spectral_fairseq.checkpoints.settings import checkpoint_settings

    model = collapse_tables(checkpoint["model"])
    task = checkpoint_settings(checkpoint, "task")
    dictionaries: Dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        table = f"{side}.embed_tokens.weight"
        if table not in model:
            continue
        rows = len(model[table])
        if args.data:
            files = dictionary_files(Path(args.data), task, table)
            words = fitting_dictionary(files, rows, task)
            why = f"none of {rows} symbols in {args.data}"
        else:
            words, why = find_dictionary(None, task, table, rows, args.checkpoint)
        if words is None:
            remedy = "Name the folder of the training data's dictionaries with --data."
            raise MissingDataError(f"the dictionary of {table}", why, remedy)
        dictionaries[side] = words
    target = dictionaries["decoder"]
    if "encoder" not in dictionaries:
        return target, target, None
    source = dictionaries["encoder"]
    return (
        source,
        target,
        (_language(task, source, "source"), _language(task, target, "target")),
    )


def _language(task: Dict[str, Any], words: Any, side: str) -> str:
    """The language of a side: that of the training, else that in the name of its dictionary."""
    named = task.get(f"{side}_lang")
    in_name = re.fullmatch(r"dict\.(.+)\.txt", words.path.name)
    return str(named or (in_name[1] if in_name else side))


def _figures(check: Any) -> Dict[str, float]:
    return {"max_logit_difference": check.max_difference, "max_logit": check.max_logit}
