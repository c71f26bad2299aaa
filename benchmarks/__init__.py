"""Speed measurements: python -m benchmarks (this project and its peers), python -m benchmarks.tpu_estimate."""
