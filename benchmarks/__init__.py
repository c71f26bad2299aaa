"""Measurements: python -m benchmarks (ours and peers), python -m benchmarks.tpu_estimate."""
