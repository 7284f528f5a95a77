"""Packages import each other along the arrows of docs/architecture.md; files have no banners."""

import ast
import functools
import re
import tokenize
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import spectral_fairseq
from spectral_fairseq.methods.penalties import PENALTIES

PACKAGE = Path(spectral_fairseq.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
VERSION_PACKAGES = {"compat", "provenance"}


def picture():
    """The picture's arrows, as package -> packages that it points to, and those with fairseq."""
    page = PAGE.read_text("utf-8")
    (lines,) = re.findall(r"<!-- imports -->\n```mermaid\ngraph LR\n(.*?)```", page, re.DOTALL)
    arrows, with_fairseq = defaultdict(set), set()
    for line in filter(None, map(str.strip, lines.splitlines())):
        if line.startswith("class "):
            with_fairseq = set(line.split()[1].split(","))
        elif not line.startswith("classDef "):
            chain = [{package.strip() for package in one.split("&")} for one in line.split("-->")]
            for sources, targets in zip(chain, chain[1:]):
                for source in sources:
                    arrows[source] |= targets
    return dict(arrows), with_fairseq


ARROWS, WITH_FAIRSEQ = picture()
PACKAGES = {"__init__"}.union(ARROWS, *ARROWS.values())


def upstream(package):
    """Packages from which a path of arrows leads to this one."""
    if package == "__init__":
        return {"plugin"}
    found = {source for source, targets in ARROWS.items() if package in targets}
    return found.union(*map(upstream, found))


@functools.cache
def tree(path):
    """The syntax of a file."""
    return ast.parse(path.read_text("utf-8"))


def imports(path):
    """Every dotted module name that a file imports, in its functions too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages_imported_by(path):
    """Pairs of another package and the module of it that the file imports."""
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "spectral_fairseq" and len(parts) > 1 and parts[1] in PACKAGES:
            if parts[1] != package_of(path):
                yield parts[1], name


def package_of(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first[:-3] if first.endswith(".py") else first


FILES = sorted(PACKAGE.rglob("*.py"))


def test_the_packages_are_all_in_the_picture():
    assert {package_of(path) for path in FILES} == PACKAGES
    assert WITH_FAIRSEQ < PACKAGES


def test_no_package_is_built_on_itself():
    for package in PACKAGES:
        assert package not in upstream(package)  # a circle of arrows would not even end


def test_every_import_follows_the_arrows():
    for path in FILES:
        package = package_of(path)
        for other, name in packages_imported_by(path):
            assert other in upstream(package), f"{path} imports {name}"
        for name in imports(path):
            if name.split(".")[0] in ("fairseq", "fairseq_cli"):
                assert package in WITH_FAIRSEQ, f"{path} imports {name}"


def test_no_files_import_each_other_in_a_circle():
    graph = {}
    for path in FILES:
        graph[path] = set()
        for name in imports(path):
            parts = name.split(".")[1:] if name.startswith("spectral_fairseq.") else []
            for end in range(len(parts), 0, -1):  # the module, or the one that has the name
                file = PACKAGE.joinpath(*parts[:end])
                found = [
                    one for one in (file.with_suffix(".py"), file / "__init__.py") if one in FILES
                ]
                if found:
                    graph[path].update(found)
                    break
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_no_file_takes_the_place_of_a_public_name():
    """A module that is imported becomes an attribute of its package, and hides a function there."""
    packages = [path for path in FILES if path.name == "__init__.py"]
    names = {}
    for path in packages:
        for node in tree(path).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names[path.parent] = set(ast.literal_eval(node.value))
    assert names[PACKAGE / "training"]
    for package, public in names.items():
        files = {path.stem for path in package.glob("*.py")} | {
            path.name for path in package.iterdir()
        }
        assert not public & files, package


def test_every_arrow_is_followed_by_an_import():
    followed = {
        (other, package_of(path)) for path in FILES for other, _ in packages_imported_by(path)
    }
    assert {
        (source, package) for source, packages in ARROWS.items() for package in packages
    } <= followed


def test_only_compat_asks_for_versions():
    for path in FILES:
        if package_of(path) in VERSION_PACKAGES:
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr == "__version__":
                owner = ast.unparse(node.value)
                assert owner == "spectral_fairseq", f"{path}:{node.lineno} asks {owner}"


# The files of methods open with two more lists than the formula: flags with their defaults, and the
# functions in the order in which they are called, in other files as "file: name".
HEADERS = {
    path: docstring
    for path in sorted(PACKAGE.rglob("*.py"))
    for docstring in [ast.get_docstring(tree(path)) or ""]
    if re.search(r"^(Flags|In order): ", docstring, re.MULTILINE)
}


def listed(docstring, label):
    """The text of a list of a header, in one line."""
    found = re.search(rf"^{label}: (.*(?:\n    .*)*)", docstring, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def defined_in(path):
    """The names that a file defines, and those of its classes as Class.name."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
            if isinstance(node, ast.ClassDef):
                yield from (f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name"))


def test_headers_name_every_flag_with_its_default():
    page = (PAGE.parent / "flags.md").read_text("utf-8")
    page, _ = page.split("\n## What is refused before training")
    declared = set(re.findall(r"^\| `(--[\w-]+)` \| (.*?) \|", page, re.MULTILINE))
    named = set()
    for docstring in HEADERS.values():
        flags = listed(docstring, "Flags").rstrip(".")
        named.update(re.findall(r"``(--[\w-]+)`` ?(.*?)(?:, (?=``)|$)", flags))
    assert named == declared


def test_headers_name_functions_that_exist():
    for path, docstring in HEADERS.items():
        for place in re.findall(r"``(.*?)``", listed(docstring, "In order")):
            file, _, name = place.rpartition(": ") if ".py: " in place else ("", "", place)
            if place.endswith(".py"):
                assert (PACKAGE / place).exists(), f"{path}: {place}"
            else:
                names = set(defined_in(PACKAGE / file if file else path))
                assert name in names, f"{path}: {place}"


def test_headers_of_penalties_name_what_these_are_computed_from():
    orders = {
        flag: listed(docstring, "In order")
        for docstring in HEADERS.values()
        for flag in re.findall(r"``--([\w-]+)``", listed(docstring, "Flags"))
        if "methods/penalties.py: " in listed(docstring, "In order")
    }
    for penalty in PENALTIES:
        order = orders.get(penalty.weight.name.replace("_", "-"), "")
        assert f"``methods/penalties.py: {penalty.needs.__name__}``" in order, penalty.name


ROOT = PAGE.parents[1]
PYTHON_FILES = [
    path
    for folder in (PACKAGE, *(ROOT / name for name in ("tests", "studies", "benchmarks")))
    for path in sorted(folder.rglob("*.py"))
]


def section_banners(text):
    """First lines of the comments that head a part of a file rather than a statement of it.

    Such a comment begins its line, and blank lines stand above and below it. A Note, which is cited
    by its name, is none.
    """
    alone = list(re.finditer(r"(?:^|\n)[ \t]*\n(#.*)(?:\n#.*)*(?=\n[ \t]*\n|\n?$)", text))
    banners = [found for found in alone if not found[1].startswith("# Note [")]
    if banners:  # they are comments, and no part of a text
        source = iter(text.splitlines(keepends=True)).__next__
        comments = {
            token.start
            for token in tokenize.generate_tokens(source)
            if token.type == tokenize.COMMENT
        }
        for found in banners:
            if (text.count("\n", 0, found.start(1)) + 1, 0) in comments:
                yield found[1]


def test_what_a_section_banner_is():
    banner = "import os\n\n# The reading of files.\n# It comes first.\n\n\ndef read():\n    pass\n"
    assert list(section_banners(banner)) == ["# The reading of files."]
    comment = "# At most so many.\nMOST = 4  # files\n\n"
    note = "# Note [Files]\n# ------------\n# They are read.\n\n"
    text = 'TEXT = """\n\n# a comment of a recipe\n\n"""\n'
    assert not list(section_banners("import os\n\n" + comment + note + text))


def test_no_file_has_section_banners():
    found = {
        str(path): banners
        for path in PYTHON_FILES
        for banners in [list(section_banners(path.read_text("utf-8")))]
        if banners
    }
    assert not found, "a second subject moves to a file of its own; docstrings carry the first"


def texts_of_nothing(tree):
    """Lines of texts that stand alone: neither a docstring nor behind what they describe."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for place, one in enumerate(body if isinstance(body, list) else ()):
            value = one.value if isinstance(one, ast.Expr) else None
            is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
            if is_text and place and not isinstance(body[place - 1], (ast.Assign, ast.AnnAssign)):
                yield one.lineno


def test_a_moved_constant_takes_its_text_along():
    assert [*texts_of_nothing(ast.parse('"""a"""\nA = 1\n"""of A"""\n"""of nothing"""\n'))] == [4]
    for path in PACKAGE.rglob("*.py"):
        assert not [*texts_of_nothing(tree(path))], path
