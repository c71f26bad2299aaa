"""Speed: python -m benchmarks (this project and its peers), benchmarks.tpu_estimate, benchmarks.on_tpu."""
