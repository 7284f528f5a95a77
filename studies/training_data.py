"""Binary data of the studies, each made once, from text that ships or lies in a folder."""

from __future__ import annotations

import bisect
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence

from studies import corpus, machine
from studies.work_folder import write_text

ROOT = Path(__file__).resolve().parents[1]
OPENDOCS = ROOT / "examples" / "data" / "opendocs_de_en"


def translation_data(
    folder: Path,
    *,
    pairs: int,
    subwords: int,
    splits: Sequence[str] = ("train", "valid"),
    source: Path = OPENDOCS,
) -> None:
    """Make ``folder/translation`` from the first pairs of a corpus, unless it is there.

    Args:
        folder: also receives ``text/``, ``subwords/`` and ``subwords.model``.
        pairs: of the training split.
        subwords: of the vocabulary that both languages share.
        splits: ``train``, ``valid`` and, if wanted, ``test``.
        source: see :func:`studies.corpus.load_manifest`.
    """
    if (folder / "translation").exists():
        return
    whole, text, model = folder / "whole", folder / "text", folder / "subwords.model"
    corpus.unpack(source, whole)
    text.mkdir(parents=True, exist_ok=True)
    for split in splits:
        for language in ("de", "en"):
            lines = corpus.read_lines(whole / f"{split}.{language}")
            kept = lines[:pairs] if split == "train" else lines
            write_text(text / f"{split}.{language}", "".join(f"{x}\n" for x in kept))
    shutil.rmtree(whole)
    corpus.learn_subwords(text, model, subwords)
    corpus.encode(text, model, folder / "subwords")
    prefixes = _prefixes({split: folder / "subwords" / split for split in splits})
    languages = ("--source-lang", "de", "--target-lang", "en", "--joined-dictionary")
    _preprocess(folder / "translation", *languages, *prefixes)


def other_test_data(folder: Path, name: str, tests: Mapping[str, Path]) -> None:
    """Make ``folder/NAME/translation`` from other test sets, unless it is there.

    Args:
        folder: made by :func:`translation_data`, whose subwords and dictionary are used.
        name: of the folder in it; it also receives ``text/`` and ``subwords/``.
        tests: name -> path of the text without ``.de`` and ``.en``. In fairseq's data they are
            called ``test``, ``test1`` and so on, in this order.
    """
    root = folder / name
    if (root / "translation").exists():
        return
    for test, path in tests.items():
        for language in ("de", "en"):
            lines = corpus.read_lines(path.with_name(f"{path.name}.{language}"))
            target = root / "text" / f"{test}.{language}"
            target.parent.mkdir(parents=True, exist_ok=True)
            write_text(target, "".join(f"{line}\n" for line in lines))
    corpus.encode(root / "text", folder / "subwords.model", root / "subwords", tests)
    dictionary = str(folder / "translation" / "dict.de.txt")
    flags = ("--source-lang", "de", "--target-lang", "en", "--joined-dictionary")
    prefixes = ",".join(str(root / "subwords" / test) for test in tests)
    _preprocess(root / "translation", *flags, "--srcdict", dictionary, "--testpref", prefixes)


def language_model_data(
    folder: Path,
    source: Path,
    *limit: str,
    splits: Sequence[str] = ("train", "valid"),
    tokens: Optional[Mapping[str, int]] = None,
) -> None:
    """Make ``folder/language_model`` from ``source/train.tokens`` and so on, unless it is there.

    Args:
        folder: receives the binary data, and ``tokens/`` if the text is shortened.
        source: as made by examples/lm_sotu/sotu.py.
        limit: flags of fairseq-preprocess that limit the vocabulary.
        splits: ``train``, ``valid`` and, if wanted, ``test``.
        tokens: for a split to be shortened, about how many words are kept of it: the last ones of
            the training split, which is in the order of time, and the first ones of another.
    """
    if (folder / "language_model").exists():
        return
    paths = {split: source / f"{split}.tokens" for split in splits}
    for split, count in (tokens or {}).items():
        lines = corpus.read_lines(paths[split])
        paths[split] = folder / "tokens" / f"{split}.tokens"
        paths[split].parent.mkdir(parents=True, exist_ok=True)
        latest = split == "train"
        kept = _first_tokens(lines[::-1], count)[::-1] if latest else _first_tokens(lines, count)
        write_text(paths[split], "".join(f"{line}\n" for line in kept))
    _preprocess(folder / "language_model", "--only-source", *_prefixes(paths), *limit)


def _first_tokens(lines: List[str], count: int) -> List[str]:
    """The first lines, until they hold ``count`` words."""
    total = list(itertools.accumulate(len(line.split()) for line in lines))
    return lines[: bisect.bisect_left(total, count) + 1]


def _prefixes(paths: Dict[str, Path]) -> List[str]:
    return [part for split, path in paths.items() for part in (f"--{split}pref", str(path))]


def _preprocess(destination: Path, *flags: str) -> None:
    """Run fairseq-preprocess, whose interrupted output is never taken for the data."""
    partial = destination.with_name(f"{destination.name}.partial")
    corpus.clear(partial)
    command = [machine.find_command("fairseq-preprocess"), "--destdir", str(partial), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    partial.rename(destination)
