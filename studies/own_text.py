"""A tokenised corpus of the user's own, in the files that :mod:`sotu` would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

from spectral_fairseq.errors import DataError
from studies.corpus import sha256, split_lines
from studies.sotu_corpus import SPLITS, UNKNOWN
from studies.work_folder import write_text


def read(folder: Path) -> Dict[str, List[str]]:
    """Lines of ``train.tokens``, ``valid.tokens`` and ``test.tokens``, by split.

    Raises:
        DataError: a file is missing, empty or not in UTF-8.
    """
    texts: Dict[str, List[str]] = {}
    for split in SPLITS:
        path = folder / f"{split}.tokens"
        try:
            texts[split] = split_lines(path.read_bytes())
        except OSError as error:
            raise DataError(
                f"the file {path}",
                error.strerror or str(error),
                "--corpus is a folder with train.tokens, valid.tokens and test.tokens, in which "
                "words are separated by blanks.",
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"UTF-8 in {path}",
                str(error),
                f"Convert it, for example with: iconv -f latin1 -t utf-8 {path.name}",
            ) from None
        if not any(line.split() for line in texts[split]):
            raise DataError(f"words in {path}", "none", "Give a --corpus with text in it.")
    return texts


def checksum(folder: Path) -> str:
    """SHA-256 of the three texts, by which a work folder knows its corpus.

    Raises:
        DataError: see :func:`read`.
    """
    texts = read(folder)
    return sha256("\0".join("\n".join(texts[split]) for split in sorted(texts)).encode())


def prepare(folder: Path, source: Path) -> Dict[str, Any]:
    """Copy the three files of ``source`` into ``folder``.

    Returns:
        ``lines``, ``tokens``, ``unknown`` and ``vocabulary``, as :func:`sotu.prepare` does.

    Raises:
        DataError: see :func:`read`.
    """
    texts = read(source)
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in texts.items():
        write_text(folder / f"{split}.tokens", "".join(f"{line}\n" for line in lines))
    words = {split: [line.split() for line in lines] for split, lines in texts.items()}
    return {
        "lines": {split: len(lines) for split, lines in texts.items()},
        "tokens": {split: sum(map(len, lines)) for split, lines in words.items()},
        "unknown": {
            split: sum(line.count(UNKNOWN) for line in lines) for split, lines in words.items()
        },
        "vocabulary": len({word for line in words["train"] for word in line} - {UNKNOWN}),
    }
