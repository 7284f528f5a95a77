"""What is trained, as data: three models, and every form of control of the spectrum."""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple

Key = Tuple[str, str, int]  # task, variant, seed


class Task(NamedTuple):
    """A model to train.

    Args:
        title: what it is called in tables and pictures.
        data: which binary data.
        updates: as many for each variant.
        flags: common to all variants.
        plain: arch with a plain table.
        factored: arch with an SVD table.
    """

    title: str
    data: str
    updates: int
    flags: str
    plain: str
    factored: str


TASKS = {
    "translation": Task(
        "Transformer",
        "translation",
        1_500,
        "--source-lang de --target-lang en --share-all-embeddings --label-smoothing 0.1 "
        "--encoder-embed-dim 64 --decoder-embed-dim 64 --encoder-ffn-embed-dim 128 "
        "--decoder-ffn-embed-dim 128 --encoder-layers 2 --decoder-layers 2 "
        "--encoder-attention-heads 2 --decoder-attention-heads 2 --dropout 0.1 "
        "--optimizer adam --adam-betas (0.9,0.98) --lr 0.002 --lr-scheduler inverse_sqrt "
        "--warmup-updates 400 --clip-norm 1.0 --max-tokens 1600 --validate-interval-updates 300",
        "--arch transformer",
        "--arch transformer_sc",
    ),
    "awd_lstm": Task(
        "AWD-LSTM",
        "language_model",
        1_500,
        "--task stateful_language_modeling --batch-size 20 --batch-size-valid 10 "
        "--tokens-per-sample 35 --variable-bptt --decoder-embed-dim 64 --decoder-hidden-size 128 "
        "--decoder-layers 3 --dropout 0.2 --input-dropout 0.2 --hidden-dropout 0.1 "
        "--word-dropout 0.05 --weight-drop 0.2 --loss-form blockwise --optimizer nt_asgd "
        "--lr-scheduler nt_asgd --lr 30 --weight-decay 1.2e-6 --clip-norm 0.25 "
        "--validate-interval-updates 300 --max-valid-steps 100",
        "--arch awd_lstm_wt2",
        "--arch awd_lstm_wt2 --embedding-type svd",
    ),
    "transformer_xl": Task(
        "Transformer-XL",
        "language_model",
        1_200,
        "--task stateful_language_modeling --batch-size 20 --batch-size-valid 10 "
        "--tokens-per-sample 64 --decoder-embed-dim 64 --decoder-ffn-embed-dim 256 "
        "--decoder-attention-heads 4 --mem-len 64 --adaptive-softmax-cutoff 1000,2500 "
        "--optimizer adam --lr 0.001 --warmup-updates 200 --lr-scheduler cosine --clip-norm 0.25 "
        "--validate-interval-updates 300 --max-valid-steps 100",
        "--arch transformer_xl_wt103_small",
        "--arch transformer_xl_wt103_small --embedding-type svd",
    ),
}

NO_PENALTY = "--criterion mle_cosreg --cosreg-weight 0"
CONTROL = "--criterion spectrum_control"
FACTORED = f"{CONTROL} --svd-interval 0"
ABOVE = f"{NO_PENALTY} --spectrum-slack 1.5 --spectrum-decay"
SGD = "--optimizer sgd --lr-scheduler fixed --lr 3"
# With the interval of 10 and at the full learning rate an ETA of 0.01 goes a tenth of the way each
# time, and 0.1 all of it; 1 still goes all of it at a tenth of that rate.
VARIANTS: Dict[str, str] = {
    "plain": NO_PENALTY,
    "default": CONTROL,
    "factored": FACTORED,
    "factored_renewed": f"{CONTROL} --svd-interval 10",
    "factored_l3": f"{FACTORED} --orthogonality-weights 0.001,0.001,0.001,0",
    "factored_l3_strong": f"{FACTORED} --orthogonality-weights 0.001,0.001,0.1,0.1",
    "penalty_0.0001": f"{NO_PENALTY} --spectrum-weight 0.0001",
    "penalty_0.01": f"{NO_PENALTY} --spectrum-weight 0.01",
    "above_1.5": f"{ABOVE} 0.01",
    "above_1.2": f"{NO_PENALTY} --spectrum-decay 0.01 --spectrum-slack 1.2",
    "above_2": f"{NO_PENALTY} --spectrum-decay 0.01 --spectrum-slack 2",
    "above_1.5_gentle": f"{ABOVE} 0.001",
    "above_1.5_full": f"{ABOVE} 0.1",
    "above_1.5_full_always": f"{ABOVE} 1",
    "above_1.5_late": f"{ABOVE} 0.01 --spectrum-decay-start 600",
    "above_1.5_fixed": f"{ABOVE} 0.01 --spectrum-scale fixed",
    "above_1.5_c2": f"{ABOVE} 0.01 --spectrum-c2 0.01",
    "both_free": f"{NO_PENALTY} --spectrum-decay 0.01 --spectrum-side both",
    "both_free_c2": f"{NO_PENALTY} --spectrum-decay 0.01 --spectrum-side both --spectrum-c2 0.01",
    "both_fixed": (
        f"{NO_PENALTY} --spectrum-decay 0.01 --spectrum-side both --spectrum-scale fixed"
    ),
    "centred": f"{NO_PENALTY} --table-centering 0.1",
    "centred_gentle": f"{NO_PENALTY} --table-centering 0.01",
    "centred_above_1.5": f"{ABOVE} 0.1 --table-centering 0.1",
    "centred_above_2": (
        f"{NO_PENALTY} --table-centering 0.1 --spectrum-decay 0.1 --spectrum-slack 2"
    ),
    "centred_above_3": (
        f"{NO_PENALTY} --table-centering 0.1 --spectrum-decay 0.1 --spectrum-slack 3"
    ),
    "averaged_plain": f"{NO_PENALTY} --nt-asgd-from-start",
    "averaged_above_1.5": f"{ABOVE} 0.01 --nt-asgd-from-start",
    "plain_sgd": f"{NO_PENALTY} {SGD}",
    "factored_sgd": f"{FACTORED} {SGD}",
    "factored_renewed_sgd": f"{CONTROL} --svd-interval 10 {SGD}",
}


def suits(task: str, variant: str) -> bool:
    """Whether a task is trained with a variant: only the AWD-LSTM with SGD and with its averages.

    Factors that are renewed cannot be averaged.
    """
    if variant.startswith("averaged") or variant.endswith("sgd"):
        return task == "awd_lstm"
    return task != "awd_lstm" or not variant.startswith("factored_renewed")
