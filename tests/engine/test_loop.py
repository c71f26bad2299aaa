"""The order in which the training loop takes steps, logs, saves, stops and evaluates; memory of a resumed run."""

import contextlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.devices import compilation, mesh as meshes
from experiments.engine import loop


class Recorder:
    """A replacement for all parts of loop.Training: it records the calls in `events`."""

    def __init__(self, steps, pauses):
        self.plan = types.SimpleNamespace(steps=steps, mesh=meshes.make(data=1))
        self.saver = self.logs = self.line = self
        self.clock = types.SimpleNamespace(pauses=self.pauses, is_due=self.is_due, saves=lambda n: True, request=0)
        self.saves, self.check, self.is_stale = self, lambda: None, lambda: False
        self._pauses, self.events = pauses, []

    def measure(self):
        self.events.append("measure")

    def log(self, n, metrics):
        self.events.append(f"log {n}")
        assert metrics["loss"] == 10 * n
        return 0

    def on_failure(self, n, state, batch, metrics):
        assert metrics["loss"] == 10 * n
        self.events.append(f"failed {n} with {state}, {batch['at_B']}")

    def pauses(self, n):
        return n in self._pauses

    @contextlib.contextmanager
    def pause(self):
        self.events.append("pause")
        yield
        self.events.append("resume")

    def save(self, n, state):
        self.events.append(f"save {n} with {state}")

    def stop_if_requested(self, request):
        self.events.append("stop")

    def is_due(self, action, n):
        return action == "evaluate"

    def evaluate(self, run, n, state):
        self.events.append(f"evaluate {n} with {state}")


def events(monkeypatch, *, start, steps, pauses, fails_at=0):
    """Return the recorded calls of a loop whose step only counts. From step `fails_at` on, it changes nothing."""
    recorder = Recorder(steps, pauses)

    def step(state, batch, alive):
        recorder.events.append(f"step {state + 1}" if alive else "nothing")
        assert batch["at_B"] == state + (not alive)  # the batch belongs to this step
        loss, alive = jnp.float32(10 * (state + 1)), alive and state + 1 != fails_at
        return state + bool(alive), {"loss": loss, "alive": jnp.bool_(alive)}

    monkeypatch.setattr(loop, "evaluate", recorder.evaluate)
    data = ({"at_B": np.full(1, i)} for i in range(start, steps))
    assert loop.train(recorder, step, start, data, start=start) == (fails_at - 1 if fails_at else steps)
    return recorder.events


PAUSE = ["pause", "save {0} with {0}", "stop", "evaluate {0} with {0}", "resume"]


def pause_events(n):
    return [line.format(n) for line in PAUSE]


def test_a_step_is_logged_while_the_next_one_is_taken_and_before_a_pause(monkeypatch):
    assert events(monkeypatch, start=0, steps=5, pauses=(3, 5)) == [
        *("step 1", "measure", "step 2", "log 1", "step 3", "log 2", "log 3", *pause_events(3)),
        *("step 4", "step 5", "log 4", "log 5", *pause_events(5)),
    ]
    last = ["step 8", "measure", "step 9", "log 8", "log 9", *pause_events(9)]
    assert events(monkeypatch, start=7, steps=9, pauses=(9,)) == last
    assert events(monkeypatch, start=4, steps=4, pauses=(4,)) == []


def test_a_step_that_fails_ends_the_loop_with_the_state_and_the_batch_before_it(monkeypatch):
    begin = ["step 1", "measure", "step 2", "log 1"]
    assert events(monkeypatch, start=0, steps=5, pauses=(5,), fails_at=2) == [*begin, "nothing", "failed 2 with 1, [1]"]
    # The failed step is not saved.
    for steps in (5, 2):
        assert events(monkeypatch, start=0, steps=steps, pauses=(2,), fails_at=2) == [*begin, "failed 2 with 1, [1]"]


SIZE = 50_000  # rows of a parameter that is much larger than the others


def large_task():
    """Return the linear task with an unused large parameter, which only decays."""
    task = tiny.linear_task()

    def loss(params, batch, **options):
        return task.loss({name: params[name] for name in ("G_CD", "b_C")}, batch, **options)

    def init(key):
        return task.init(key) | {"E_WD": jax.random.normal(key, (SIZE, tiny.D))}

    return task._replace(loss=loss, init=init)


def test_a_resumed_run_never_has_two_states_in_memory(tmp_path, monkeypatch):
    """Memory is counted before the first step, which donates the state."""
    shares, train = [], loop.train
    state_bytes = 3 * SIZE * tiny.D * 4  # the large parameter and its two moments

    def count_and_train(runner, step, state, *rest, **options):
        shares.append(sum(x.nbytes for x in jax.live_arrays()) / state_bytes)
        return train(runner, step, state, *rest, **options)

    monkeypatch.setattr(loop, "train", count_and_train)
    before = sum(x.nbytes for x in jax.live_arrays()) / state_bytes
    for steps in (3, 4):
        tiny.train(tmp_path / "run", large_task(), train__steps=steps, mesh__data=1, optim__schedule="constant")
    assert len(shares) == 2 and [share - before for share in shares] == pytest.approx([1, 1], abs=0.1)


@pytest.mark.parametrize("flag", [jax.disable_jit, jax.debug_nans])
def test_jax_flags_for_debugging_apply_to_the_steps_of_a_run(tmp_path, monkeypatch, flag):
    """These flags have no effect on a step that is compiled ahead of time, so it must not be."""
    steps, task = [], tiny.linear_task()
    task = task._replace(init=lambda key: {"G_CD": np.ones((tiny.C, tiny.D), np.float32), "b_C": np.zeros(tiny.C)})

    def train(runner, step, *rest, **options):
        steps.append(step)
        raise FloatingPointError("invalid value (nan) encountered in sub\nand more")

    monkeypatch.setattr(loop, "train", train)
    with flag(True), raises(errors.RunError, "JAX_DEBUG_NANS", "invalid value (nan) encountered in sub"):
        tiny.train(tmp_path, task, train__steps=3, mesh__data=1)
    assert not isinstance(steps[0], compilation.Compiled)
