"""Seconds from the shell to the end of the first training step: ours by launch.py, the peers by a small script.

The first start finds empty caches of compiled programs, the second one those that the first has filled.

python -m benchmarks.start transformers|compiled|flax WORKLOAD is the peers' script: it takes a step and says so.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import participant, sizes

WORKLOAD = "step_a"
PEERS = ("transformers", "compiled", "flax")
LONGEST = 600  # seconds of a start
DONE = "the first step is done"
MISSING = 3  # the exit code of a peer whose library is not there


def measure(rounds: int | None = None, *, name: str = WORKLOAD, peers: tuple[str, ...] = PEERS, **changes: Any) -> dict:
    """{"workload", "ours": {"cold": [seconds, ...], "warm": [...]}, "transformers": ..., "missing": {who: why}}."""
    found: dict[str, Any] = {"workload": name, "missing": {}}
    for _ in range(rounds or 1):
        for who in ("ours", *peers):
            with tempfile.TemporaryDirectory() as folder:
                for heat in ("cold", "warm"):
                    seconds = start(who, name, pathlib.Path(folder), heat, **changes)
                    if isinstance(seconds, str):
                        found["missing"][who] = seconds
                        break
                    found.setdefault(who, {"cold": [], "warm": []})[heat].append(seconds)
    return found


def show(found: dict) -> str:
    """A line for each participant."""
    lines = [f"{found['workload']}: seconds from the shell to the end of the first step"]
    lines.append(f"{'':24}{'cold':>16}{'warm':>16}")
    for who in ("ours", *PEERS):
        if who in found:
            cells = [f"{_middle(found[who][heat]):.1f}{_spread(found[who][heat])}" for heat in ("cold", "warm")]
            lines.append(f"{who:24}" + "".join(f"{cell:>16}" for cell in cells))
        elif who in found["missing"]:
            lines.append(f"{who:24}not measured: {found['missing'][who]}")
    return "\n".join(lines)


def _middle(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


def _spread(seconds: list[float]) -> str:
    return f" ({min(seconds):.1f}-{max(seconds):.1f})" if len(seconds) > 1 else ""


def start(who: str, name: str, folder: pathlib.Path, heat: str, **changes: Any) -> float | str:
    """The seconds; or why it cannot be measured, in a sentence. Its caches and data are in the folder."""
    cache = folder / "cache"
    environment = os.environ | participant.ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    if who == "ours":
        config, workdir = folder / "config.json", folder / heat
        write_config(config, name, **changes)
        command = [sys.executable, "launch.py", f"--config={config}", f"--workdir={workdir}"]
        command += [f"--config.compilation_cache={cache}"]
        return until(command, environment, workdir / "metrics.jsonl")
    return until([sys.executable, "-m", "benchmarks.start", who, name], environment, None)


def write_config(file: pathlib.Path, name: str, **changes: Any) -> None:
    """The workload's config, as a run keeps it, with a line of metrics for each step."""
    from benchmarks import ours

    settings = ours.training(name, file.parent, **{"train.log_every": 1} | changes)
    file.write_text(json.dumps(settings.to_dict()), encoding="utf-8")


def until(command: list[str], environment: dict[str, str], metrics: pathlib.Path | None) -> float | str:
    """Seconds until the command's first step is done: it writes a line of metrics, or (None) says so. It is then ended.

    RuntimeError where it ends without having taken a step.
    """
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE if metrics is None else log, stderr=log, cwd=participant.ROOT,
            env=environment, text=True,
        )  # fmt: skip
        try:
            done = process.stdout.readline().strip() == DONE if metrics is None else _written(process, metrics, began)
            seconds = time.perf_counter() - began
            if not done and process.wait() != MISSING:
                log.seek(0)
                raise RuntimeError(f"{' '.join(command)} took no step:\n{''.join(log.readlines()[-15:])}")
            log.seek(0)
            return seconds if done else log.readlines()[-1].strip()
        finally:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def _written(process: subprocess.Popen, file: pathlib.Path, began: float) -> bool:
    """Wait for the file's first line. False where the process ends before, or takes too long."""
    while process.poll() is None and time.perf_counter() - began < LONGEST:
        if file.exists() and "\n" in file.read_text(encoding="utf-8"):
            return True
        time.sleep(0.005)
    return False


def peer(who: str, name: str) -> None:
    """Build the model, take one step, and say so. ImportError where a library is not there."""
    size = sizes.WORKLOADS[name]
    from benchmarks import inputs

    if who == "flax":
        from benchmarks import flax_peer

        batches = [(w_BN.astype("int32"), target_BN.astype("int32")) for w_BN, target_BN in inputs.words(size)]
        steps, _ = flax_peer.training(flax_peer.GPT2(size), batches)
    else:
        import torch

        from benchmarks import torch_peer

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        model = torch_peer.gpt2(size)
        compiled = torch.compile(model) if who == "compiled" else model
        steps = torch_peer.training(model, lambda w: compiled(input_ids=w, use_cache=False).logits, inputs.words(size))
    steps(1)
    print(DONE, flush=True)


if __name__ == "__main__":
    try:
        peer(*sys.argv[1:])
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(MISSING)
