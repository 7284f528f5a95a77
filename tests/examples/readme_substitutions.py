"""What is changed in the READMEs' commands so that they run in seconds: one table of rules.

Paths stay as they are written: the sandbox has tiny data where they point to (:data:`DATA`).
"""

import importlib.util
import re
from typing import NamedTuple, Tuple

# What the READMEs call "spectral_fairseq", from the folder of a clone: the package under test,
# which the server has imported already.
USER_DIR = importlib.util.find_spec("spectral_fairseq").submodule_search_locations[0]

# path in a README -> fixture of tests/conftest.py whose data stand there
DATA = {
    "data-bin/iwslt14.tokenized.de-en": "tiny_translation_data",
    "data-bin/iwslt14.joined.de-en": "tiny_translation_data",
    "data-bin/wmt14_en_de": "tiny_translation_data",
    "data-bin/multi30k.en-de": "tiny_multi30k_data",
    "fairseq_mmt/data/multi30k-en-de": "tiny_multi30k_data",
    "data-bin/dialogue": "tiny_dialogue_data",
    "data-bin/wikitext-2": "tiny_lm_data",
    "data-bin/wikitext-103": "tiny_lm_data",
    "data-bin/penn": "tiny_lm_data",
    "data-bin/sotu": "tiny_lm_data",
    "data-bin/one-billion": "tiny_lm_data",
    "data-bin/text8": "tiny_lm_data",
    "fairseq/examples/translation/iwslt14.tokenized.de-en": "tiny_translation_data",
    "fairseq/examples/translation/wmt14_en_de": "tiny_translation_data",
}
# text that a README expects under another name -> file of tiny_lm_data
TEXTS = {
    "wikitext-2/wiki.train.tokens": "train.txt",
    "wikitext-2/wiki.valid.tokens": "valid.txt",
    "wikitext-2/wiki.test.tokens": "test.txt",
    "wikitext-103/wiki.train.tokens": "train.txt",
    "wikitext-103/wiki.valid.tokens": "valid.txt",
    "wikitext-103/wiki.test.tokens": "test.txt",
    "sotu/train.tokens": "train.txt",
    "sotu/valid.tokens": "valid.txt",
    "sotu/test.tokens": "test.txt",
    **{
        f"dialogue/{split}.{side}": f"{split}.txt"
        for split in ("train", "valid", "test")
        for side in ("context", "response")
    },
    "penn/train.txt": "train.txt",
    "penn/valid.txt": "valid.txt",
    "penn/test.txt": "test.txt",
}
# checkpoint that a README takes for granted -> arguments of the fixture ``train``
CHECKPOINTS = {
    "checkpoint_best.pt": ("transformer_sc", "spectrum_control", "--share-all-embeddings"),
    "plain.pt": ("transformer", "label_smoothed_cross_entropy", "--share-all-embeddings"),
    "sc.pt": ("transformer_sc", "spectrum_control", "--share-all-embeddings"),
    "language_model.pt": (
        *("transformer_lm_sc", "spectrum_control"),
        "--share-decoder-input-output-embed",
    ),
    "language_model_2.pt": (
        *("transformer_lm", "mle_cosreg"),
        "--share-decoder-input-output-embed",
    ),
}
# scripts that have a test of their own, so that here only their flags are parsed -> their module
PARSED_ONLY = {
    "examples/causal_lm_transformers/run.py": "examples.causal_lm_transformers.run",
    "examples/lm_sotu/bottleneck.py": "studies.bottleneck",
    "examples/lm_sotu/compare.py": "studies.sotu_comparison",
    "examples/lm_sotu/run.py": "studies.sotu",
    "examples/lm_sotu/sotu.py": "studies.sotu_corpus",
    "examples/quickstart/quickstart.py": "studies.quickstart",
    "examples/tables.py": "studies.tables",
    "examples/translation_opendocs_de_en/run.py": ("studies.opendocs"),
}


class Rule(NamedTuple):
    """Where ``when`` is found in a command of ``program``, flags are left out and others added.

    A flag given twice counts the second time, in fairseq's commands as in hydra's.
    """

    program: str
    when: str
    drop: Tuple[str, ...]
    add: str


TRANSFORMER = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 24 --encoder-layers 1 "
    "--encoder-attention-heads 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 24 "
    "--decoder-layers 1 --decoder-attention-heads 2"
)
TRANSFORMER_LM = (
    "--decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16 "
    "--decoder-ffn-embed-dim 24 --decoder-layers 1 --decoder-attention-heads 2"
)
RULES = (
    Rule(
        "fairseq-train",
        "",
        ("--fp16",),
        "--cpu --max-epoch 2 --max-update 2 --num-workers 0 --data-buffer-size 0",
    ),
    Rule("fairseq-train", "--arch transformer(?!_lm|_xl)", (), TRANSFORMER),
    Rule("fairseq-train", r"--arch transformer_lm", (), TRANSFORMER_LM),
    Rule(
        "fairseq-train",
        "--arch transformer_xl",
        (),
        "--decoder-embed-dim 16 --decoder-ffn-embed-dim 24 --decoder-layers 1 "
        "--decoder-attention-heads 2 --adaptive-softmax-cutoff 10,20,30",
    ),
    Rule(
        "fairseq-train",
        "--arch lstm",
        (),
        "--encoder-embed-dim 16 --decoder-embed-dim 16 --decoder-out-embed-dim 16 "
        "--encoder-hidden-size 16 --decoder-hidden-size 16",
    ),
    Rule("fairseq-train", r"--mixture-components|_mos", (), "--mixture-components 2"),
    Rule(
        "fairseq-train",
        "--arch awd_lstm",
        (),
        "--decoder-embed-dim 16 --decoder-hidden-size 24 --decoder-last-hidden-size 16",
    ),
    Rule("fairseq-train", "--task (stateful_)?language_modeling", (), "--tokens-per-sample 16"),
    Rule("fairseq-train", "--task stateful_language_modeling", (), "--batch-size 2"),
    Rule("fairseq-generate", "", ("--fp16",), "--cpu --num-workers 0 --max-len-b 8"),
    Rule("fairseq-interactive", "", ("--fp16",), "--cpu --max-len-b 8"),
    Rule("fairseq-eval-lm", "", ("--fp16",), "--cpu --num-workers 0"),
    Rule("fairseq-eval-lm", "--context-window", (), "--context-window 4 --tokens-per-sample 16"),
    Rule("fairseq-validate", "", ("--fp16",), "--cpu --num-workers 0"),
    Rule("fairseq-preprocess", "", (), "--workers 1 --destdir preprocessed"),
    Rule("spectral-fairseq", "^average .*--num-epoch-checkpoints", (), "--num-epoch-checkpoints 2"),
    Rule(
        "fairseq-hydra-train",
        "",
        (),
        # Hydra names a run's folder by the second, and two of these trainings may share one.
        "common.cpu=true optimization.max_update=2 dataset.num_workers=0 "
        "hydra.run.dir='outputs/${now:%H-%M-%S-%f}'",
    ),
    Rule(
        "fairseq-hydra-train",
        "--config-name (translation|language_model)",
        (),
        "model.decoder_embed_dim=16 model.decoder_ffn_embed_dim=24 model.decoder_layers=1 "
        "model.decoder_attention_heads=2 dataset.max_tokens=96",
    ),
    Rule(
        "fairseq-hydra-train",
        "--config-name translation",
        (),
        "model.encoder_embed_dim=16 model.encoder_ffn_embed_dim=24 model.encoder_layers=1 "
        "model.encoder_attention_heads=2",
    ),
    Rule(
        "fairseq-hydra-train",
        "--config-name language_model",
        (),
        "model.decoder_input_dim=16 model.decoder_output_dim=16 task.tokens_per_sample=16",
    ),
    Rule(
        "fairseq-hydra-train",
        "--config-name awd_lstm",
        (),
        "+model.decoder_embed_dim=16 +model.decoder_hidden_size=24 "
        "+model.decoder_last_hidden_size=16 dataset.batch_size=2 task.tokens_per_sample=16",
    ),
    Rule(
        "fairseq-hydra-train",
        "_sc_grid",
        (),
        "criterion.spectrum_weight=0.1",
    ),
    Rule(
        "fairseq-hydra-train",
        "_sc_grid(?!.*orthogonality_weights)",
        (),
        "criterion.orthogonality_weights='0.01,0.01,0,0','1,1,0,0'",
    ),
    Rule(
        "fairseq-hydra-train",
        "_weight_norm_grid",
        (),
        "criterion.weight_norm_weight=0.001 criterion.weight_norm_target=0,2 "
        "+model.mixture_components=2",
    ),
)


def with_user_dir(argv):
    """A command with the whole path of the package."""
    return [USER_DIR if argument == "spectral_fairseq" else argument for argument in argv]


def substitute(argv):
    """A command with the rules applied to it."""
    program, *arguments = with_user_dir(argv)
    given = " ".join(arguments)
    for rule in RULES:
        if rule.program == program and re.search(rule.when, given):
            arguments = [argument for argument in arguments if argument not in rule.drop]
            arguments += rule.add.split()
    return [program, *arguments]
