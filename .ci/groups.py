"""Print the requirements of dependency groups of pyproject.toml, one a line.

    python .ci/groups.py test docs > requirements.txt

``pip install --group`` does the same, but needs pip 25.1, and fairseq 0.12.2 a pip below 24.1.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.9 and 3.10
    from pip._vendor import tomli as tomllib


def requirements(groups, name):
    """The requirements of a group and of those that it includes."""
    for one in groups[name]:
        if isinstance(one, str):
            yield one
        else:
            yield from requirements(groups, one["include-group"])


if __name__ == "__main__":
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    groups = tomllib.loads(project.read_text("utf-8"))["dependency-groups"]
    for name in sys.argv[1:]:
        print("\n".join(requirements(groups, name)))
