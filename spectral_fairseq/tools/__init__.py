"""What the subcommands do with fairseq models: export, evaluation, predictions, flags."""
