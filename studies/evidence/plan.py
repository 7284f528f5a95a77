"""The order of the trainings of a study, in which later ones depend on what earlier ones showed.

First the recipe is tuned with plain, round by round, and frozen. Then every setting of every
method is trained once with the tuning seed, and the best of each method is kept. Then come the
seeds of the tables, and last the best table method with SimCut. Every choice is made on validation.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from studies.evidence.grid import Method, Recipe, Setting, Study

Record = Dict[str, Any]
WITH_SIMCUT = "table_and_simcut"


class Cell(NamedTuple):
    """One training.

    Attributes:
        method: a key of the study's methods, or :data:`WITH_SIMCUT`.
        recipe: sorted pairs of a flag without its dashes and its value.
        flags: architecture and setting.
        seed: of the training.
    """

    method: str
    recipe: Tuple[Tuple[str, str], ...]
    flags: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its files: the method, a digest of recipe and flags, and the seed."""
        digest = hashlib.sha256(repr((self.recipe, self.flags)).encode()).hexdigest()[:8]
        return f"{self.method}-{digest}-{self.seed}"


class Stage(NamedTuple):
    """Trainings that do not depend on each other.

    Attributes:
        name: ``recipe``, ``tuning``, ``seed`` or ``simcut``.
        cells: what has to be recorded before the next stage.
    """

    name: str
    cells: Sequence[Cell]


def cell_of(study: Study, recipe: Recipe, name: str, setting: Setting, seed: int) -> Cell:
    """The training of one setting of a method."""
    method = study.methods[name]
    return _cell(study, recipe, name, method, setting, seed)


def _cell(
    study: Study, recipe: Recipe, name: str, method: Method, setting: Setting, seed: int
) -> Cell:
    values = {**recipe, "lr": f"{float(recipe['lr']) * setting.lr_factor:g}"}
    flags = f"{study.archs[method.arch]} {method.flags} {setting.flags}".strip()
    return Cell(name, tuple(sorted(values.items())), flags, seed)


def best_of(cells: Sequence[Cell], records: Mapping[str, Record]) -> Optional[int]:
    """Index of the cell with the best validation score, the first of equals; None if all diverged.

    A record's ``valid_score`` is a figure of which more is better.
    """
    scores = {index: records[cell.name].get("valid_score") for index, cell in enumerate(cells)}
    finite = {index: x for index, x in scores.items() if x is not None and math.isfinite(x)}
    return max(finite, key=lambda index: finite[index]) if finite else None


class Choices(NamedTuple):
    """What a study has chosen so far.

    Attributes:
        recipe: the frozen recipe; the latest one while the rounds go on.
        settings: the best setting of each method, once all are tuned.
        table_method: the best method that acts on the table alone.
    """

    recipe: Recipe
    settings: Mapping[str, Setting] = {}
    table_method: Optional[str] = None


def stages(
    study: Study, records: Mapping[str, Record], methods: Sequence[str] = ()
) -> Iterator[Tuple[Stage, Choices]]:
    """Yield each stage with what was chosen before it; end where records are missing.

    Args:
        study: the study.
        records: by the name of the cell. It may be filled between two stages.
        methods: the methods, besides plain; all if there are none. The combination with SimCut is
            among the stages only if all table methods are among these.
    """
    chosen = {"plain", *(methods or study.methods)}
    names = [name for name in study.methods if name in chosen]
    recipe = dict(study.recipe)

    def done(cells: Sequence[Cell]) -> bool:
        return all(cell.name in records for cell in cells)

    for alternatives in study.rounds:
        recipes = [recipe, *({**recipe, **change} for change in alternatives)]
        cells = [cell_of(study, one, "plain", Setting(), study.tuning_seed) for one in recipes]
        yield Stage("recipe", cells), Choices(dict(recipe))
        if not done(cells):
            return
        recipe = recipes[best_of(cells, records) or 0]

    tried = {
        name: [
            cell_of(study, recipe, name, setting, study.tuning_seed)
            for setting in study.methods[name].settings
        ]
        for name in names
    }
    every = [cell for cells in tried.values() for cell in cells]
    if study.tuned:
        yield Stage("tuning", every), Choices(recipe)
        if not done(every):
            return
        best = {name: best_of(cells, records) for name, cells in tried.items()}
    else:
        best = {name: 0 for name in tried}
    settings = {
        name: study.methods[name].settings[index]
        for name, index in best.items()
        if index is not None
    }
    table_method = _best_table_method(study, tried, best, records) if study.tuned else None
    choices = Choices(recipe, settings, table_method)
    # Seed by seed, so that an unfinished study has pairs with plain.
    seeded = [
        cell_of(study, recipe, name, setting, seed)
        for seed in study.seeds
        for name, setting in settings.items()
    ]
    yield Stage("seed", seeded), choices
    on_table = {name for name, method in study.methods.items() if method.on_table}
    complete = on_table <= set(names)  # or another choice of methods would choose another one
    if study.with_simcut and complete and choices.table_method and "simcut" in settings:
        method, setting = _with_simcut(study, choices)
        cells = [_cell(study, recipe, WITH_SIMCUT, method, setting, seed) for seed in study.seeds]
        yield Stage("simcut", cells), choices


def _best_table_method(
    study: Study,
    tried: Mapping[str, List[Cell]],
    best: Mapping[str, Optional[int]],
    records: Mapping[str, Record],
) -> Optional[str]:
    scores = {
        name: records[tried[name][index].name]["valid_score"]
        for name, index in best.items()
        if index is not None and study.methods[name].on_table
    }
    return max(scores, key=lambda name: scores[name]) if scores else None


def _with_simcut(study: Study, choices: Choices) -> Tuple[Method, Setting]:
    """The best table method and SimCut, each at its own best setting."""
    assert choices.table_method is not None
    method = study.methods[choices.table_method]
    table, simcut = choices.settings[choices.table_method], choices.settings["simcut"]
    # The criterion of the table method stands; of SimCut only its own flags are added.
    return method, Setting(f"{table.flags} {simcut.flags}", table.lr_factor)
