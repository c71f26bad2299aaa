"""Configure every test: eight simulated CPU devices, and the project's root and the test folders on sys.path."""

import atexit
import gc
import importlib.metadata
import os
import pathlib
import shutil
import signal
import sys
import tempfile

import pytest

# Tests compile far more than they compute: without LLVM's optimisation a run's test takes 5.5 s of CPU instead of 8.8.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (
    0,
    11,
):  # newer versions have only the new emitters
    FLAGS += " --xla_cpu_use_fusion_emitters=false"  # the older emitters of loops, which compile twice as fast
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Resumed and repeated runs reuse the programs of the first run: they are cached while the tests run, outside the user's
# cache folder. Each process has its own folder, because JAX reads files that another process is still writing.
COMPILED = tempfile.mkdtemp(prefix="tfm-compiled-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
# Tracing makes many long-lived objects. Garbage collection over them took about 5 % of the suite's time.
gc.set_threshold(20_000, 50, 100)
HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE), *(str(folder) for folder in HERE.iterdir() if folder.is_dir())]
# A test suite in the background of a shell ignores Ctrl-C, and the runs that it starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def restore_path():
    """Restore sys.path: a test's config files add their folders, and the next test must not import from these."""
    before = sys.path[:]
    yield
    sys.path[:] = before
