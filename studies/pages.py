"""Parts of a page that follow from results: they stand between comments that name them."""

from __future__ import annotations

import re
from typing import Callable

_GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def with_generated(page: str, part: Callable[[str], str]) -> str:
    """The text of a page with its generated parts made anew.

    Args:
        page: Markdown with parts between ``<!-- generated: NAME -->`` and ``<!-- /generated -->``.
        part: makes a part, which ends with a newline, from its name.
    """
    return _GENERATED.sub(lambda match: f"{match[1]}\n{part(match[2])}\n{match[3]}", page)
