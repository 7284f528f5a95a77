"""Check and unpack a parallel corpus, and split it into subwords."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import tarfile
from pathlib import Path
from typing import Any, Collection, Dict, List

from spectral_fairseq.errors import DataError
from studies.work_folder import write_text

SPLITS = ("train", "valid", "test")
SOURCE, TARGET = "de", "en"  # languages of a folder without a description
RESTORE = "Restore the corpus folder from the project's repository or archive."


def sha256(data: bytes) -> str:
    """Checksum in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def load_manifest(folder: Path) -> Dict[str, Any]:
    """Description of a corpus folder: names, counts and checksums of its files.

    It is read from ``corpus.json``. Without that file, a folder with ``train.de``, ``train.en``
    and so on in plain text is described in the same form, with ``archive`` None.

    Raises:
        DataError: the description is missing or damaged.
    """
    path = folder / "corpus.json"
    if not path.exists():
        if (folder / f"train.{SOURCE}").exists():
            return describe(folder)
        raise DataError(
            f"a corpus in {folder}",
            f"neither corpus.json nor train.{SOURCE}" if folder.is_dir() else "no such folder",
            f"Name a folder with train.{SOURCE}, train.{TARGET} and likewise valid and test.",
        )
    try:
        manifest = json.loads(path.read_text("utf-8"))
        for key in ("archive", "sha256", "files", "splits", "source_language", "target_language"):
            manifest[key]
        for name in (*manifest["files"], manifest["archive"] or ""):
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no name of a file in the folder")
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the description of a corpus in {path}", f"{type(error).__name__}: {error}", RESTORE
        ) from None


def describe(folder: Path) -> Dict[str, Any]:
    """The description of a folder of plain text files.

    Raises:
        DataError: a file is missing or not in UTF-8, or two languages differ in their number of
            lines.
    """
    files: Dict[str, Any] = {}
    pairs: Dict[str, int] = {}
    for split in SPLITS:
        counts = {}
        for language in (SOURCE, TARGET):
            name = f"{split}.{language}"
            try:
                data = (folder / name).read_bytes()
            except OSError as error:
                raise DataError(
                    f"the file {folder / name}",
                    error.strerror or str(error),
                    f"A corpus folder holds train, valid and test, each as .{SOURCE} and .{TARGET}",
                ) from None
            try:
                lines = split_lines(data)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"UTF-8 in {folder / name}",
                    str(error),
                    f"Convert it, for example with: iconv -f latin1 -t utf-8 {name}",
                ) from None
            files[name] = {"sha256": sha256(data), "bytes": len(data)}
            counts[language] = len(lines)
        if counts[SOURCE] != counts[TARGET]:
            raise DataError(
                f"{split}.{SOURCE} and {split}.{TARGET} in {folder} with equally many lines",
                f"{counts[SOURCE]} and {counts[TARGET]}",
                "Line k of one must translate line k of the other.",
            )
        pairs[split] = counts[SOURCE]
    together = "".join(f"{name} {entry['sha256']}\n" for name, entry in files.items())
    return {
        "archive": None,
        "sha256": sha256(together.encode()),
        "source_language": SOURCE,
        "target_language": TARGET,
        "files": files,
        "splits": {split: {"pairs": count} for split, count in pairs.items()},
    }


def unpack(folder: Path, destination: Path) -> Dict[str, Any]:
    """Unpack or copy a corpus and check the archive and each file against their checksums.

    Only the files that the description names are written, under those names.

    Args:
        folder: see :func:`load_manifest`.
        destination: receives ``train.de`` and so on.

    Returns:
        The corpus's checksum and the number of pairs of each split.

    Raises:
        DataError: a file is missing or has another checksum.
    """
    manifest = load_manifest(folder)
    if manifest["archive"] is None:
        destination.mkdir(parents=True, exist_ok=True)
        for name in manifest["files"]:
            lines = read_lines(folder / name)
            write_text(destination / name, "".join(f"{line}\n" for line in lines))
    else:
        _extract(manifest, folder / manifest["archive"], destination)
    pairs = {split: counts["pairs"] for split, counts in manifest["splits"].items()}
    return {"sha256": manifest["sha256"], "pairs": pairs}


def _extract(manifest: Dict[str, Any], archive: Path, destination: Path) -> None:
    try:
        found = sha256(archive.read_bytes())
    except OSError as error:
        raise DataError(f"the archive {archive}", error.strerror or str(error), RESTORE) from None
    if found != manifest["sha256"]:
        raise DataError(f"{archive} with SHA-256 {manifest['sha256']}", found, RESTORE)
    destination.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:xz") as tar:
            for name, entry in manifest["files"].items():
                member = tar.extractfile(name)
                data = member.read() if member else b""
                if sha256(data) != entry["sha256"]:
                    raise DataError(
                        f"{name} in {archive} with SHA-256 {entry['sha256']}", sha256(data), RESTORE
                    )
                write_text(destination / name, data.decode("utf-8"))
    except (tarfile.TarError, lzma.LZMAError, EOFError, KeyError) as error:
        raise DataError(f"a readable archive {archive}", str(error), RESTORE) from None


def read_lines(path: Path) -> List[str]:
    """Lines of a text file, split at line feeds only."""
    return split_lines(path.read_bytes())


def split_lines(data: bytes) -> List[str]:
    """Lines of UTF-8 text, split at line feeds only; the last line may lack one.

    A carriage return does not end a line, as it would in ``read_text``: in one language only, it
    would shift all pairs that follow.
    """
    lines = data.decode("utf-8").split("\n")
    return lines if lines[-1] else lines[:-1]


def learn_subwords(text: Path, model: Path, vocabulary: int) -> Dict[str, Any]:
    """Learn a byte-pair encoding that both languages share; it depends on the text alone.

    Args:
        text: folder with ``train.*``.
        model: file to write; its name ends in ``.model``.
        vocabulary: number of subwords.

    Raises:
        DataError: the text does not yield such a vocabulary.
    """
    import sentencepiece

    languages = sorted(path for path in text.glob("train.*") if path.suffix != ".doc")
    partial = model.with_name("partial")
    try:
        sentencepiece.SentencePieceTrainer.train(
            input=list(map(str, languages)),  # a single string would be split at commas
            model_prefix=str(partial),
            model_type="bpe",
            vocab_size=vocabulary,
            character_coverage=1.0,
            bos_id=-1,  # fairseq adds its own symbols
            eos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(
            f"text that yields {vocabulary} subwords",
            str(error).splitlines()[0],
            "Give another --vocabulary, and with it another --work-dir.",
        ) from None
    partial.with_suffix(".vocab").replace(model.with_suffix(".vocab"))
    partial.with_suffix(".model").replace(model)
    return {"vocabulary": vocabulary}


def encode(
    text: Path, model: Path, destination: Path, splits: Collection[str] = SPLITS
) -> Dict[str, Any]:
    """Write every split of ``text`` as subwords separated by blanks."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    destination.mkdir(parents=True, exist_ok=True)
    for path in sorted(text.iterdir()):
        if path.stem in splits and path.suffix != ".doc":
            pieces = processor.encode(read_lines(path), out_type=str)
            write_text(destination / path.name, "".join(" ".join(line) + "\n" for line in pieces))
    return {}


def clear(folder: Path) -> None:
    """Remove the output of an interrupted fairseq-preprocess, which it refuses to overwrite."""
    shutil.rmtree(folder, ignore_errors=True)
