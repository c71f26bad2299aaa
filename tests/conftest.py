"""Every test sees eight simulated CPU devices, and the project's root on the path."""

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
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):  # later ones know no others
    FLAGS += " --xla_cpu_use_fusion_emitters=false"  # the older emitters of loops, which compile twice as fast
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Runs that are resumed or repeated need the programs of the first: kept while the tests run, outside the user's cache
# folder. Each process has a folder of its own, since JAX reads what another one is still writing.
COMPILED = tempfile.mkdtemp(prefix="tfm-compiled-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
# Tracing makes many objects that live long: looking for garbage among them took some 5 % of the suite's time.
gc.set_threshold(20_000, 50, 100)
HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE), *(str(room) for room in HERE.iterdir() if room.is_dir())]
# A suite that runs in the background of a shell ignores Ctrl-C, and so would the runs it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def path_as_before():
    """A test's config files bring their folders onto the path, where the next one must not find their modules."""
    before = sys.path[:]
    yield
    sys.path[:] = before
