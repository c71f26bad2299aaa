"""Every test sees eight simulated CPU devices, and the project's root on the path."""

import os
import pathlib
import signal
import sys

# Tests compile far more than they compute: without LLVM's optimisation a run's test takes 5.5 s of CPU instead of 8.8.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # nothing is written into the user's cache folder
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
# A suite that runs in the background of a shell ignores Ctrl-C, and so would the runs it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
