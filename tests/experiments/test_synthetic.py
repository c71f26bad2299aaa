"""Synthetic tasks: their targets against plain loops, their random examples, and their model."""

import math

import jax
import numpy as np
import pytest
import tiny
from errors import raises

from experiments import synthetic as synthetic_task
from experiments.config import errors
from experiments.data import synthetic
from experiments.devices import mesh as meshes
from experiments.engine import batches
from experiments.model import baselines, splits, task as tasks

N, W = 11, 29
TASKS = list(synthetic.TASKS)


def ring(w_N):
    """Return the tokens before; the token before the first is the last."""
    return [w_N[n - 1] for n in range(len(w_N))]


def previous(w_N):
    return [None] + [w_N[n - 1] for n in range(1, len(w_N))]


def reachability(w_N):
    size = len(w_N)
    sources = [n for n in range(size) if w_N[n] >= size]
    reached_nodes = {w_N[source] % size for source in sources}
    return [None if n in sources else int(n in reached_nodes) for n in range(size)]


def beats(w_N):
    """Return the payload of the kind that loses. Rock, scissors and paper are 0, 1, 2, each with W // 3 payloads."""
    payloads = W // 3
    payload_of = {w // payloads: w % payloads for w in w_N}
    beaten_by = {"rock": "scissors", "scissors": "paper", "paper": "rock"}
    kinds = ["rock", "scissors", "paper"]
    return [payload_of[kinds.index(beaten_by[kinds[w // payloads]])] for w in w_N]


def membership(w_N):
    half = len(w_N) // 2
    return [None] * half + [int(w in w_N[:half]) for w in w_N[half:]]


def nearest(w_N):
    """Return the payload of the nearest other token with the same key, or None if there are none or several."""
    payloads = math.floor(math.sqrt(W))
    targets = []
    for n in range(len(w_N)):
        same = [s for s in range(len(w_N)) if s != n and w_N[s] // payloads == w_N[n] // payloads]
        best = [s for s in same if abs(s - n) == min(abs(s_other - n) for s_other in same)]
        targets.append(w_N[best[0]] % payloads if len(best) == 1 else None)
    return targets


REFERENCE = {rule.__name__: rule for rule in (ring, previous, reachability, beats, membership, nearest)}


@pytest.mark.parametrize("task", TASKS)
def test_targets_equal_those_of_plain_loops(task):
    fetch = synthetic.examples(task, N=N, W=W)
    for rng in (None, np.random.default_rng(0)):
        batch = fetch(np.arange(101), rng)
        assert [*batch] == ["w_BN", "target_BN", "weight_BN"]
        assert [array.dtype for array in batch.values()] == [np.int32, np.int32, np.float32]
        assert all(array.shape == (101, N) for array in batch.values())
        for name in ("w_BN", "target_BN"):
            assert batch[name].min() >= 0 and batch[name].max() < W
        for w_N, target_N, weight_N in zip(*(batch[name].tolist() for name in batch), strict=True):
            targets = REFERENCE[task](w_N)
            assert weight_N == [float(answer is not None) for answer in targets]
            expected = [answer for answer in targets if answer is not None]
            assert [t for t, weight in zip(target_N, weight_N, strict=True) if weight] == expected


def draw(task, *, n=2000, **sizes):
    return synthetic.examples(task, **({"N": N, "W": W} | sizes))(np.arange(n), np.random.default_rng(1))


@pytest.mark.parametrize(("task", "n_tokens"), [("ring", W), ("previous", W), ("membership", W), ("nearest", 25)])
def test_tokens_are_equally_likely_at_every_position(task, n_tokens):
    w_BN = draw(task)["w_BN"]
    count_NW = np.array([np.bincount(w_N, minlength=W) for w_N in w_BN.T])
    assert (count_NW[:, n_tokens:] == 0).all()
    assert abs(count_NW[:, :n_tokens] - 2000 / n_tokens).max() < 5 * math.sqrt(2000 / n_tokens)


def test_about_half_of_the_nodes_are_reached_and_edges_lead_to_any_other_node():
    batch = draw("reachability")
    is_target_BN = batch["weight_BN"] > 0
    assert abs(batch["target_BN"][is_target_BN].mean() - 0.5) < 0.03  # one half assumes that paths do not meet
    assert 0.2 < is_target_BN.mean() < 0.9
    for n, pointer_B in enumerate(batch["w_BN"].T % N):
        count_N = np.bincount(pointer_B, minlength=N)
        assert count_N[n] == 0 and abs(np.delete(count_N, n) - 200).max() < 5 * math.sqrt(200)


@pytest.mark.parametrize("size", [3, N])
def test_all_three_kinds_of_beats_occur_and_have_one_payload_each(size):
    w_BN = draw("beats", N=size, n=500)["w_BN"]
    for w_N in w_BN:
        assert {w // (W // 3) for w in w_N} == {0, 1, 2} and len(set(w_N)) == 3
    # Every kind occurs at every position.
    count_NC = np.array([np.bincount(w_N // (W // 3), minlength=3) for w_N in w_BN.T])
    assert abs(count_NC - 500 / 3).max() < 5 * math.sqrt(500 / 3)
    payload_BN = w_BN % (W // 3)
    assert set(payload_BN.ravel()) == set(range(W // 3))


def test_half_of_the_queried_tokens_are_members_and_members_differ():
    batch = draw("membership")
    is_target_BN = batch["weight_BN"] > 0
    assert abs(batch["target_BN"][is_target_BN].mean() - 0.5) < 0.02
    assert all(len(set(w_N)) == N // 2 for w_N in batch["w_BN"][:, : N // 2].tolist())
    texts = synthetic.spell("membership", batch["w_BN"][0], N=N, W=W)
    assert [word.endswith("?") for word in texts] == list(np.arange(N) >= N // 2)


@pytest.mark.parametrize(
    ("task", "w_N", "texts"),
    [
        ("reachability", [1, 5, 0], ["0→1", "1→2 source", "2→0"]),
        ("beats", [0, 10, 26], ["r0", "s1", "p8"]),
        ("nearest", [0, 7, 24], ["0:0", "1:2", "4:4"]),
    ],
)
def test_tokens_have_readable_texts(task, w_N, texts):
    assert synthetic.spell(task, np.array(w_N), N=3, W=W) == texts


@pytest.mark.parametrize("task", TASKS)
def test_training_examples_depend_on_seed_and_step_and_evaluation_examples_on_their_index(task):
    fetch = synthetic.examples(task, N=N, W=W)
    first, second, other_seed = (batches.train(fetch, n=synthetic.EPOCH, batch=16, seed=seed) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first[5], second[5])
    held_out, rows_BN = batches.evaluation(fetch, n=13, batch=16)[0], fetch(np.arange(13), None)["w_BN"]
    np.testing.assert_array_equal(held_out["w_BN"][:13], rows_BN)
    assert not held_out["weight_BN"][13:].any() and (held_out["w_BN"][13:] == rows_BN[12]).all()
    np.testing.assert_array_equal(fetch(np.array([7, 2, 7]), None)["w_BN"], rows_BN[[7, 2, 7]])
    parts = [first[0]["w_BN"], first[1]["w_BN"], other_seed[0]["w_BN"], rows_BN]
    examples = [tuple(w_N) for w_BN in parts for w_N in w_BN.tolist()]
    assert len(set(examples)) == len(examples) == 3 * 16 + 13


@pytest.mark.parametrize(
    ("task", "tokens"), [("rong", N), ("ring", 2), ("previous", 1), ("nearest", 0), ("ring", 1025)]
)
def test_an_unknown_task_and_too_few_or_too_many_tokens_are_refused(task, tokens):
    with raises(errors.UserError, task, *([tokens] if tokens != N else ["ring"])):
        synthetic.examples(task, N=tokens, W=W)


def test_a_norm_over_the_sequence_is_refused_if_later_tokens_are_hidden():
    settings = tiny.settings("synthetic", synthetic__task="ring_causal", model__norm="layer_sequence")
    with raises(errors.UserError, "model.norm = layer_sequence"):
        synthetic_task.prepare(settings, meshes.make(data=1))


def task_of(**changes):
    return synthetic_task.prepare(tiny.settings("synthetic", **changes), meshes.make(data=1)).task


def test_the_name_of_a_task_can_have_its_number_of_tokens():
    assert [*map(synthetic_task.parse, ("ring", "ring_causal:8"))] == [("ring", False, 12), ("ring", True, 8)]
    assert task_of(synthetic__task="nearest:7").train[0]["w_BN"].shape == (16, 7)
    for name in ("ring:", "ring:x", "ring:-3", "ring:8:9", "ring:8_causal"):
        with raises(errors.UserError, f"synthetic.task = {name}"):
            synthetic_task.parse(name)


def test_the_baseline_is_the_most_frequent_target(monkeypatch):
    monkeypatch.setattr(splits, "TOKENS", 200 * 12)
    task = task_of(synthetic__task="reachability", train__batch_size=200)
    batch = synthetic.examples("reachability", N=12, W=24)(np.arange(512), None)
    reached_share = batch["target_BN"][batch["weight_BN"] > 0].mean()
    assert (
        tiny.baseline(task) == {"accuracy": pytest.approx(max(reached_share, 1 - reached_share))}
        and reached_share != 0.5
    )
    assert task.tokens_per_example == 12 and len(task.evaluation) == 3
    empty = [{"target_BN": np.ones((1, 2), int), "weight_BN": np.zeros((1, 2))}]
    with raises(errors.UserError):
        baselines.guess_token(empty, W=3)


def test_predictions_depend_on_later_tokens_unless_the_task_is_causal():
    losses = {}
    for causal in (True, False):
        work = tiny.work_of(tiny.settings("synthetic", synthetic__task="ring_causal" if causal else "ring", model__M=1))
        task = work.task
        params, measure = tiny.draw_params(task), tiny.measure(task)
        batch = dict(task.train[0])
        batch["weight_BN"] = np.float32(np.arange(12) < 5) * batch["weight_BN"]
        other_BN = np.where(np.arange(12) == 7, (batch["w_BN"] + 1) % 24, batch["w_BN"])
        losses[causal] = [float(measure(params, batch | w, None)["loss"][0]) for w in ({}, {"w_BN": other_BN})]
        A_MBHNS = np.asarray(tasks.look(work, params, {"w_BN": batch["w_BN"][:3]}, ("A",))["A"])
        assert A_MBHNS.shape == (1, 3, 2, 12, 12)
        assert (np.triu(A_MBHNS, 1) == 0).all() == causal
    assert losses[True][0] == losses[True][1] and losses[False][0] != losses[False][1]


def test_the_figures_are_drawn_with_the_tokens_of_the_task(tmp_path):
    settings = tiny.settings("synthetic", synthetic__task="previous_causal", model__M=1, mesh__data=1)
    _, (files, _), _ = tiny.make_figures(settings, tmp_path, [{"step": 1, "train/loss": 2.0}])
    assert [file.name for file in files] == ["loss.png", "attention.png"]
