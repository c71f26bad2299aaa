"""Configure every test: eight simulated CPU devices, and the project's root and the test folders on sys.path."""

import fcntl
import gc
import importlib.metadata
import os
import pathlib
import signal
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE), *(str(folder) for folder in HERE.iterdir() if folder.is_dir())]
import compilation_cache  # noqa: E402

# Tests compile far more than they compute: without LLVM's optimisation a run's test takes 5.5 s of CPU instead of 8.8.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    # The older emitters of loops compile twice as fast, and newer versions do not have them. A program in one part
    # has less to link: the suite took 164 s in place of 182 s.
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if FLAGS not in os.environ.get("XLA_FLAGS", ""):  # a worker has the flags already, from the process that started it
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_COMPILATION_CACHE_DIR"] = compilation_cache.open_folder(os.environ["XLA_FLAGS"])
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# JAX 0.10 otherwise puts the folder's path into the keys of the entries, and its name changes with each process.
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
# Tracing makes many long-lived objects. Garbage collection over them took about 5 % of the suite's time.
gc.set_threshold(20_000, 50, 100)
# A test suite in the background of a shell ignores Ctrl-C, and the runs that it starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


COLLECTED = pytest.StashKey[set]()


def pytest_pycollect_makemodule(module_path, parent):
    """Remember the collected files (test_walls.py)."""
    parent.config.stash.setdefault(COLLECTED, set()).add(module_path)


def pytest_make_parametrize_id(val, argname):
    """Return the argument's name for bytes: compressed bytes hold the time, and all workers need the same names."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture
def collected_files(request):
    """Return the paths of the test files that pytest collected."""
    return request.config.stash[COLLECTED]


@pytest.fixture(autouse=True)
def restore_path():
    """Restore sys.path: a test's config files add their folders, and the next test must not import from these."""
    before = sys.path[:]
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def make_once(tmp_path_factory):
    """Return a function (name, make). It returns a folder that make(folder) filled, once for all workers.

    The first worker that needs the folder fills it; the others wait for its lock. Tests must not change the folder.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make_folder(name, make):
        folder, done = base / name, base / f"{name}.done"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return make_folder
