"""A batch is a function of (seed, step), an evaluation sees everything once, and windows say what they promise."""

import subprocess
import sys

import grain
import hypothesis
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st

from experiments.data import windows
from experiments.engine import batches, errors

SIZES = st.tuples(st.integers(1, 41), st.integers(1, 41)).map(sorted)  # batch <= n


def numbers(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
    """Each example is its own number; the draw shows what the generator depends on."""
    draw_B = np.zeros(len(index_B)) if rng is None else rng.random(len(index_B))
    return {"index_B": index_B, "draw_B": draw_B, "weight_B": np.ones(len(index_B), np.float32)}


def same(first: batches.Batch, second: batches.Batch) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@hypothesis.given(SIZES, st.integers(0, 2**32 - 1), st.integers(0, 3))
@hypothesis.settings(deadline=None, max_examples=12)
def test_an_epoch_has_every_example_once(sizes, seed, epoch):
    batch, n = sizes
    dataset = batches.train(numbers, n=n, batch=batch, seed=seed)
    first, last = epoch * n // batch, (epoch + 1) * n // batch
    seen = np.concatenate([dataset[step]["index_B"] for step in range(first, last + 1)])
    start = epoch * n - first * batch  # an epoch begins and ends inside a batch
    assert sorted(seen[start : start + n]) == list(range(n))


def test_a_batch_depends_on_seed_and_step_alone():
    first, second, other = (batches.train(numbers, n=23, batch=23, seed=seed) for seed in (7, 7, 8))
    backwards = {step: second[step] for step in (1000, 11, 4, 0)}
    assert all(same(first[step], batch) for step, batch in backwards.items())
    every = [dataset[step] for dataset in (first, other) for step in (0, 1, 4, 1000)]
    for name in ("index_B", "draw_B"):  # epochs and seeds have orders of their own, and random numbers
        assert len({tuple(batch[name]) for batch in every} | {tuple(range(23))}) == 9
    assert len(first) > 10**12


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"n": 4, "batch": 5}, ["train.batch_size = 5", "4 examples"]),
        ({"batch": 0}, ["batch", "0"]),
        ({"batch": 2**60}, ["train.batch_size", "23 examples"]),  # not that memory is too small
        ({"growth": [[5, 24]]}, ["train.growth = 24", "23 examples"]),
        ({"n": 0, "batch": 1}, ["examples", "0"]),
    ],
)
def test_training_refuses_what_makes_no_batch(wrong, words):
    with raises(errors.UserError, *words):
        batches.train(numbers, **({"n": 23, "batch": 4, "seed": 0} | wrong))
    assert batches.train(numbers, n=5, batch=5, seed=2**32 - 1)[0]["index_B"].shape == (5,)
    assert len(batches.train(numbers, n=23, batch=4, seed=0, growth=[[5, 23]])[5]["index_B"]) == 23


GROWTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 13)), min_size=1, max_size=3)  # steps between, size


@hypothesis.given(GROWTHS, st.integers(1, 13), st.integers(13, 41), st.integers(0, 2**32 - 1))
@hypothesis.settings(deadline=None, max_examples=6)
def test_if_batches_grow_the_stream_of_examples_goes_on(gaps, batch, n, seed):
    """The concatenated examples are those of batches of one; each batch has its size and its examples' indices."""
    pairs, expected, step = [], [], 0
    for steps, size in gaps:
        expected += [pairs[-1][1] if pairs else batch] * steps
        step += steps
        pairs.append([step, size])
    expected += [pairs[-1][1]] * 5
    dataset = batches.train(numbers, n=n, batch=batch, seed=seed, growth=pairs)
    parts = [dataset[step] for step in range(len(expected))]
    assert [len(part["index_B"]) for part in parts] == expected
    ones = batches.train(numbers, n=n, batch=1, seed=seed)
    joined = np.concatenate([part["index_B"] for part in parts])
    assert joined.tolist() == [int(ones[i]["index_B"][0]) for i in range(sum(expected))]
    for epoch in range(len(joined) // n):
        assert sorted(joined[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert all(np.array_equal(part["example_B"], part["index_B"]) for part in parts)
    assert {part["example_B"].dtype for part in parts} == {np.dtype(np.int32)}
    late = batches.iterate(dataset, start=gaps[0][0])
    assert all(same(next(late), dataset[gaps[0][0] + i]) for i in range(5))  # starting at the change


def test_a_batch_is_that_of_a_plain_pipeline_until_it_grows():
    seed = 2**32 - 1
    plain = grain.MapDataset.range(23).seed(seed).shuffle().repeat().batch(5).random_map(numbers)
    never = batches.train(numbers, n=23, batch=5, seed=seed)
    later = batches.train(numbers, n=23, batch=5, seed=seed, growth=[[13, 11]])
    for step in (0, 1, 4, 5, 12, 13, 10**9):
        expected = plain[step] | {"example_B": plain[step]["index_B"]}
        assert same(never[step], expected) and same(later[step], expected) == (step < 13)
    assert len({tuple(later[step]["draw_B"]) for step in (12, 13, 14)}) == 3


WRONG = [[[5, 8], [5, 9]], [[5, 8], [4, 9]], [[0, 8]], [[-1, 8]], [[5, 0]], [[5, -8]]]
WRONG += [[pair] for pair in (5, [5], [5, 8, 9], [5, 8.0], ["5", 8], [True, 8], None, {"5": 8, "6": 9}, [], "58")]


@pytest.mark.parametrize("pairs", WRONG)
def test_an_invalid_growth_is_refused(pairs):
    with raises(errors.UserError, "train.growth", repr(pairs[-1])):
        batches.train(numbers, n=41, batch=4, seed=0, growth=pairs)


@hypothesis.given(st.integers(1, 41), st.integers(1, 13))
@hypothesis.settings(deadline=None, max_examples=12)
def test_evaluation_has_every_example_once_in_order(n, batch):
    dataset = batches.evaluation(numbers, n=n, batch=batch)
    parts = [dataset[step] for step in range(len(dataset))]
    assert len(parts) == -(-n // batch)
    assert all(part["index_B"].shape == (batch,) for part in parts)
    weight = np.concatenate([part["weight_B"] for part in parts])
    index = np.concatenate([part["index_B"] for part in parts])
    assert list(index[weight == 1]) == list(range(n))
    assert weight.sum() == n and weight.dtype == np.float32
    assert (index[weight == 0] == n - 1).all()


def test_evaluation_zeroes_only_weights_and_never_the_arrays_of_fetch():
    owned = np.ones((5, 3), np.float32)

    def fetch(index_B, rng):
        assert rng is None
        return {"weight_BN": owned, "w_BN": owned}

    last = batches.evaluation(fetch, n=7, batch=5)[1]
    assert last["weight_BN"].tolist() == [[1] * 3] * 2 + [[0] * 3] * 3
    assert last["w_BN"].all() and owned.all()
    with raises(errors.UserError, "examples", "0"):
        batches.evaluation(fetch, n=0, batch=5)


@pytest.mark.parametrize("start", [0, 4, 10**9])  # nine batches of 5 reach into another epoch of 23
def test_iterating_starts_anywhere_and_ends_with_a_finite_set(start):
    dataset = batches.train(numbers, n=23, batch=5, seed=3)
    iterator = batches.iterate(dataset, start=start)
    assert all(same(next(iterator), dataset[start + step]) for step in range(9))
    dataset = batches.evaluation(numbers, n=23, batch=5)
    assert [batch["index_B"][0] for batch in batches.iterate(dataset, start=2)] == [10, 15, 20]
    assert list(batches.iterate(dataset, start=5)) == []


def test_an_interpreter_ends_quietly_in_the_middle_of_prefetching():
    program = """
import sys, time
import numpy as np
from experiments.engine import batches

def fetch(index_B, rng):
    time.sleep(0.05)
    return {"index_B": index_B}

iterator = batches.iterate(batches.train(fetch, n=23, batch=5, seed=0), start=3)
next(iterator)
sys.exit(7)
"""
    ended = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    noise = [line for line in ended.stderr.splitlines() if "Grain multiprocess worker profiling" not in line]
    assert (ended.returncode, ended.stdout, noise) == (7, "", [])


# Windows.

TOKENS = st.integers(2, 13).flatmap(lambda N: st.tuples(st.just(N), st.integers(N + 1, 61)))  # N, T


@hypothesis.given(TOKENS)
@hypothesis.settings(deadline=None, max_examples=25)
def test_causal_training_windows_start_anywhere(sizes):
    N, T = sizes
    token_T = np.arange(T, dtype=np.int32) * 3
    fetch, n = windows.causal(token_T, N=N)
    assert n == T - N
    batch = fetch(np.arange(n), np.random.default_rng(0))
    assert {name: array.dtype for name, array in batch.items()} == {
        "w_BN": np.int32, "target_BN": np.int32, "weight_BN": np.float32,
    }  # fmt: skip
    for start in range(n):
        assert batch["w_BN"][start].tolist() == token_T[start : start + N].tolist()
        assert batch["target_BN"][start].tolist() == token_T[start + 1 : start + N + 1].tolist()
    assert (batch["weight_BN"] == 1).all() and batch["weight_BN"].shape == (n, N)


@hypothesis.given(TOKENS, st.integers(1, 7), st.integers(0, 9))
@hypothesis.settings(deadline=None, max_examples=50)
def test_causal_evaluation_predicts_every_token_except_the_first_once(sizes, batch, stride):
    """Overlapping windows give each target more preceding tokens."""
    N, T = sizes
    token_T = np.arange(T, dtype=np.int32)
    fetch, n = windows.causal(token_T, N=N, evaluation=True, stride=stride)
    dataset = batches.evaluation(fetch, n=n, batch=batch)
    arrays = [dataset[step] for step in range(len(dataset))]
    targets = [part["target_BN"][part["weight_BN"] == 1] for part in arrays]
    inputs = [part["w_BN"][part["weight_BN"] == 1] for part in arrays]
    assert np.concatenate(targets).tolist() == list(range(1, T))
    assert np.concatenate(inputs).tolist() == list(range(T - 1))
    assert all(set(np.unique(part["weight_BN"])) <= {0, 1} for part in arrays)
    first = np.concatenate([part["w_BN"][:, 0] for part in arrays])[:n]
    assert first.tolist() == [i * (stride if 0 < stride < N else N) for i in range(n)]


@pytest.mark.parametrize("evaluation", [False, True])
def test_masking_follows_the_rule_and_leaves_special_tokens_alone(evaluation):
    T, N, special, mask_id, rate = 40_009, 31, {0, 3, 9, 12}, 12, 0.15
    token_T = np.random.default_rng(1).integers(0, 12, T).astype(np.int32)
    fetch, n = windows.masked(token_T, N=N, W=13, special=special, mask_id=mask_id, evaluation=evaluation)
    assert n == (-(-T // N) if evaluation else T - N + 1)
    window_B = np.arange(T // N)
    batch = fetch(window_B, None) if evaluation else fetch(window_B * N, np.random.default_rng(2))
    w, target, hidden = batch["w_BN"], batch["target_BN"], batch["weight_BN"] == 1
    assert (target == token_T[window_B[:, None] * N + np.arange(N)]).all()
    assert (w[~hidden] == target[~hidden]).all() and (batch["weight_BN"][~hidden] == 0).all()
    assert batch["valid_BS"].all() and batch["valid_BS"].dtype == bool
    assert (w.dtype, target.dtype, batch["weight_BN"].dtype) == (np.int32, np.int32, np.float32)
    ordinary = ~np.isin(target, [*special])
    assert not ordinary.all() and not hidden[~ordinary].any()
    # Shares within five standard deviations of a binomial.
    count, total = hidden.sum(), ordinary.sum()
    assert abs(count / total - rate) < 5 * np.sqrt(rate * (1 - rate) / total)
    other_share = 0.1 * 8 / 9  # a random one of nine ordinary tokens is the same token once in nine times
    for place, share in (
        (w[hidden] == mask_id, 0.8),
        ((w[hidden] != mask_id) & (w[hidden] != target[hidden]), other_share),
        (w[hidden] == target[hidden], 0.2 - other_share),
    ):
        assert abs(place.mean() - share) < 5 * np.sqrt(share * (1 - share) / count)
    assert {*w[hidden & (w != mask_id) & (w != target)].tolist()} == {*range(12)} - special


@hypothesis.given(TOKENS, st.integers(1, 7), st.integers(1, 7))
@hypothesis.settings(deadline=None, max_examples=12)
def test_masked_evaluation_has_every_token_once_and_is_the_same_for_every_batch_size(sizes, first, second):
    N, T = sizes
    token_T = np.arange(T, dtype=np.int32)
    fetch, n = windows.masked(token_T, N=N, W=T + 2, special={T + 1}, mask_id=T + 1, evaluation=True)

    def everything(batch):
        dataset = batches.evaluation(fetch, n=n, batch=batch)
        parts = [dataset[step] for step in range(len(dataset))]
        return {name: np.concatenate([part[name] for part in parts])[:n] for name in parts[0]}

    one, other = everything(first), everything(second)
    assert same(one, other)
    assert one["target_BN"][one["valid_BS"]].tolist() == list(range(T))
    assert not one["weight_BN"][~one["valid_BS"]].any()


CUTS = [(windows.causal, {}, 1), (windows.masked, {"W": 257, "special": {256}, "mask_id": 256}, 0)]


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize(("cut", "options", "more"), CUTS)
def test_windows_take_small_integers_and_refuse_too_few_tokens(cut, options, more, evaluation):
    """[MASK] may be an id that the small integers cannot hold."""
    token_T = np.random.default_rng(0).integers(0, 256, 61)
    fetch, n = cut(token_T.astype(np.int32), N=7, evaluation=evaluation, **options)
    expected = fetch(np.arange(n), None)
    for kind in (np.uint8, np.uint16):
        fetch, m = cut(token_T.astype(kind), N=7, evaluation=evaluation, **options)
        batch = fetch(np.arange(m), None)
        assert n == m and same(batch, expected) and all(batch[name].dtype == expected[name].dtype for name in batch)
    with raises(errors.UserError, "5 tokens", 6):
        cut(token_T[:5], N=6 - more, evaluation=evaluation, **options)
    assert cut(token_T[:6], N=6 - more, evaluation=evaluation, **options)[1] == 1


def test_masked_evaluation_hides_different_places_in_different_windows():
    token_T = np.zeros(7 * 31, np.int32)
    fetch, n = windows.masked(token_T, N=31, W=3, special={2}, mask_id=2, evaluation=True)
    batch = fetch(np.arange(n), None)
    assert len({row.tobytes() for row in batch["weight_BN"]}) == n == 7
