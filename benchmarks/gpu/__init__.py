"""What is to be run on a GPU, in three stages: parity, speed, training.

    python -m benchmarks.gpu parity --minutes 8    # losses and gradients against the CPU
    python -m benchmarks.gpu speed --minutes 8     # milliseconds, memory, kernels, waits
    python -m benchmarks.gpu train --minutes 30 --data data-bin/iwslt14.tokenized.de-en

Each stage runs unattended, stays inside its minutes, writes its JSON after every row, and never
stops for an error: what failed is a row with its error. ``--tables`` prints what was
written as tables. ``--device cpu --tiny`` shows without a GPU that a stage runs.
"""
