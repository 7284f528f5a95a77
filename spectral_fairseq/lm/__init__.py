"""Language models of the papers, their parts and their evaluation; free of fairseq."""
