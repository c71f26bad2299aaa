"""What runs an experiment. This file imports next to nothing, as it is needed before anything else is imported."""

import os
import sys

VARIABLE, LARGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def large_pages(script: str) -> None:
    """Start this process again, with the same arguments, where glibc would ask for large pages but was not told to.

    XLA asks for the memory of a step's intermediate results anew at every step, and the C library takes so large a
    piece from the system each time, which clears it in pages of 4 KB as they are first touched: on two cores a third of
    the step of `shakespeare_char` (39 ms against 25 in pages of 2 MB, which Linux lends where it is asked).

    It reads its settings only at the start of a process, so this comes before anything else is imported. Nothing
    happens where the variable is set already, to whatever; where another program runs `script`, such as a notebook; or
    without glibc.
    """
    started = [os.path.abspath(argument) for argument in sys.orig_argv[1:]]
    glibc = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})
    if glibc and VARIABLE not in os.environ and os.path.abspath(script) in started:
        os.environ[VARIABLE] = LARGE
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
