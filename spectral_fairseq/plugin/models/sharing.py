"""``--share-all-embeddings`` and its kin: what one table for several uses requires."""

from __future__ import annotations

from typing import Any

from spectral_fairseq.errors import ConfigurationError


def check_sharing(options: Any, task: Any) -> None:
    """Refuse tables that are to be shared but cannot, as fairseq does without saying what to do.

    Args:
        options: an encoder-decoder architecture's flags.
        task: its two dictionaries must be the same if both sides share a table.

    Raises:
        ConfigurationError: two dictionaries, two widths or two files of vectors for one table.
    """
    widths = {"--decoder-embed-dim": options.decoder_embed_dim}
    if options.share_all_embeddings:
        widths["--encoder-embed-dim"] = options.encoder_embed_dim
        if task.source_dictionary != task.target_dictionary:
            raise ConfigurationError(
                "one dictionary for --share-all-embeddings",
                f"{len(task.source_dictionary)} words in the source language and "
                f"{len(task.target_dictionary)} others in the target language",
                "Use fairseq-preprocess --joined-dictionary, or "
                "--share-decoder-input-output-embed instead.",
            )
        files = (options.encoder_embed_path, options.decoder_embed_path)
        if files[1] and files[0] != files[1]:
            raise ConfigurationError(
                "the same file of vectors for both sides with --share-all-embeddings",
                f"--decoder-embed-path {files[1]} and --encoder-embed-path {files[0]}",
                "Give both, alike, or drop --decoder-embed-path.",
            )
    if options.share_all_embeddings or options.share_decoder_input_output_embed:
        if getattr(options, "decoder_out_embed_dim", None) is not None:
            widths["--decoder-out-embed-dim"] = options.decoder_out_embed_dim
    if len(set(widths.values())) > 1:
        raise ConfigurationError(
            "one width for the shared embedding table",
            " and ".join(f"{flag} {width}" for flag, width in widths.items()),
            "Make them equal, or do not share the embeddings.",
        )
