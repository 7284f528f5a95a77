"""The commands of a README: found, told apart, and the calls of fairseq in them taken out."""

import re
import shlex
from pathlib import Path
from typing import List, NamedTuple, Optional

PROGRAM = re.compile(r"(?:.*/)?(fairseq-[a-z-]+|spectral-fairseq)")
MARK = re.compile(r"<!-- not run: (.+) -->")
PUNCTUATION = ";|&<>()\n"
FENCE = re.compile(r"(`{3,})(\w*)")


class Block(NamedTuple):
    """A fenced block of bash."""

    path: Path
    line: int
    text: str
    not_run: Optional[str]  # the reason, where the README marks it

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def blocks(path: Path) -> List[Block]:
    """The bash blocks of a file, in order.

    ``<!-- not run: REASON -->`` in the line above marks one that cannot run anywhere.
    """
    found: List[Block] = []
    lines = path.read_text("utf-8").split("\n")
    number = 0
    while number < len(lines):
        fence = FENCE.fullmatch(lines[number].strip())
        if not fence:
            number += 1
            continue
        end = number + 1
        while lines[end].strip() != fence.group(1):
            end += 1
        if fence.group(2) == "bash":
            mark = MARK.fullmatch(lines[number - 1].strip()) if number else None
            text = "\n".join(lines[number + 1 : end]) + "\n"
            found.append(Block(path, number + 1, text, mark.group(1) if mark else None))
        number = end + 1
    return found


def commands_outside_blocks(path: Path) -> List[str]:
    """Indented lines, outside every fence, that look like commands and so would escape the test."""
    outside, fenced = [], False
    for line in path.read_text("utf-8").split("\n"):
        if FENCE.fullmatch(line.strip()):
            fenced = not fenced
        elif not fenced and re.match(
            r"(    |\t)\s*(fairseq-|spectral-fairseq |python |make )", line
        ):
            outside.append(line.strip())
    return outside


def fairseq_calls(text: str) -> List[List[str]]:
    """Commands of fairseq and of this package in a block, also behind ``torchrun`` or ``sbatch``.

    Variables are replaced by 1, because only names and flags are checked.
    """
    text = re.sub(r'"?\$\(which ([\w-]+)\)"?', r"\1", text)
    text = re.sub(r'"?\$\(spectral-fairseq user-dir\)"?', "spectral_fairseq", text)
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text.replace("\\\n", " "))
    return _calls(re.sub(r"\$(\w+|\{\w+\}|@)", "1", text))


def _calls(text: str) -> List[List[str]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words = list(lexer)
    calls: List[List[str]] = []
    index = 0
    while index < len(words):
        program = PROGRAM.fullmatch(words[index])
        if re.search(r"\sfairseq-[a-z]", words[index]):  # bash -c '...', sbatch --wrap "..."
            calls += _calls(words[index])
        elif program:
            end = index + 1
            while end < len(words) and not set(words[end]) <= set(PUNCTUATION):
                end += 1
            calls.append([program.group(1), *words[index + 1 : end]])
            index = end - 1
        index += 1
    return calls
