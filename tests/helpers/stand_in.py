"""A test participant that sleeps for its steps, has no library, or fails to build, by its mode."""

import time

from benchmarks import participant


def build(size, mode):
    print("what a library prints is no answer")
    if mode == "missing":
        raise ImportError("there is no such library\nat all")
    if mode == "fails":
        raise RuntimeError("the model cannot be built")

    def steps(n):
        time.sleep(0.01 * n)
        return float(n)

    return participant.Built(steps, 7, {"title": size.title})
