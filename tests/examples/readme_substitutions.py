"""What is changed in the READMEs' commands so that they run in seconds: one table of rules.

Paths stay as they are written: the sandbox has tiny data where they point to (:data:`DATA`).
"""

import importlib.util
import re

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
SPLITS = ("train", "valid", "test")
TEXTS = {
    **{f"{corpus}/wiki.{split}.tokens": f"{split}.txt"
       for corpus in ("wikitext-2", "wikitext-103") for split in SPLITS},
    **{f"sotu/{split}.tokens": f"{split}.txt" for split in SPLITS},
    **{f"penn/{split}.txt": f"{split}.txt" for split in SPLITS},
    **{f"dialogue/{split}.{side}": f"{split}.txt"
       for side in ("context", "response") for split in SPLITS},
}  # fmt: skip
# checkpoint that a README takes for granted -> arguments of the fixture ``train``
CHECKPOINTS = {
    "checkpoint_best.pt": ("transformer_sc", "spectrum_control", "--share-all-embeddings"),
    "plain.pt": ("transformer", "label_smoothed_cross_entropy", "--share-all-embeddings"),
    "sc.pt": ("transformer_sc", "spectrum_control", "--share-all-embeddings"),
    "language_model.pt": (
        *("transformer_lm_sc", "spectrum_control"),
        "--share-decoder-input-output-embed",
    ),
    "awd_lstm.pt": (
        *("awd_lstm_wt2", "mle_cosreg", "--task", "stateful_language_modeling"),
        *("--batch-size", "4", "--decoder-embed-dim", "8", "--decoder-hidden-size", "12"),
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


# A flag given twice counts the second time, in fairseq's commands as in hydra's.
TRANSFORMER = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 24 --encoder-layers 1 "
    "--encoder-attention-heads 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 24 "
    "--decoder-layers 1 --decoder-attention-heads 2"
)
TRANSFORMER_LM = (
    "--decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16 "
    "--decoder-ffn-embed-dim 24 --decoder-layers 1 --decoder-attention-heads 2"
)
LSTM = "--decoder-embed-dim 16 --encoder-embed-dim 16 --decoder-out-embed-dim 16"
LSTM += " --encoder-hidden-size 16 --decoder-hidden-size 16"
XL = "--decoder-embed-dim 16 --decoder-ffn-embed-dim 24 --decoder-layers 1"
XL += " --decoder-attention-heads 2 --adaptive-softmax-cutoff 10,20,30"
AWD_LSTM = "--decoder-embed-dim 16 --decoder-hidden-size 24 --decoder-last-hidden-size 16"
# Hydra names a run's folder by the second, and two of these trainings may share one.
HYDRA = "common.cpu=true optimization.max_update=2 dataset.num_workers=0"
HYDRA += " hydra.run.dir='outputs/${now:%H-%M-%S-%f}'"
HYDRA_MODEL = "model.decoder_embed_dim=16 model.decoder_ffn_embed_dim=24 model.decoder_layers=1"
HYDRA_MODEL += " model.decoder_attention_heads=2 dataset.max_tokens=96"
HYDRA_ENCODER = "model.encoder_embed_dim=16 model.encoder_ffn_embed_dim=24 model.encoder_layers=1"
HYDRA_ENCODER += " model.encoder_attention_heads=2"
HYDRA_LM = "model.decoder_input_dim=16 model.decoder_output_dim=16 task.tokens_per_sample=16"
HYDRA_AWD_LSTM = "+model.decoder_embed_dim=16 +model.decoder_hidden_size=24"
HYDRA_AWD_LSTM += (
    " +model.decoder_last_hidden_size=16 dataset.batch_size=2 task.tokens_per_sample=16"
)
# program -> what is found in its command, and what is then added to it
RULES = {
    "fairseq-train": [
        ("", "--cpu --max-epoch 2 --max-update 2 --num-workers 0 --data-buffer-size 0"),
        ("--arch transformer(?!_lm|_xl)", TRANSFORMER),
        ("--arch transformer_lm", TRANSFORMER_LM),
        ("--arch transformer_xl", XL),
        ("--arch lstm", LSTM),
        ("--mixture-components|_mos", "--mixture-components 2"),
        ("--arch awd_lstm", AWD_LSTM),
        ("--task (stateful_)?language_modeling", "--tokens-per-sample 16"),
        ("--task stateful_language_modeling", "--batch-size 2"),
    ],
    "fairseq-generate": [("", "--cpu --num-workers 0 --max-len-b 8")],
    "fairseq-interactive": [("", "--cpu --max-len-b 8")],
    "fairseq-eval-lm": [
        ("", "--cpu --num-workers 0"),
        ("--context-window", "--context-window 4 --tokens-per-sample 16"),
    ],
    "fairseq-validate": [("", "--cpu --num-workers 0")],
    "fairseq-preprocess": [("", "--workers 1 --destdir preprocessed")],
    "spectral-fairseq": [("^average .*--num-epoch-checkpoints", "--num-epoch-checkpoints 2")],
    "fairseq-hydra-train": [
        ("", HYDRA),
        ("--config-name (translation|language_model)", HYDRA_MODEL),
        ("--config-name translation", HYDRA_ENCODER),
        ("--config-name language_model", HYDRA_LM),
        ("--config-name awd_lstm", HYDRA_AWD_LSTM),
        ("_sc_grid", "criterion.spectrum_weight=0.1"),
        (
            "_sc_grid(?!.*orthogonality_weights)",
            "criterion.orthogonality_weights='0.01,0.01,0,0','1,1,0,0'",
        ),
        (
            "_weight_norm_grid",
            "criterion.weight_norm_weight=0.001 criterion.weight_norm_target=0,2 "
            "+model.mixture_components=2",
        ),
    ],
}
NEEDS_A_GPU = "--fp16"


def with_user_dir(argv):
    """A command with the whole path of the package."""
    return [USER_DIR if argument == "spectral_fairseq" else argument for argument in argv]


def substitute(argv):
    """A command with the rules applied to it."""
    program, *arguments = with_user_dir(argv)
    given = " ".join(arguments)
    arguments = [argument for argument in arguments if argument != NEEDS_A_GPU]
    for when, more in RULES.get(program, ()):
        if re.search(when, given):
            arguments += more.split()
    return [program, *arguments]
