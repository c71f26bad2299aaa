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
from experiments.folder import records
from experiments.model import baselines, probe, splits, task as tasks
from tfm import inside

N, W = 11, 29
TASKS = [task for task in synthetic.TASKS if task != "modular_addition"]  # those that draw examples


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


def induction(w_N):
    """Return the token that followed the earlier token of the same id; at the end, the one that would follow next."""
    period = w_N.index(w_N[0], 1)
    texts = w_N + [w_N[len(w_N) % period]]
    return [texts[n + 1] if w_N[n] in w_N[:n] else None for n in range(len(w_N))]


REFERENCE = {rule.__name__: rule for rule in (ring, previous, reachability, beats, membership, nearest, induction)}


def fetch_of(task, *, N=N, W=W):
    """Return the function that fetches the training examples of a task, and the held-out ones without a generator."""
    (fetch, n), (held_out, n_held_out) = synthetic.TASKS[task].split(N, W)
    assert fetch is held_out and (n, n_held_out) == (synthetic.EPOCH, synthetic.EVALUATION)
    return fetch


@pytest.mark.parametrize("task", TASKS)
def test_targets_equal_those_of_plain_loops(task):
    fetch = fetch_of(task)
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
    return fetch_of(task, **sizes)(np.arange(n), np.random.default_rng(1))


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


def test_the_period_of_induction_is_random_and_its_tokens_differ():
    batch = draw("induction", N=16, W=32)
    is_target_BN = batch["weight_BN"] > 0
    period_B = np.sum(~is_target_BN, axis=1)
    count_T = np.bincount(period_B, minlength=10)
    assert count_T[:4].sum() == count_T[9:].sum() == 0 and abs(count_T[4:9] - 400).max() < 5 * math.sqrt(400)
    for w_N, T in zip(batch["w_BN"], period_B, strict=True):
        assert len(set(w_N)) == T and (w_N[T:] == w_N[:-T]).all()
    count_W = np.bincount(batch["w_BN"][:, 0], minlength=32)
    assert abs(count_W - 2000 / 32).max() < 5 * math.sqrt(2000 / 32)


def test_modular_addition_splits_all_pairs_between_training_and_held_out_examples():
    P, pairs, shares = 11, [], []
    for fetch, n in synthetic.TASKS["modular_addition"].split(3, P + 1):
        batch = fetch(np.arange(n), None)
        assert [array.dtype for array in batch.values()] == [np.int32, np.int32, np.float32]
        for (a, b, equals), target_N in zip(batch["w_BN"].tolist(), batch["target_BN"].tolist(), strict=True):
            assert equals == P and target_N[-1] == (a + b) % P
        assert (batch["weight_BN"] == [0, 0, 1]).all()
        pairs += [(a, b) for a, b, _ in batch["w_BN"].tolist()]
        shares.append(n / P**2)
    assert sorted(pairs) == [(a, b) for a in range(P) for b in range(P)] != pairs  # each once, in random order
    assert shares == pytest.approx([synthetic.SHARE, 1 - synthetic.SHARE], abs=0.5 / P**2)
    task = task_of(synthetic__task=f"modular_addition:{P}")
    trained = np.concatenate([task.train[step]["w_BN"] for step in range(40)])
    assert {(a, b) for a, b, _ in trained.tolist()} == set(pairs[: round(synthetic.SHARE * P**2)])
    assert sum(batch["weight_BN"].sum() for batch in task.evaluation) == P**2 - round(synthetic.SHARE * P**2)


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
        ("modular_addition", [5, 0, W - 1], ["5", "0", "="]),
    ],
)
def test_tokens_have_readable_texts(task, w_N, texts):
    assert synthetic.spell(task, np.array(w_N), N=3, W=W) == texts


@pytest.mark.parametrize("task", TASKS)
def test_training_examples_depend_on_seed_and_step_and_evaluation_examples_on_their_index(task):
    fetch = fetch_of(task, N=24)
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
    "task", ["rong", "ring:2", "previous:1", "nearest:0", "ring:1025", "induction:7", "modular_addition:1"]
)
def test_an_unknown_task_and_numbers_that_are_too_small_or_too_large_are_refused(task):
    name, _, number = task.partition(":")
    with raises(errors.UserError, task, f"as in {name}:" if number else "ring"):
        synthetic.parse(task)


def test_a_norm_over_the_sequence_is_refused_if_later_tokens_are_hidden():
    settings = tiny.settings("synthetic", synthetic__task="ring_causal", model__norm="layer_sequence")
    with raises(errors.UserError, "model.norm = layer_sequence"):
        synthetic_task.prepare(settings, meshes.make(data=1))


def task_of(**changes):
    return synthetic_task.prepare(tiny.settings("synthetic", **changes), meshes.make(data=1)).task


def test_the_name_of_a_task_can_have_its_number_of_tokens():
    assert synthetic.parse("ring") == ("ring", 12, 24, False) and synthetic.parse("ring_causal:8") == (
        "ring",
        8,
        16,
        True,
    )
    assert synthetic.parse("induction") == ("induction", 32, 64, True) == synthetic.parse("induction_causal")
    assert synthetic.parse("modular_addition:7") == ("modular_addition", 3, 8, True)
    assert task_of(synthetic__task="nearest:7").train[0]["w_BN"].shape == (16, 7)
    for name in ("ring:", "ring:x", "ring:-3", "ring:8:9", "ring:8_causal"):
        with raises(errors.UserError, f"synthetic.task = {name}"):
            synthetic.parse(name)


def test_the_baseline_is_the_most_frequent_target(monkeypatch):
    monkeypatch.setattr(splits, "TOKENS", 200 * 12)
    task = task_of(synthetic__task="reachability", train__batch_size=200)
    batch = fetch_of("reachability", N=12, W=24)(np.arange(512), None)
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
    assert [file.name for file in files] == ["loss.png", "accuracy.png", "attention.png"]


def test_the_probe_of_induction_scores_each_head(tmp_path):
    """The scores are mean attention weights on texts that repeat, here summed in plain loops."""
    work = tiny.work_of(tiny.settings("synthetic", synthetic__task="induction:9"))
    params, period = tiny.draw_params(work.task), 4
    w_BN = np.asarray(inside.draw_repeated(jax.random.key(0), W=18, B=probe.TEXTS, period=period))
    A_MBHNN = np.asarray(tasks.look(work, params, {"w_BN": w_BN}, ("A",))["A"], np.float64)
    scores, tokens = work.task.probe(params), range(2 * period)
    assert "symmetry/1" in scores and sum(name.startswith("heads/") for name in scores) == 2 * 2 * 2
    for m, h in np.ndindex(2, 2):
        previous = np.mean([A_MBHNN[m, :, h, n, n - 1].mean() for n in tokens[1:]])
        induction = np.mean([A_MBHNN[m, :, h, n, n - period + 1].mean() for n in tokens[period:]])
        assert scores[f"heads/previous/{m + 1}.{h + 1}"] == pytest.approx(previous, rel=1e-4)
        assert scores[f"heads/induction/{m + 1}.{h + 1}"] == pytest.approx(induction, rel=1e-4)
    assert not any("heads" in name for name in task_of(synthetic__task="previous_causal").probe(params))
    constant = task_of(synthetic__task="induction:9", model__score="constant").probe  # it has no bilinear form
    assert {name.split("/")[0] for name in jax.eval_shape(constant, params)} == {"heads"}


def test_a_run_of_induction_logs_the_scores_and_draws_those_of_the_best_heads(tmp_path):
    changes = {"synthetic__task": "induction:8", "mesh__data": 1, "train__log_every": 2, "model__M": 1}
    config = tiny.config_file(tmp_path, "synthetic", log=["symmetry"], **tiny.MODEL | tiny.TRAIN | changes)
    outcome = tiny.run("--config", config, "--workdir", str(tmp_path / "run"))
    assert outcome.code == 0 and (tmp_path / "run" / "figures" / "accuracy.png").is_file()
    rows = [row for row in records.read_metrics(tmp_path / "run") if "heads/previous/1.2" in row]
    assert [row["step"] for row in rows] == [2, 4, 5] and len({row["heads/previous/1.2"] for row in rows}) == 3
    rows = [
        {"step": 1, "heads/previous/1.2": 0.9, "heads/previous/1.1": 0.1},
        {"step": 2, "heads/previous/1.2": 0.1, "heads/previous/1.1": 0.9}
        | {"heads/induction/2.1": None, "heads/induction/2.2": 0.1},  # null in the log: not a number
        {"step": 2, "eval/accuracy": 0.5},
    ]
    labels = probe.choose_heads(rows)
    assert [*labels] == ["heads/previous/1.1", "heads/induction/2.2"] and "head 1.1" in labels["heads/previous/1.1"]
    assert probe.choose_heads(rows[2:]) == {}
