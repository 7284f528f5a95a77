"""Checkpoints for plain fairseq, for ``transformers`` and for CTranslate2."""
