"""The fairseq task ``stateful_language_modeling`` and its data, from corpus to segments."""
