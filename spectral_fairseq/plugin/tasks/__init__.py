"""fairseq tasks: ``stateful_language_modeling`` and its data, from corpus to segments."""
