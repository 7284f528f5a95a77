"""``spectral-fairseq SUBCOMMAND``: a subcommand and its work, imported when it is named."""
