"""The flags that every architecture of this package takes, and the checks on them."""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Optional, Type

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.functional.penalties.spectrum import PRIORS

EMBEDDING_TYPES = ("plain", "svd", "weight-norm")
EMBEDDING_TABLES = ("output", "all")
OUTPUT_HEADS = ("softmax", "mos", "moc")


@dataclass
class SpectralOptions(FairseqDataclass):
    """Fields whose command-line names are fixed; an arch name is a preset of them."""

    embedding_type: ChoiceEnum(EMBEDDING_TYPES) = field(  # type: ignore[valid-type]
        default="plain",
        metadata={
            "help": "parameterisation of the embedding table: a plain matrix, its singular value "
            "decomposition, or lengths and directions"
        },
    )
    embedding_tables: ChoiceEnum(EMBEDDING_TABLES) = field(  # type: ignore[valid-type]
        default="output",
        metadata={
            "help": "which tables --embedding-type applies to: the one the softmax uses, with "
            "whatever shares it, or all of them"
        },
    )
    spectrum_prior: ChoiceEnum(PRIORS) = field(  # type: ignore[valid-type]
        default="exponential",
        metadata={"help": "decay of the prior singular values of an SVD table"},
    )
    spectrum_c1: str = field(
        default="auto",
        metadata={
            "help": "scale of the prior: a positive number, or 'auto' to keep the Frobenius norm "
            "that the table starts with"
        },
    )
    spectrum_c2: float = field(
        default=0.0005, metadata={"help": "c2 of the exponential prior c1 exp(-c2 k^gamma)"}
    )
    spectrum_gamma: Optional[float] = field(
        default=None,
        metadata={"help": "gamma of the prior; 1 for exponential and 0.5 for polynomial if unset"},
    )
    weight_norm_init_sigma: float = field(
        default=0.5,
        metadata={
            "help": "sigma: a weight-norm table's vectors start sigma log(count) long; the paper's "
            "0.5 is for LSTMs, a Transformer does better with 0.15"
        },
    )
    weight_norm_init_range: float = field(
        default=0.1, metadata={"help": "r: their directions are drawn from [-r, r]"}
    )
    weight_norm_gradient_scale: float = field(
        default=0.1,
        metadata={"help": "gamma: what the lengths' gradient has fallen to after tau epochs"},
    )
    weight_norm_gradient_epochs: float = field(
        default=100.0, metadata={"help": "tau: epochs over which it falls linearly"}
    )
    output_head: ChoiceEnum(OUTPUT_HEADS) = field(  # type: ignore[valid-type]
        default="softmax",
        metadata={"help": "one softmax, a mixture of softmaxes or a mixture of contexts"},
    )
    mixture_components: int = field(default=15, metadata={"help": "K, experts of the mixture"})
    mixture_dropout: float = field(
        default=0.0, metadata={"help": "dropout of the experts' contexts, each apart"}
    )
    mixture_context_scale: float = field(
        default=1.0,
        metadata={
            "help": "s of the experts' contexts s tanh(.); the paper's is 1, and a Transformer "
            "learns much faster with 4"
        },
    )


def with_defaults(config: Type[FairseqDataclass], name: str, **defaults: Any) -> Any:
    """A subclass of ``config`` called ``name`` in which some fields have other defaults."""
    fields = []
    for key, default in defaults.items():
        original = config.__dataclass_fields__[key]
        fields.append((key, original.type, field(default=default, metadata=original.metadata)))
    return make_dataclass(name, fields, bases=(config,))


def c1_of(options: Any) -> Optional[float]:
    """``--spectrum-c1`` as a number, ``None`` standing for ``auto``.

    Raises:
        ConfigurationError: neither ``auto`` nor a number.
    """
    if options.spectrum_c1 == "auto":
        return None
    try:
        return float(options.spectrum_c1)
    except (TypeError, ValueError):
        raise ConfigurationError(
            "--spectrum-c1 to be 'auto' or a positive number",
            repr(options.spectrum_c1),
            "Correct the flag.",
        ) from None


def gamma_of(options: Any) -> float:
    """``--spectrum-gamma``, or the chosen prior's own default."""
    if options.spectrum_gamma is not None:
        return float(options.spectrum_gamma)
    return 1.0 if str(options.spectrum_prior) == "exponential" else 0.5


def has_own_output(options: Any) -> bool:
    """Whether the output layer is one of ours, rather than the host's own."""
    return str(options.embedding_type) != "plain" or str(options.output_head) != "softmax"


def refuse_unsupported(options: Any) -> None:
    """Refuse what our tables and heads cannot be combined with, before anything is built.

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
    except ImportError:  # then the host itself refuses the backend
        return False
    return bool(ConfigAutoWrap.in_autowrap_context)
