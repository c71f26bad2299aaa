"""python tests/kill.py --kills 50 [--seed 0] [--config FILE] [--folder DIR] [--config.key=value ...]

Trains once undisturbed; then again, with the same command, in runs that are killed (SIGKILL) at random moments and
started anew, until there were so many kills. The results must be the very same: parameters, evaluation, logged numbers.
"""

import argparse
import collections
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

import killed_run
import numpy as np
from killed_run import END, SAVING, START, STEPS, Run

KILLS_OF_A_RUN = 10  # after which it is left alone
# More than one epoch, dropout, accumulation, and a batch that grows. The text's 151 windows are 9 batches of 16.
CHANGES = {
    "experiment": "language",
    "model.M": 2,
    "model.D": 8,
    "model.H": 2,
    "model.unroll": 1,
    "model.dropout": 0.1,
    "text.N": 7,
    "optim.warmup_steps": 2,
    "optim.batch_rule": "linear",
    "train.steps": 60,
    "train.batch_size": 16,
    "train.growth": [[30, 24]],
    "train.accumulation": 2,
    "train.log_every": 1,
    "train.evaluate_every": 20,
    "train.evaluate_batch": 16,
    "train.save_every": 5,
    "sample.max_new_tokens": 5,
}
TEXT = (b"A king who reads is worth two kings who fight. " * 3 + bytes(range(32, 127))) * 5


def small_config(folder: pathlib.Path, **changes) -> pathlib.Path:
    """A config file in this folder, and the text it trains on. In changes, dots of keys are written as __."""
    (folder / "kings.txt").write_bytes(TEXT)
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    wanted = CHANGES | {"text.source": str(folder / "kings.txt")} | changes
    lines = [f"    config.{key} = {value!r}\n" for key, value in wanted.items()]
    head = 'from configs import base\n\n\ndef get_config():\n    config = base.get_config("language")\n'
    file = folder / "killed.py"
    file.write_text(head + "".join(lines) + "    return config\n", encoding="utf-8")
    return file


def moment(rng: np.random.Generator, run: Run, times: killed_run.Times, steps: int) -> Callable[[], bool]:
    """A function that says when to kill: of five, two in a save, one each at the start, between steps, at the end."""
    before = run.saved()
    choices = [START, END] if before == steps else [SAVING, SAVING, START, STEPS, END]
    kind = rng.choice(choices)
    late = rng.choice([0.0, rng.uniform(0, 0.05)])  # behind what is waited for
    if kind == START:
        at = rng.uniform(0, times.start)
        return lambda: run.seconds() > at
    if kind == END:
        late = rng.uniform(0, times.end)
        return delayed(lambda: run.trains() and run.saved() == steps, late)
    if kind == STEPS:
        at = before + rng.integers(1, 21)
        return delayed(lambda: run.trains() and run.step() >= at, late)
    more, seen = rng.integers(1, 5), set()

    def saves() -> bool:
        if run.trains():
            seen.update(name for name in run.names() if name.endswith(".writing"))
        return len(seen) >= more

    return delayed(saves, late)


def delayed(happened: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """Whether so many seconds have passed since it first happened."""
    since: list[float] = []

    def now() -> bool:
        if not since and happened():
            since.append(time.perf_counter())
        return bool(since) and time.perf_counter() - since[0] >= seconds

    return now


def survive(
    config: pathlib.Path,
    folder: pathlib.Path,
    *,
    kills: int,
    seed: int = 0,
    more: Iterable[str] = (),
    environment: dict[str, str] | None = None,
    cache: str = "compiled_by_killed",
    say: Callable[[str], None] = print,
) -> collections.Counter:
    """Kill runs of this config so many times, and return how many died where.

    more: arguments of the command. cache: a folder in `folder` for what killed runs compile; "compiled": that of the
    undisturbed one. Raises killed_run.Failed where one is different.
    """
    rng = np.random.default_rng(seed)
    command = [sys.executable, "launch.py", "--config", str(config.absolute()), *more]

    def run(name: str, cache: str) -> Run:
        cached = {"JAX_COMPILATION_CACHE_DIR": str(folder / cache)}
        return Run(folder / name, command, {**(os.environ if environment is None else environment), **cached})

    whole, times, runs = run("undisturbed", "compiled"), killed_run.Times(), 0
    killed_run.watch(whole, times)
    limit = 60 + 10 * whole.seconds()
    steps, found = whole.summary()["steps"], collections.Counter()
    while found.total() < kills:
        runs += 1
        one, begun = run(f"run{runs}", cache), found.total()
        one.limit = limit
        while found.total() < min(kills, begun + KILLS_OF_A_RUN):
            if not killed_run.watch(one, times, moment(rng, one, times, steps)):
                break
            place = one.place(steps)
            found[place] += 1
            say(f"{found.total():3}: run {runs} from step {one.steps_before}, after {one.seconds():.2f} s, {place}")
        else:
            killed_run.watch(one, times)
        wrong = killed_run.differences(one, whole)
        if wrong:
            raise killed_run.Failed(f"{one.folder} is not as {whole.folder}: " + "; ".join(wrong))
        say(f"     run {runs} is finished: the same {steps} steps, params_sha256 {one.summary()['params_sha256'][:16]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--config", type=pathlib.Path, help="a run that saves often; default: a small one, made here")
    parser.add_argument("--folder", type=pathlib.Path, help="where the runs are left; default: a temporary folder")
    given, more = parser.parse_known_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or pathlib.Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            config = given.config or small_config(folder)
            found = survive(config, folder, kills=given.kills, seed=given.seed, more=more)
        except killed_run.Failed as error:
            print(f"FAILED: {error}")
            return 1
    places = ", ".join(f"{found[place]} {place}" for place in killed_run.WHERE if found[place])
    print(f"{found.total()} kills ({places}): all as undisturbed, to the bit. {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
