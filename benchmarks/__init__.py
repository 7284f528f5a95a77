"""Run from the root of the source tree: ``python -m benchmarks.bench_step``."""
