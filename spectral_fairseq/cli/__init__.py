"""The command ``spectral-fairseq SUBCOMMAND``: one subcommand a file."""
