"""A batch is a function of (seed, step), an evaluation has every example once, and windows cover the text."""

import subprocess
import sys

import grain
import hypothesis
import numpy as np
import pytest
from errors import raises
from hypothesis import strategies as st

from experiments.config import errors
from experiments.data import windows
from experiments.engine import batches

SIZES = st.tuples(st.integers(1, 41), st.integers(1, 41)).map(sorted)  # batch <= n


def fetch_numbers(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
    """Return examples that are their own index, and random numbers that show what the generator depends on."""
    draw_B = np.zeros(len(index_B)) if rng is None else rng.random(len(index_B))
    return {"index_B": index_B, "draw_B": draw_B, "weight_B": np.ones(len(index_B), np.float32)}


def are_equal(first: batches.Batch, second: batches.Batch) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@hypothesis.given(SIZES, st.integers(0, 2**32 - 1), st.integers(0, 3))
@hypothesis.settings(deadline=None, max_examples=12)
def test_an_epoch_has_every_example_once(sizes, seed, epoch):
    batch, n = sizes
    dataset = batches.train(fetch_numbers, n=n, batch=batch, seed=seed)
    first, last = epoch * n // batch, (epoch + 1) * n // batch
    index_T = np.concatenate([dataset[step]["index_B"] for step in range(first, last + 1)])
    start = epoch * n - first * batch  # an epoch can begin and end inside a batch
    assert sorted(index_T[start : start + n]) == list(range(n))


def test_a_batch_depends_on_seed_and_step_alone():
    first, second, other_seed = (batches.train(fetch_numbers, n=23, batch=23, seed=seed) for seed in (7, 7, 8))
    backwards = {step: second[step] for step in (1000, 11, 4, 0)}
    assert all(are_equal(first[step], batch) for step, batch in backwards.items())
    all_batches = [dataset[step] for dataset in (first, other_seed) for step in (0, 1, 4, 1000)]
    for name in ("index_B", "draw_B"):  # each epoch and seed has another order and other random numbers
        assert len({tuple(batch[name]) for batch in all_batches} | {tuple(range(23))}) == 9
    assert len(first) > 10**12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": 4, "batch": 5}, ["train.batch_size = 5", "4 examples"]),
        ({"batch": 0}, ["batch", "0"]),
        ({"batch": 2**60}, ["train.batch_size", "23 examples"]),  # the error is about the batch size, not about memory
        ({"growth": [[5, 24]]}, ["train.growth = 24", "23 examples"]),
        ({"n": 0, "batch": 1}, ["examples", "0"]),
    ],
)
def test_training_refuses_sizes_that_make_no_batch(changes, words):
    with raises(errors.UserError, *words):
        batches.train(fetch_numbers, **({"n": 23, "batch": 4, "seed": 0} | changes))
    assert batches.train(fetch_numbers, n=5, batch=5, seed=2**32 - 1)[0]["index_B"].shape == (5,)
    assert len(batches.train(fetch_numbers, n=23, batch=4, seed=0, growth=[[5, 23]])[5]["index_B"]) == 23


# Each item is (steps until the change, new size).
GROWTHS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 11)), min_size=1, max_size=3)


@hypothesis.given(GROWTHS, st.integers(1, 11), st.integers(11, 23), st.integers(0, 2**32 - 1))
@hypothesis.settings(deadline=None, max_examples=4)
def test_if_batches_grow_the_order_of_the_examples_stays(gaps, batch, n, seed):
    """The concatenated batches are the same examples in the same order as batches of a constant size."""
    sizes = [batch, *(size for _, size in gaps)]
    hypothesis.assume(all(map(int.__ne__, sizes, sizes[1:])))  # the same size again is refused
    pairs, expected, step = [], [], 0
    for steps, size in gaps:
        expected += [pairs[-1][1] if pairs else batch] * steps
        step += steps
        pairs.append([step, size])
    expected += [pairs[-1][1]] * 3
    dataset = batches.train(fetch_numbers, n=n, batch=batch, seed=seed, growth=pairs)
    parts = [dataset[step] for step in range(len(expected))]
    assert [len(part["index_B"]) for part in parts] == expected
    constant, total = batches.train(fetch_numbers, n=n, batch=batch, seed=seed), sum(expected)
    examples = np.concatenate([part["index_B"] for part in parts])
    same_order = np.concatenate([constant[i]["index_B"] for i in range(-(-total // batch))])
    assert examples.tolist() == same_order[:total].tolist()
    for epoch in range(len(examples) // n):
        assert sorted(examples[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert all(np.array_equal(part["example_B"], part["index_B"]) for part in parts)
    assert {part["example_B"].dtype for part in parts} == {np.dtype(np.int32)}
    iterator = batches.iterate(dataset, start=gaps[0][0])
    # This is true also if a run starts at the change of size.
    assert all(are_equal(next(iterator), dataset[gaps[0][0] + i]) for i in range(3))


def test_batches_equal_those_of_a_plain_pipeline_until_they_grow():
    seed = 2**32 - 1
    pipeline = grain.MapDataset.range(23).seed(seed).shuffle().repeat().batch(5).random_map(fetch_numbers)
    constant = batches.train(fetch_numbers, n=23, batch=5, seed=seed)
    growing = batches.train(fetch_numbers, n=23, batch=5, seed=seed, growth=[[13, 11]])
    for step in (0, 1, 4, 5, 12, 13, 10**9):
        expected = pipeline[step] | {"example_B": pipeline[step]["index_B"]}
        assert are_equal(constant[step], expected) and are_equal(growing[step], expected) == (step < 13)
    assert len({tuple(growing[step]["draw_B"]) for step in (12, 13, 14)}) == 3


INVALID_GROWTHS = [[[5, 8], [5, 9]], [[5, 8], [4, 9]], [[0, 8]], [[-1, 8]], [[5, 0]], [[5, -8]]]
INVALID_GROWTHS += [
    [pair] for pair in (5, [5], [5, 8, 9], [5, 8.0], ["5", 8], [True, 8], None, {"5": 8, "6": 9}, [], "58")
]


@pytest.mark.parametrize("pairs", INVALID_GROWTHS)
def test_an_invalid_growth_is_refused(pairs):
    with raises(errors.UserError, "train.growth", repr(pairs[-1])):
        batches.train(fetch_numbers, n=41, batch=4, seed=0, growth=pairs)


@hypothesis.given(st.integers(1, 41), st.integers(1, 13))
@hypothesis.settings(deadline=None, max_examples=12)
def test_evaluation_has_every_example_once_in_order(n, batch):
    dataset = batches.evaluation(fetch_numbers, n=n, batch=batch)
    parts = [dataset[step] for step in range(len(dataset))]
    assert len(parts) == -(-n // batch)
    assert all(part["index_B"].shape == (batch,) for part in parts)
    weight = np.concatenate([part["weight_B"] for part in parts])
    index = np.concatenate([part["index_B"] for part in parts])
    assert list(index[weight == 1]) == list(range(n))
    assert weight.sum() == n and weight.dtype == np.float32
    assert (index[weight == 0] == n - 1).all()


def test_evaluation_zeroes_only_weights_and_never_the_arrays_of_fetch():
    ones_BN = np.ones((5, 3), np.float32)

    def fetch(index_B, rng):
        assert rng is None
        return {"weight_BN": ones_BN, "w_BN": ones_BN}

    last = batches.evaluation(fetch, n=7, batch=5)[1]
    assert last["weight_BN"].tolist() == [[1] * 3] * 2 + [[0] * 3] * 3
    assert last["w_BN"].all() and ones_BN.all()
    with raises(errors.UserError, "examples", "0"):
        batches.evaluation(fetch, n=0, batch=5)


@pytest.mark.parametrize("start", [0, 4, 10**9])  # nine batches of 5 cross into the next epoch of 23
def test_iterating_starts_anywhere_and_ends_with_a_finite_set(start):
    dataset = batches.train(fetch_numbers, n=23, batch=5, seed=3)
    iterator = batches.iterate(dataset, start=start)
    assert all(are_equal(next(iterator), dataset[start + step]) for step in range(9))
    dataset = batches.evaluation(fetch_numbers, n=23, batch=5)
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
    process = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    noise = [line for line in process.stderr.splitlines() if "Grain multiprocess worker profiling" not in line]
    assert (process.returncode, process.stdout, noise) == (7, "", [])


# Windows of tokens

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
    # The shares are within five standard deviations of a binomial distribution.
    count, total = hidden.sum(), ordinary.sum()
    assert abs(count / total - rate) < 5 * np.sqrt(rate * (1 - rate) / total)
    other_share = 0.1 * 8 / 9  # one of nine random ordinary tokens equals the original
    for is_case, share in (
        (w[hidden] == mask_id, 0.8),
        ((w[hidden] != mask_id) & (w[hidden] != target[hidden]), other_share),
        (w[hidden] == target[hidden], 0.2 - other_share),
    ):
        assert abs(is_case.mean() - share) < 5 * np.sqrt(share * (1 - share) / count)
    assert {*w[hidden & (w != mask_id) & (w != target)].tolist()} == {*range(12)} - special


@hypothesis.given(TOKENS, st.integers(1, 7), st.integers(1, 7))
@hypothesis.settings(deadline=None, max_examples=12)
def test_masked_evaluation_has_every_token_once_and_is_the_same_for_every_batch_size(sizes, first, second):
    N, T = sizes
    token_T = np.arange(T, dtype=np.int32)
    fetch, n = windows.masked(token_T, N=N, W=T + 2, special={T + 1}, mask_id=T + 1, evaluation=True)

    def join_batches(batch):
        dataset = batches.evaluation(fetch, n=n, batch=batch)
        parts = [dataset[step] for step in range(len(dataset))]
        return {name: np.concatenate([part[name] for part in parts])[:n] for name in parts[0]}

    arrays, other_arrays = join_batches(first), join_batches(second)
    assert are_equal(arrays, other_arrays)
    assert arrays["target_BN"][arrays["valid_BS"]].tolist() == list(range(T))
    assert not arrays["weight_BN"][~arrays["valid_BS"]].any()


CUTS = [(windows.causal, {}, 1), (windows.masked, {"W": 257, "special": {256}, "mask_id": 256}, 0)]


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize(("make_windows", "options", "extra_tokens"), CUTS)
def test_windows_take_small_integers_and_refuse_too_few_tokens(make_windows, options, extra_tokens, evaluation):
    """The id of [MASK] may be too large for the small integers."""
    token_T = np.random.default_rng(0).integers(0, 256, 61)
    fetch, n = make_windows(token_T.astype(np.int32), N=7, evaluation=evaluation, **options)
    expected = fetch(np.arange(n), None)
    for kind in (np.uint8, np.uint16):
        fetch, m = make_windows(token_T.astype(kind), N=7, evaluation=evaluation, **options)
        batch = fetch(np.arange(m), None)
        assert (
            n == m and are_equal(batch, expected) and all(batch[name].dtype == expected[name].dtype for name in batch)
        )
    with raises(errors.UserError, "5 tokens", 6):
        make_windows(token_T[:5], N=6 - extra_tokens, evaluation=evaluation, **options)
    assert make_windows(token_T[:6], N=6 - extra_tokens, evaluation=evaluation, **options)[1] == 1


def test_masked_evaluation_hides_different_places_in_different_windows():
    token_T = np.zeros(7 * 31, np.int32)
    fetch, n = windows.masked(token_T, N=31, W=3, special={2}, mask_id=2, evaluation=True)
    batch = fetch(np.arange(n), None)
    assert len({row.tobytes() for row in batch["weight_BN"]}) == n == 7
