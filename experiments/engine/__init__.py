"""What runs an experiment. This file imports next to nothing, as it is needed before anything else is imported."""

import os
import sys

VARIABLE, LARGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def large_pages(script: str) -> None:
    """Start this process again, with the same arguments, where glibc would ask for large pages but was not told to.

    XLA takes the memory of a step's intermediate results from the system anew at every step, and to clear it in pages
    of 4 KB took a third of the step of `shakespeare_char` on two cores (39 ms against 25 in pages of 2 MB).

    glibc reads its settings as a process starts, so this comes before all else is imported. Nothing happens without
    glibc, where the variable is set already, or where another program, such as a notebook, runs `script`.
    """
    started = [os.path.abspath(argument) for argument in sys.orig_argv[1:]]
    glibc = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})
    if glibc and VARIABLE not in os.environ and os.path.abspath(script) in started:
        os.environ[VARIABLE] = LARGE
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
