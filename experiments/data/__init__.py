"""Where text and images come from, how they are split and read, and how batches become functions of (seed, step)."""

from absl import logging

# Beside JAX below 0.11, as in Colab's image, Grain 0.2.18 says at each start that processes which we never start could
# not be profiled.
logging.get_absl_logger().addFilter(lambda record: "worker profiling" not in str(record.msg))
