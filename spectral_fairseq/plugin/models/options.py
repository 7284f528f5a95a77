"""The flags that every architecture of this package takes, and the checks on them."""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from typing import Any, Dict, Iterable, List, Sequence, Tuple, Type, Union

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from spectral_fairseq.embeddings import TABLES, PlainEmbedding, SVDEmbedding, Table
from spectral_fairseq.embeddings.option import Option
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.heads import HEADS, Head, SoftmaxHead

logger = logging.getLogger(__name__)

EMBEDDING_TABLES = ("output", "all")

NamedField = Tuple[str, Any, Any]
"""Name, type and default of a field, as ``dataclasses.make_dataclass`` takes them."""


def option_field(option: Option) -> Any:
    """The default of a dataclass field for an option."""
    return dataclasses.field(default=option.default, metadata={"help": option.help})


def _choice_field(name: str, choices: Sequence[str], text: str) -> NamedField:
    field = dataclasses.field(default=choices[0], metadata={"help": text})
    return name, ChoiceEnum(choices), field


def _option_fields(kinds: Iterable[Union[Type[Table], Type[Head]]]) -> List[NamedField]:
    """A field for each option of any of the kinds, once if several kinds share it."""
    options = {option.field: option for kind in kinds for option in kind.options}
    return [(name, field_type(option), option_field(option)) for name, option in options.items()]


def field_type(option: Option) -> Any:
    """The type of a dataclass field for an option."""
    if option.choices:
        return ChoiceEnum(option.choices)
    return option.type or type(option.default)


def _one_of(kinds: Iterable[Union[Type[Table], Type[Head]]]) -> str:
    *others, last = (kind.summary for kind in kinds)
    return f"{', '.join(others)}, or {last}"


SpectralOptions: Any = dataclasses.make_dataclass(
    "SpectralOptions",
    [
        _choice_field(
            "embedding_type",
            [kind.kind for kind in TABLES],
            f"parameterisation of the embedding table: {_one_of(TABLES)}",
        ),
        _choice_field(
            "embedding_tables",
            EMBEDDING_TABLES,
            "which tables --embedding-type applies to: the one that the softmax uses, with "
            "whatever shares it, or all of them",
        ),
        *_option_fields(TABLES),
        _choice_field(
            "output_head",
            [kind.kind for kind in HEADS],
            f"output layer of the decoder: {_one_of(HEADS)}",
        ),
        *_option_fields(HEADS),
    ],
    bases=(FairseqDataclass,),
    namespace={
        "__doc__": "The options of all tables and heads; an architecture is a preset of them.",
        "__module__": __name__,
    },
)


# Measured in trained models: docs/evidence.md. The paper's 0.5 is for LSTMs.
IN_A_TRANSFORMER = {"weight_norm_init_sigma": 0.1}


def with_defaults(config: Type[FairseqDataclass], name: str, **defaults: Any) -> Any:
    """A subclass of ``config`` called ``name`` in which some fields have other defaults."""
    fields = []
    for key, default in defaults.items():
        original = config.__dataclass_fields__[key]
        field = dataclasses.field(default=default, metadata=original.metadata)
        fields.append((key, original.type, field))
    return dataclasses.make_dataclass(name, fields, bases=(config,))


def flags_of(config: Type[FairseqDataclass]) -> Dict[str, str]:
    """The flag of each field, for :func:`spectral_fairseq.errors.arguments_as_flags`."""
    names = [field.name for field in dataclasses.fields(config)]
    return {name: "--" + name.replace("_", "-") for name in names}


def table_kind(options: Any) -> Type[Table]:
    """The class of the table that ``--embedding-type`` names."""
    return {kind.kind: kind for kind in TABLES}[str(options.embedding_type)]


def head_kind(options: Any) -> Type[Head]:
    """The class of the output layer that ``--output-head`` names."""
    return {kind.kind: kind for kind in HEADS}[str(options.output_head)]


def has_own_output(options: Any) -> bool:
    """Whether the output layer is one of this package's rather than fairseq's own."""
    return table_kind(options) is not PlainEmbedding or head_kind(options) is not SoftmaxHead


def warn_of_idle_options(model: Any, config: Any) -> None:
    """Warn of options of tables and heads that were given and that the chosen ones do not have.

    Args:
        model: whose class is an architecture of this package, or of fairseq, which has none.
        config: the model's settings; under hydra only those that the user wrote.
    """
    preset = getattr(model, "config", None)
    if preset is None:
        return
    defaults = preset()
    given = vars(config) if isinstance(config, Namespace) else config
    settings = {name: given.get(name) for name in vars(defaults)}
    options = Namespace(
        **{
            name: getattr(defaults, name) if value is None else value
            for name, value in settings.items()
        }
    )
    chosen = (table_kind(options), head_kind(options))
    used = {option.field for kind in chosen for option in kind.options}
    # The criterions read the prior of a table that is no SVD table.
    used |= {option.field for option in SVDEmbedding.options}
    idle = {
        option.flag
        for options_of_kind in (kind.options for kinds in (TABLES, HEADS) for kind in kinds)
        for option in options_of_kind
        if option.field not in used
        and str(getattr(options, option.field)) != str(getattr(defaults, option.field))
    }
    if table_kind(options) is PlainEmbedding and str(options.embedding_tables) == "all":
        idle.add("--embedding-tables")
    for flag in sorted(idle):
        logger.warning(
            "%s has no effect with --embedding-type %s --output-head %s",
            flag,
            options.embedding_type,
            options.output_head,
        )


def refuse_unsupported(options: Any) -> None:
    """Refuse what this package's tables and heads cannot be combined with.

    Raises:
        UnsupportedError: sharded parameters, quantisation noise, adaptive input or softmax, or
            character embeddings.
    """
    if not has_own_output(options):
        return
    chosen = f"--embedding-type {options.embedding_type} --output-head {options.output_head}"
    if _wrapped_by_fsdp():
        raise UnsupportedError(
            f"no fully sharded parameters together with {chosen}",
            "--ddp-backend fully_sharded",
            "The penalties need the whole table outside forward: use --ddp-backend pytorch_ddp "
            "or legacy_ddp.",
        )
    unsupported = {
        "--quant-noise-pq": getattr(options, "quant_noise_pq", 0),
        "--quant-noise-scalar": getattr(options, "quant_noise_scalar", 0),
        "--adaptive-input": getattr(options, "adaptive_input", False),
        "--character-embeddings": getattr(options, "character_embeddings", False),
        "--adaptive-softmax-cutoff": getattr(options, "adaptive_softmax_cutoff", None),
    }
    for flag, value in unsupported.items():
        if value:
            raise UnsupportedError(
                f"no {flag} together with {chosen}",
                f"{flag} {value}",
                f"Drop {flag}, or use --embedding-type plain --output-head softmax.",
            )


def _wrapped_by_fsdp() -> bool:
    """Whether fairseq builds the model inside fairscale's sharding context."""
    try:
        from fairscale.nn.wrap.auto_wrap import ConfigAutoWrap
    except ImportError:  # then fairseq itself refuses the backend
        return False
    return bool(ConfigAutoWrap.in_autowrap_context)
