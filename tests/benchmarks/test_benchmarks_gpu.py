"""What is measured on a GPU, at sizes that take no time, on the CPU."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import gpu, gpu_ours, gpu_sizes, participant

TOY = dataclasses.replace(gpu_sizes.TOY_SMALL, N=13, B=3, seeds=2)


@functools.cache
def seeds(kind: str) -> tuple[float, int]:
    steps, parameters = gpu_ours.KINDS[kind](TOY)
    return steps(2), parameters


def test_seeds_together_are_those_apart():
    assert seeds("together")[1] == seeds("apart")[1]
    assert seeds("together")[0] == pytest.approx(seeds("apart")[0], rel=1e-2)  # of bfloat16


def test_attention_is_as_asked_for():
    for way in ("fused", "explicit"):
        size = dataclasses.replace(TOY, attention=way)
        assert gpu_ours.settings(size).model.attention == way
        assert gpu_ours.flops(size) == gpu_ours.flops(TOY) > 0


def test_product_on_a_gpu():
    assert gpu_ours.products(TOY)[0](3) == 0.0


class OnGPU:
    """A participant that answers at once."""

    SECONDS = {"ours, fused": 1.0, "ours, explicit": 2.0, "transformers compiled": 3.0, "XLA's product": 0.5}
    SECONDS |= {"one program": 0.25, "one after the other": 1.0}

    def __init__(self, name: str, module: str, kind: str, size: str):
        if name not in self.SECONDS:
            raise RuntimeError(f"{name} has ended:\nout of memory")
        self.seconds, self.closed = self.SECONDS[name], False
        self.facts = {"parameters": 7, "device": "a GPU"} | ({"step_flops": 40} if kind == "step" else {})
        assert gpu_sizes.read(size).attention == ("fused" if name == "ours, fused" else "explicit")

    def take(self, steps: int, *, lead: int) -> dict[str, float]:
        return {"seconds": steps * self.seconds, "loss": 4.0}

    def close(self) -> None:
        self.closed = True


def test_gpu_tables(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(participant, "Participant", OnGPU)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setattr(gpu_sizes, "TOY_GPT2", dataclasses.replace(TOY, product=10))
    assert gpu.main(["--try", "--rounds", "2", "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    rows = {line[:24].strip(): line.split() for line in shown.splitlines()}
    assert rows["ours, fused"][2:] == ["1000.00", "39", "1%", "1.00", "(1.00-1.00)"]  # 40 of 2 * 10**3 / 0.5 FLOP/s
    assert rows["transformers compiled"][2:] == ["3000.00", "13", "0%", "3.00", "(3.00-3.00)"]
    assert "one program is faster by 4.00 (4.00-4.00)" in shown
    assert "not measured: transformers: out of memory" in shown and "on a GPU" in shown
    assert json.loads((tmp_path / "out.json").read_text())["step"]["ours, explicit"]["seconds"] == [2.0, 2.0]


def test_gpu_script_says_what_is_missing(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
    done = subprocess.run(["sh", script], env=os.environ | {"PYTHON": str(bare)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ours alone is measured" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: Python packages are missing here") and "jax" in done.stderr
