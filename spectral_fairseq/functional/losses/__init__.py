"""Softmax losses computed block by block, without holding tokens x words scores."""
