"""Language models of the papers, their parts and their evaluation; no fairseq."""
