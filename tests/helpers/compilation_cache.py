"""Keep the programs that tests compile between runs of the test suite, in .pytest_cache/compiled.

JAX reads files that another process is still writing, so each process has a separate folder. When a process starts, it
links all entries of the cache into its folder. When it ends, it links its new entries into the cache. Another jaxlib,
other flags or another processor have another cache. A cache that has grown beyond LIMIT is emptied.
TFM_TESTS_COLD=1 neither reads nor writes the cache.
"""

import atexit
import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import tempfile

ROOT = pathlib.Path(__file__).parents[2] / ".pytest_cache" / "compiled"
LIMIT = 2**28  # bytes


def open_folder(flags: str) -> str:
    """Return the folder of compiled programs of this process. flags: XLA_FLAGS. It is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="tfm-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if not os.environ.get("TFM_TESTS_COLD"):
        cache = ROOT / make_key(flags)
        with contextlib.suppress(OSError):  # tests do not need the cache
            cache.mkdir(parents=True, exist_ok=True)
            if sum(entry.stat().st_size for entry in cache.iterdir()) > LIMIT:
                shutil.rmtree(cache)
                cache.mkdir()
            link_files(cache, folder)
            atexit.register(link_files, folder, cache)  # called before the function above
    return folder


def make_key(flags: str) -> str:
    """Return a name for the programs of this jaxlib, these flags and this processor."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else [platform.processor()]
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))} or lines[:1])
    text = "\n".join([importlib.metadata.version("jaxlib"), platform.machine(), flags, *processor])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def link_files(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Link the files of `source` into `target`, or copy them if the two are on different disks."""
    for file in pathlib.Path(source).iterdir():
        new = pathlib.Path(target, file.name)
        if new.exists() or not file.is_file():
            continue
        try:
            os.link(file, new)
        except OSError:  # another disk; a copy gets its name when it is complete
            with contextlib.suppress(OSError):
                part = new.with_name(f"{new.name}.{os.getpid()}")
                os.replace(shutil.copyfile(file, part), new)
