"""The machine and the software that a measurement was made with."""

import importlib.metadata
import os
import pathlib
import platform
from typing import Any

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers")
# What all participants inherit, and what can change a time.
ENVIRONMENT = ("GLIBC_TUNABLES", "LD_PRELOAD", "XLA_FLAGS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def processor() -> str:
    """The model's name as the system tells it, with its numbers (all EPYC are "EPYC"), and its widest vectors."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    wide = [
        name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in fields.get("flags", "").split()
    ]
    numbers = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return ", ".join([fields.get("model name", platform.machine()), *numbers, *wide[:1]])


def versions() -> dict[str, str]:
    """Of Python and of the libraries that are installed."""
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
