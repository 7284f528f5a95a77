"""What the config.json of a model of transformers says of its words."""

from __future__ import annotations

from typing import Any, Iterator, List, Mapping

# How transformers names its models with an output layer over words.
_WRITES_WORDS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")


def vocabulary_sizes(settings: Mapping[str, Any]) -> List[int]:
    """The numbers of words that the settings of a model give, of each vocabulary one."""
    return sorted(set(_sizes(settings)))


def _sizes(settings: Mapping[str, Any], depth: int = 3) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and depth:
            yield from _sizes(value, depth - 1)
        elif str(name).endswith("vocab_size") and type(value) is int and value > 0:
            yield value


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the part of a model that has the words, with those of the whole before it."""
    parts = (settings.get(name) for name in ("text_config", "decoder"))
    inner = next((part for part in parts if isinstance(part, Mapping)), {})
    return {**inner, **{name: value for name, value in settings.items() if value is not None}}


def writes_words(settings: Mapping[str, Any]) -> bool:
    """Whether a model ends in an output layer over words, by the name of its class."""
    classes = settings.get("architectures")
    return isinstance(classes, list) and any(str(name).endswith(_WRITES_WORDS) for name in classes)


def padding_rows(settings: Mapping[str, Any]) -> List[int]:
    """The row of the padding symbol, unless the symbol has another meaning as well."""
    settings = text_settings(settings)
    row = settings.get("pad_token_id")
    others: List[Any] = []
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        other = settings.get(name)
        others += other if isinstance(other, list) else [other]
    return [row] if type(row) is int and row >= 0 and row not in others else []
