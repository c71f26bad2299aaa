"""How several processes agree and end together, seen from one of them."""

import json
import threading
import time
import types

import jax
import pytest

from experiments.engine import distributed, errors, loop, manifest


class Silent:
    """The coordination service's client, where no other process has said anything; what this one says is kept."""

    def __init__(self):
        self.told = []

    def key_value_set(self, key, value):
        self.told.append((key, json.loads(value)))

    def blocking_key_value_get(self, key, milliseconds):
        raise RuntimeError("NOT_FOUND")


def test_a_lost_process_is_said_with_what_was_seen_of_it():
    with pytest.raises(errors.RunError) as raised, distributed._loss_is_one_sentence(Silent(), 1):
        raise ValueError("UNAVAILABLE: the disk of the host is away\nand more")
    assert str(raised.value) == f"{distributed.LOST} (UNAVAILABLE: the disk of the host is away)"
    with pytest.raises(ValueError, match="a wrong shape"), distributed._loss_is_one_sentence(Silent(), 1):
        raise ValueError("a wrong shape")


def test_a_loss_ends_as_the_process_that_left_said():
    client = Silent()
    client.blocking_key_value_get = lambda key, milliseconds: json.dumps([0, 143, "stopped"])
    with pytest.raises(errors.Interrupted, match="^stopped$") as raised, distributed._loss_is_one_sentence(client, 1):
        raise ValueError("Gloo: connection closed")
    assert raised.value.code == 143
    client.blocking_key_value_get = lambda key, milliseconds: json.dumps([0, 2, "a wrong field"])
    with pytest.raises(errors.RunError, match="^process 0 stopped: a wrong field$"):
        with distributed._loss_is_one_sentence(client, 1):
            raise ValueError("Gloo: connection closed")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (manifest.Damaged("a\nb"), 2),
        (errors.UserError("a"), 2),
        (errors.RunError("a"), 1),
        (errors.Interrupted("a", 143), 143),
        (KeyboardInterrupt("a"), 130),
        (ZeroDivisionError("a"), 1),
    ],
)
def test_the_others_end_with_the_code_of_the_error(error, code, monkeypatch):
    monkeypatch.setattr(distributed, "_leaving", threading.Event())
    client = Silent()
    client.wait_at_barrier = lambda name, milliseconds: None
    distributed._tell(client, 1, type(error), error, None)
    assert client.told == [(distributed.FAILED, [1, code, "a"])]


def test_late_agreement_is_heard_one_turn_later_and_asks_for_one_save_by_the_clock(monkeypatch):
    alone = distributed.Late()
    assert [alone.agree(value) for value in (0, 7, 0)] == [0, 7, 0] and alone.asked == 0
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    made = types.SimpleNamespace(save_minutes=1.0)
    beside = types.SimpleNamespace(_made=made, _saved_at=-1e9, _wishes=distributed.Late(), due=lambda what, n: False)
    beside._saves, beside._ask = types.SimpleNamespace(check=lambda: None), lambda late: loop.Beside._ask(beside, late)
    beside.requests = types.SimpleNamespace(signal=0)
    stops = [loop.Beside.stops(beside, n) for n in (1, 2)]
    beside._saved_at = time.monotonic()  # as on_stop says it
    stops += [loop.Beside.stops(beside, n) for n in (3, 4)]
    beside.requests.signal = 15
    stops += [loop.Beside.stops(beside, n) for n in (5, 6)]
    assert stops == [False, True, False, False, False, True] and beside._wish == 15


def test_an_evaluation_of_several_processes_ends_where_all_have_heard_of_the_signal_behind_a_save(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    done = []

    def evaluate(params, between):
        for batch in range(4):
            done.append(batch)
            between()

    def heed(n):
        done.append("heeded")
        raise errors.Interrupted("", 143)

    beside = types.SimpleNamespace(requests=types.SimpleNamespace(signal=15), _evaluate=evaluate, heed=heed)
    beside._made, beside._ask = types.SimpleNamespace(save_minutes=0), lambda late: loop.Beside._ask(beside, late)
    beside._saved_at, beside._save = 0.0, lambda n, state: done.append(f"saved {n}")
    with pytest.raises(errors.Interrupted):
        loop.Beside.evaluate(beside, 6, types.SimpleNamespace(params=None))
    assert done == [0, 1, "saved 6", "heeded"] and beside._wish == 15


def test_a_process_that_did_not_come_to_its_end_leaves_at_once(monkeypatch):
    """Python's own end, with a program of JAX still under way, has crashed."""

    def at_once(code):
        raise SystemExit(f"at once: {code}")

    monkeypatch.setattr(distributed.os, "_exit", at_once)
    monkeypatch.setattr(distributed.gc, "freeze", lambda: None)
    for code, found in ((0, 0), (1, "at once: 1"), (2, "at once: 2"), (143, "at once: 143")):
        monkeypatch.setattr(distributed, "_speaks", threading.Lock())
        with pytest.raises(SystemExit) as caught:
            distributed.leave(code)
        assert caught.value.code == found
