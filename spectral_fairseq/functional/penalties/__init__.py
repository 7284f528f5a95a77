"""The penalties of the papers, one a file."""
