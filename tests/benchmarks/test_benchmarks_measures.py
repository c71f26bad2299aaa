"""What is measured beside the workloads (product, start, depth, memory, cost), at sizes that take no time."""

import importlib
import json
import math
import os
import pathlib
import sys

import pytest

from benchmarks import alone, cost, depth, inputs, limit, memory, participant, product, sizes, start
from configs import base
from experiments import engine
from experiments.engine import config_file

SMALL = {"model.M": 1, "model.D": 14, "model.H": 2}


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr(inputs, "WINDOWS", 20)


def here(module: str, function: str, **arguments) -> object:
    """As alone.call, but in this process."""
    return getattr(importlib.import_module(module), function)(**json.loads(json.dumps(arguments)))


def test_a_function_in_a_process_of_its_own():
    assert alone.call("statistics", "median", data=[3, 7, 11]) == 7
    assert alone.call("os", "getenv", key=engine.VARIABLE) == os.environ.get(engine.VARIABLE, engine.LARGE)
    with pytest.raises(RuntimeError, match="(?s)statistics.median has failed.*no median for empty data"):
        alone.call("statistics", "median", data=[])


def test_operations_of_a_step():
    size, M, D, H, N = sizes.WORKLOADS["step_a"], 2, 14, 2, 13
    token = M * (4 * D * D + 2 * D * 4 * D) + D * size.W  # projections, MLP, unembedding
    attention = M * 2 * H * (N * (N + 1) // 2) * (D // H)  # each token sees itself and those before it
    expected = 3 * 2 * size.B * (N * token + attention)
    changes = {"model.M": M, "model.D": D, "model.H": H, "text.N": N}
    assert limit.step_flops("step_a", **changes) == expected


def test_operations_of_a_step_on_images():
    size, M, D, H, N = sizes.WORKLOADS["step_c"], 2, 14, 2, 50  # a class token and 7 x 7 patches, which all see all
    token = M * (4 * D * D + 2 * D * 4 * D)
    attention = M * 2 * H * N * N * (D // H)
    expected = 3 * 2 * size.B * (N * token + attention + 49 * 16 * D + D * 10)
    assert limit.step_flops("step_c", **{"model.M": M, "model.D": D, "model.H": H}) == expected


def test_least_seconds():
    assert limit.seconds("step_c", product=7e9, read=1) == limit.step_flops("step_c") / 7e9
    one, many = (limit.seconds(name, product=190e9, read=30e9) for name in ("generate", "generate_32"))
    parameters = 6 * 12 * 384**2 + 65 * 384
    assert one == pytest.approx(1000 * 4 * (parameters + 6 * 2 * 384 * 500.5) / 30e9)
    assert many == pytest.approx(1000 * 4 * (parameters + 32 * 6 * 2 * 384 * 500.5) / 30e9)
    assert limit.seconds("generate_32", product=1e9, read=30e9) == pytest.approx(32 * 2 * 1000 * parameters / 1e9)


@pytest.mark.parametrize("who", ["xla", "torch"])
@pytest.mark.parametrize("what", ["product", "read"])
def test_rates_are_taken(what, who):
    if who == "torch":
        pytest.importorskip("torch")
    assert product.build([what, who, "7"]).steps(2) == 0.0


class Product:
    """A participant that takes 2 seconds a product or reading, or 4."""

    def __init__(self, name: str, module: str, what: str, who: str, size: str):
        if who == "torch":
            raise participant.Unavailable("No module named 'torch'")
        self.asked = 0

    def take(self, steps: int, *, lead: int) -> dict[str, float]:
        self.asked += 1
        return {"seconds": steps * (4.0 if self.asked == 2 else 2.0)}

    def close(self) -> None:
        pass


def test_rates_of_a_machine(monkeypatch):
    monkeypatch.setattr(participant, "Participant", Product)
    found = product.measure(3, size=1000, numbers=10**9, names=("step_a", "generate"))
    assert found["xla"] == {"median": 1e9, "best": 1e9} and found["missing"] == {"torch": "No module named 'torch'"}
    assert found["read"] == {"xla": {"median": 2e9, "best": 2e9}}
    assert found["least_seconds"]["step_a"] == found["step_flops"]["step_a"] / 1e9
    assert found["least_seconds"].keys() == {"step_a", "generate"} and found["step_flops"].keys() == {"step_a"}
    shown = product.show(found | {"least_seconds": {"step_a": 0.5, "generate": 7.0}})
    for words in ("1 GFLOP/s", "2.0 GB/s", "500.0 ms for a step", "7,000.0 ms for words", "No module named 'torch'"):
        assert words in shown


def until(code: str, folder: pathlib.Path, file: pathlib.Path | None) -> float | str:
    return start.until([sys.executable, "-c", code], dict(os.environ), file)


def test_start_ends_with_the_first_step(tmp_path):
    file = tmp_path / "metrics.jsonl"
    writes = f"import time; time.sleep(0.3); open({str(file)!r}, 'w').write('1\\n'); time.sleep(99)"
    assert 0.3 < until(writes, tmp_path, file) < 20
    assert until(f"import time; print({start.DONE!r}, flush=True); time.sleep(99)", tmp_path, None) < 20


def test_start_without_a_library_and_start_that_fails(tmp_path):
    missing = f"import sys; print('No module named x', file=sys.stderr); sys.exit({start.MISSING})"
    assert until(missing, tmp_path, None) == "No module named x"
    with pytest.raises(RuntimeError, match="took no step:\nwhy"):
        until("import sys; print('why', file=sys.stderr); sys.exit(1)", tmp_path, tmp_path / "none")


def test_start_has_the_workloads_config(tmp_path):
    file = tmp_path / "config.json"
    start.write_config(file, "step_a", **SMALL)
    loaded = config_file.load(str(file), base=base.get_config)
    assert (loaded.experiment, loaded.model.D, loaded.train.log_every) == ("language", 14, 1)
    assert pathlib.Path(loaded.text.source).is_file()


def test_start_is_measured_cold_and_then_warm(monkeypatch):
    asked = []

    def begin(who, name, folder, heat):
        cold = not list(folder.iterdir())
        (folder / "cache").mkdir(exist_ok=True)
        asked.append((who, heat, cold))
        return "no torch" if who == "compiled" else {"cold": 7.0, "warm": 3.0}[heat]

    monkeypatch.setattr(start, "start", begin)
    found = start.measure(2, peers=("compiled", "flax"))
    assert all(cold == (heat == "cold") for _, heat, cold in asked)
    assert found["ours"] == found["flax"] == {"cold": [7.0, 7.0], "warm": [3.0, 3.0]}
    shown = start.show(found)
    assert "7.0 (7.0-7.0)" in shown and "not measured: no torch" in shown


def test_depth():
    found = depth.measure(depths=(3,), **{key: SMALL[key] for key in ("model.D", "model.H")})
    for way in depth.WAYS:
        assert len(found[way]) == 1 and all(seconds > 0 for one in found[way] for seconds in one.values())
    assert len(depth.show(found).splitlines()) == 3


def test_memory(monkeypatch):
    monkeypatch.setattr(memory, "MOST", 10 * 2**20)
    monkeypatch.setattr(memory, "peak_bytes", lambda name, **changes: changes["text.N"] * 2**20)
    found = memory.measure(lengths=(2048, 4096), **SMALL)
    assert found["flash"]["power"] < 1.3 and found["explicit"]["power"] > 1.7
    assert found["explicit"]["temporary_bytes"][1] > 4 * 4096**2  # a matrix of N x N
    assert found["flash"]["peak_bytes"] == [2048 * 2**20, 4096 * 2**20]
    assert found["explicit"]["peak_bytes"][1] is None
    assert "not run" in memory.show(found) and "to the power of" in memory.show(found)


def test_power():
    assert memory.power([3, 5, 7], [1, 25, 49]) == pytest.approx(2)
    assert math.isnan(memory.power([3], [1]))


def test_peak_memory_is_a_process_of_steps():
    before = memory.take_two_steps("step_a", SMALL | {"text.N": 13})
    assert before > 50 * 2**20


def test_cost(monkeypatch):
    monkeypatch.setattr(cost, "WAYS", {"flash": 8, "explicit": 0})
    monkeypatch.setattr(alone, "call", here)
    found = cost.measure(2, lengths=(8, 16), depths=(1,), **{"model.D": 14, "model.H": 2})
    assert found["explicit"] == [None, None] and found["flash"][1] is None
    assert found["flash"][0] > 0 and found["layers"][0] > 0
    assert len(cost.show(found).splitlines()) == 7
