"""What the examples share: a work folder, commands run side by side, corpora, figures."""
