"""A participant of a test: it sleeps for its steps, or is not there, or fails, as its way says."""

import time

from benchmarks import participant


def build(size, way):
    print("what a library prints is no answer")
    if way == "missing":
        raise ImportError("there is no such library\nat all")
    if way == "fails":
        raise RuntimeError("the model cannot be built")

    def steps(n):
        time.sleep(0.01 * n)
        return float(n)

    return participant.Built(steps, 7, {"title": size.title})
