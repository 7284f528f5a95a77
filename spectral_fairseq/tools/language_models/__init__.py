"""fairseq's language models and binarised corpora, as :mod:`spectral_fairseq.lm` reads them."""
