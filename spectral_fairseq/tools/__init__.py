"""What the commands do with a fairseq model: export, evaluation, predictions."""
