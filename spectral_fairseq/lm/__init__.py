"""Language models of the papers, their parts and their evaluation; no fairseq."""

from spectral_fairseq.lm.averaged_sgd import AveragedSGD, NonMonotonicTrigger
from spectral_fairseq.lm.awd_lstm import AWDLSTM, Carry
from spectral_fairseq.lm.coupled_adam import CoupledAdam
from spectral_fairseq.lm.dynamic_evaluation import DynamicEvaluation, gradient_statistics
from spectral_fairseq.lm.evaluation import (
    CacheGrid,
    ContinuousCache,
    StreamReader,
    evaluate,
    perplexity,
)
from spectral_fairseq.lm.transformer_xl import TransformerXL

__all__ = [
    "AWDLSTM",
    "AveragedSGD",
    "CacheGrid",
    "Carry",
    "ContinuousCache",
    "CoupledAdam",
    "DynamicEvaluation",
    "NonMonotonicTrigger",
    "StreamReader",
    "TransformerXL",
    "evaluate",
    "gradient_statistics",
    "perplexity",
]
