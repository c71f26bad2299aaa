"""The benchmarks' harness and participants at tiny sizes; speed is not measured."""

import json

import jax
import numpy as np
import pytest
from errors import raises

from benchmarks import __main__ as benchmarks, flax_peer, growth, ours, participant, sizes
from tfm import shapes

TINY = {
    "text": sizes.WORKLOADS["step_a"].changed(M=1, H=2, D=6, N=5, B=3, W=65),
    "images": sizes.WORKLOADS["step_c"].changed(M=1, H=2, D=6, B=10, Y=10, patch=5),
    "generation": sizes.WORKLOADS["generate"].changed(M=1, H=2, D=6, N=17, B=3, new=13),
}
SIZE = sizes.WORKLOADS["step_a"].changed(steps=30, lead=2, rounds=3)
SECONDS = {"ours": [1.0, 2.0, 1.0], "transformers": [3.0, 4.0, 5.0], "flax": [2.0, 6.0, 1.0]}


class Sleeper:
    """A participant that returns the times in SECONDS at once and records its turns."""

    turns: list

    def __init__(self, name, command, size, parameters=7):
        if name not in SECONDS:
            raise participant.Unavailable("there is no C++ compiler")
        self.name, self.facts, self._seconds = name, {"parameters": parameters}, iter(SECONDS[name])

    def take(self, steps, *, lead):
        self.turns.append((self.name, lead, steps))
        return {"seconds": next(self._seconds) * steps, "loss": 4.0, "peak_bytes": 11}

    def close(self):
        self.turns.append(f"{self.name} closed")


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.setattr(Sleeper, "turns", [], raising=False)
    return Sleeper.turns


def test_participants_take_turns_and_each_turn_has_a_ratio(turns):
    results = benchmarks.measure("step_a", SIZE, Sleeper)
    assert turns[:9] == [("ours", 2, 30), ("transformers", 2, 30), ("flax", 2, 30)] * 3
    assert set(turns[9:]) == {"ours closed", "transformers closed", "flax closed"}
    assert results["ours"]["seconds"] == [1.0, 2.0, 1.0]
    assert results["transformers"]["ratio"] == 3.0  # the median of 3/1, 4/2, 5/1; the ratio of the medians is 4
    assert results["transformers"]["ratio_spread"] == [2.0, 5.0]
    assert results["transformers compiled"] == {"missing": "there is no C++ compiler"}
    lines = benchmarks.table("step_a", SIZE, results).splitlines()
    assert lines[3].split() == ["transformers", "4,000", "192", "3.00", "2.00-5.00"]
    assert lines[4].split(maxsplit=3)[2:] == ["missing:", "there is no C++ compiler"]


def test_models_of_different_sizes_are_not_compared(turns):
    with raises(RuntimeError, "'ours': 7", "'flax': 8"):
        benchmarks.measure("step_a", SIZE, lambda name, *given: Sleeper(name, *given, 7 + (name == "flax")))


def test_a_process_takes_steps_on_request():
    process = participant.Participant("one", ("stand_in", "works"), SIZE)
    assert (process.facts["parameters"], process.facts["title"]) == (7, SIZE.title)
    result = process.take(3, lead=100)
    assert result["loss"] == 3.0 and 0.03 <= result["seconds"] < 1 and result["peak_bytes"] > 2**20
    process.close()
    with raises(participant.Unavailable, "no such library"):
        participant.Participant("one", ("stand_in", "missing"), SIZE)
    with raises(RuntimeError, "the model cannot be built"):
        participant.Participant("one", ("stand_in", "fails"), SIZE)


@pytest.mark.parametrize("name", ["step_a", "step_c"])
def test_our_models_and_those_of_the_peers_have_the_same_number_of_parameters(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks import torch_peer

    size = sizes.WORKLOADS[name]
    task, model = ours.make_plan(size).task, (torch_peer.vit if name == "step_c" else torch_peer.gpt2)(size)
    parameters = shapes.total(jax.eval_shape(task.init, jax.random.key(0)))
    assert parameters == sum(p.numel() for p in model.parameters())
    example = sizes.make_batches(size.changed(B=1))[0][0]
    flax = jax.eval_shape(flax_peer.MODELS[size.kind](size).init, jax.random.key(0), example)["params"]
    assert parameters == sum(leaf.size for leaf in jax.tree.leaves(flax))


@pytest.mark.parametrize(("peer", "kind"), [(ours, "images"), (flax_peer, "images"), (flax_peer, "text")])
def test_steps_reduce_the_loss(peer, kind, monkeypatch):
    """Random targets of two batches can be learned only if the steps train."""
    monkeypatch.setattr(sizes, "BATCHES", 2)
    monkeypatch.setitem(sizes.OPTIMISER, "learning_rate", 0.03)
    program = peer.build(TINY[kind])
    first = program.steps(1)
    assert program.parameters > 100 and np.isfinite(first) and program.steps(60) < first - 0.3


def test_generation_draws_the_tokens_of_the_workload(monkeypatch):
    program = ours.build(TINY["generation"])
    assert program.steps(2) == 0.0
    monkeypatch.setattr(sizes.Workload, "items_per_step", 41)
    with raises(RuntimeError, 39, 41):
        program.steps(1)


@pytest.mark.parametrize("W", [65, 301])
def test_the_text_has_every_token(W, tmp_path):
    ours.write_data(tmp_path, TINY["text"].changed(W=W))
    assert len(set((tmp_path / "data.txt").read_text(encoding="utf-8"))) == W
    task = ours.make_plan(TINY["text"].changed(W=W)).task
    assert task.train[0]["w_BN"].shape == (3, 5)
    assert jax.eval_shape(task.init, jax.random.key(0))["embed"]["E_WD"].shape == (W, 6)
    w_BN, target_BN = sizes.make_batches(TINY["text"].changed(W=W))[0]
    np.testing.assert_array_equal(w_BN[:, 1:], target_BN[:, :-1])


def test_the_command_writes_its_measurements(monkeypatch, tmp_path, capsys):
    row = {"M": 3, "N": 64, "attention": "flash", "trace_seconds": 0.5, "compile_seconds": 2.0}
    row |= {"temporary_bytes": 2**21, "seconds": None, "peak_bytes": None}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0")
    monkeypatch.setattr(benchmarks, "measure", lambda name, size: {"ours": {"missing": f"{name} {size.M}"}})
    monkeypatch.setattr(growth, "measure", lambda toy: [row])
    benchmarks.main(["--only", "step_a", "growth", "--try", "--json", str(tmp_path / "a.json")])
    measurements, output = json.loads((tmp_path / "a.json").read_text()), capsys.readouterr().out
    assert measurements["step_a"] == {"ours": {"missing": "step_a 2"}} and "cores" in measurements["machine"]
    assert output.splitlines()[-1].split()[3:] == ["0.5", "2", "2097152", "None", "None"]
    assert len(growth.workloads(toy=False)) == 20
