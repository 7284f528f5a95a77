"""What the methods are, declared once: ``plugin/`` makes flags of it, ``training/`` arguments."""
