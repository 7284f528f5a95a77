"""The commands of a README: found, told apart, and the calls of fairseq in them taken out."""

import re
import shlex
from pathlib import Path
from typing import List, NamedTuple, Optional, Set, Tuple

PROGRAM = re.compile(r"(?:.*/)?(fairseq-[a-z-]+|spectral-fairseq)")
PUNCTUATION = ";|&<>()\n"
FENCED = re.compile(
    r"^(?: *<!-- not run: ([^\n]+) -->\n)?( *)(`{3,})(\w*)\n(.*?)^ *\3 *$", re.MULTILINE | re.DOTALL
)
LOOP = re.compile(r"\bfor (\w+) in ([^;$]+); do")
OUTSIDE = re.compile(
    r"^(?:    |\t)\s*((?:fairseq-|spectral-fairseq |python |make ).*)$", re.MULTILINE
)


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
    text = path.read_text("utf-8")
    return [
        Block(path, text.count("\n", 0, fenced.start(2)) + 1, fenced[5], fenced[1])
        for fenced in FENCED.finditer(text)
        if fenced[4] == "bash"
    ]


def with_short_loops(text: str, page: str) -> Tuple[str, Set[str]]:
    """Cut each loop to its first pass and to the passes whose results the page names.

    Returns:
        The shorter script, and the words of the passes that were left out.
    """
    left_out: Set[str] = set()

    def short(loop: "re.Match[str]") -> str:
        words = loop[2].replace("\\\n", " ").split()
        kept = [word for word in words if word == words[0] or f"/{word}/" in page]
        left_out.update(set(words) - set(kept))
        return f"for {loop[1]} in {' '.join(kept)}; do"

    return LOOP.sub(short, text), left_out


def commands_outside_blocks(path: Path) -> List[str]:
    """Indented lines, outside every fence, that look like commands and so would escape the test."""
    return OUTSIDE.findall(FENCED.sub("", path.read_text("utf-8")))


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
