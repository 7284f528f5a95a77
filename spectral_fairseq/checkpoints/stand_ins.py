"""Stand-ins for plain objects of fairseq, which save nothing but their attributes.

HuBERT, wav2vec and the voice converters built on them keep the dictionary of their training in the
checkpoint, as an object of fairseq's; checkpoints of 2018 keep meters. A stand-in takes the place
of each: a class without methods, which holds whatever the file gave it. It can be saved again under
the name that it had, and :func:`restored` makes the object of fairseq where fairseq reads the file.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import types
from typing import Any, Dict, Mapping, Optional, Set, Type

from spectral_fairseq.errors import UntrustedError

# Classes whose objects are no more than their attributes: numbers, texts, lists and dictionaries.
PLAIN_CLASSES = (
    "fairseq.data.dictionary.Dictionary",
    "fairseq.data.legacy.masked_lm_dictionary.BertDictionary",
    "fairseq.data.legacy.masked_lm_dictionary.MaskedLMDictionary",
    "fairseq.dictionary.Dictionary",  # of 2018
    "fairseq.logging.meters.AverageMeter",
    "fairseq.logging.meters.StopwatchMeter",
    "fairseq.logging.meters.TimeMeter",
    "fairseq.meters.AverageMeter",
    "fairseq.meters.StopwatchMeter",
    "fairseq.meters.TimeMeter",
)
_VALUES = (type(None), bool, int, float, str)
_MOST_LEVELS = 4


class StandIn:
    """Base class of the stand-ins, which does nothing; one class for each of the names above."""

    stands_for = ""

    def __new__(cls, *arguments: Any) -> StandIn:
        """An object without attributes: constructors, which are code, are never called."""
        if arguments:
            raise pickle.UnpicklingError(f"{cls.stands_for} with arguments of its constructor")
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if not (isinstance(state, dict) and all(type(name) is str for name in state)):
            raise pickle.UnpicklingError(f"{self.stands_for} with another state than attributes")
        self.__dict__.update(state)


STAND_INS: Dict[str, Type[StandIn]] = {
    name: type(name.rpartition(".")[2], (StandIn,), {"stands_for": name}) for name in PLAIN_CLASSES
}


def restored(value: Any, path: Any, seen: Optional[Set[int]] = None) -> Any:
    """``value`` with fairseq's own objects for their stand-ins; mappings and lists change in place.

    The attributes are set; no constructor or other method is called.

    Raises:
        CheckpointError: attributes that are not data, or that hide a method.
    """
    if isinstance(value, StandIn):
        return _object(value, path)
    seen = set() if seen is None else seen
    if id(value) in seen:
        return value
    if isinstance(value, argparse.Namespace):
        seen.add(id(value))
        restored(vars(value), path, seen)
    elif type(value) is list:
        seen.add(id(value))
        value[:] = [restored(item, path, seen) for item in value]
    elif isinstance(value, dict):
        seen.add(id(value))
        for name, item in value.items():  # the keys stay, so that their order does
            value[name] = restored(item, path, seen)
    elif type(value) is tuple and any(isinstance(item, (StandIn, list, dict)) for item in value):
        return tuple(restored(item, path, seen) for item in value)
    return value


def _object(stand_in: StandIn, path: Any) -> Any:
    home, _, name = stand_in.stands_for.rpartition(".")
    try:
        kind = getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError):
        return stand_in  # of another version of fairseq, which does not look at it
    for attribute, value in vars(stand_in).items():
        if hasattr(kind, attribute) or attribute.startswith("__") or not _is_data(value):
            raise UntrustedError(
                f"numbers, texts, lists and dictionaries in the {stand_in.stands_for} of {path}",
                f"an attribute {attribute[:80]!r} of type {type(value).__name__}, which fairseq "
                "does not write",
            )
    made = object.__new__(kind)
    made.__dict__.update(vars(stand_in))
    return made


def _is_data(value: Any, levels: int = _MOST_LEVELS) -> bool:
    if type(value) in _VALUES or type(value).__module__ in ("torch", "numpy"):
        return not isinstance(value, type)
    if not levels:
        return False
    if isinstance(value, Mapping):
        return all(_is_data(item, levels - 1) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set)):
        return all(_is_data(item, levels - 1) for item in value)
    return False


def pickle_by_name() -> Any:
    """A ``pickle_module`` of ``torch.save`` that saves stand-ins under the names of fairseq."""
    base: Any = vars(pickle)["_Pickler"]  # the one in C does not let choose the name of a class

    class Pickler(base):  # type: ignore[misc]
        def save_global(self, obj: Any, name: Optional[str] = None) -> None:
            if not (isinstance(obj, type) and issubclass(obj, StandIn) and obj.stands_for):
                super().save_global(obj, name)
                return
            home, _, last = obj.stands_for.rpartition(".")
            self.write(pickle.GLOBAL + f"{home}\n{last}\n".encode("ascii"))
            self.memoize(obj)

    named: Any = types.ModuleType("pickle_by_name")
    named.Pickler = Pickler
    named.dump = lambda value, file, protocol: Pickler(file, protocol).dump(value)
    return named
