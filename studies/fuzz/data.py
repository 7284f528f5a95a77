"""The tiny data on which the fuzzer trains."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Callable, List

NAMES = ("joined", "separate", "language")


def write(folder: Path, run: Callable[[List[str]], Any]) -> None:
    """Make the three data folders.

    Args:
        folder: gets a folder for each of :data:`NAMES`: translation with one dictionary and with
            two, and a monolingual corpus.
        run: runs a command line.
    """
    chance = random.Random(0)
    words = [f"w{index}" for index in range(30)]
    for split, count in (("train", 40), ("valid", 11), ("test", 5)):
        sentences = [chance.choices(words, k=chance.randint(2, 9)) for _ in range(count)]
        source = "".join(" ".join(one) + "\n" for one in sentences)
        (folder / f"{split}.de").write_text(source)
        (folder / f"{split}.en").write_text(source.replace("w", "v"))
    for name in NAMES:
        ending, more = "", ["--source-lang", "de", "--target-lang", "en"]
        if name == "language":
            ending, more = ".de", ["--only-source"]
        elif name == "joined":
            more += ["--joined-dictionary"]
        for split in ("train", "valid", "test"):
            more += [f"--{split}pref", f"{folder / split}{ending}"]
        run(["fairseq-preprocess", "--destdir", str(folder / name), *more])
