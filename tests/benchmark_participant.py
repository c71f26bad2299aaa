"""A participant for tests, `python -m tests.benchmark_participant HOW`: works, is missing, or fails to build."""

import os
import sys
import time

from benchmarks import participant


def build(arguments: list[str]) -> participant.Built:
    """print(...) is what libraries do to a standard output that belongs to the protocol."""
    print("a library says hello")
    if arguments == ["missing"]:
        raise participant.Unavailable("there is no such library\nand a second line")
    if arguments == ["fails"]:
        raise ValueError("the model cannot be built")
    seen = {name: os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "GIVEN", "THERE")}

    def steps(n: int) -> float:
        print("another line")
        time.sleep(0.01 * n)
        return float(n)

    return participant.Built(steps, 7, {"versions": seen, "threads": 1})


if __name__ == "__main__":
    assert sys.argv[1:]
    participant.serve(build)
