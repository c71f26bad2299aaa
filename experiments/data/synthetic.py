"""Synthetic tasks: each needs attention to find a token, and some need the direction to it."""

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments.config import by_name, errors
from experiments.engine import batches

EPOCH = 2**16  # training examples of an epoch; their contents are new each time
EVALUATION = 512  # held-out examples, which are the same in every run
MOST = 1024  # the largest number after the colon of synthetic.task
ROWS = 4  # rows of uniform numbers from which one example is made, each as long as the larger of N and W
HELD_OUT = 0x5EED  # first half of the random key of a held-out example; the second half is the example's index
SHARE = 0.4  # of all pairs of modular_addition, for training

Answer = tuple[np.ndarray, np.ndarray, np.ndarray]  # w_BN, target_BN, weight_BN
Examples = tuple[batches.Fetch, int]  # a function that fetches examples by index, and the number of examples


class Task(NamedTuple):
    """A task with N tokens in an example and W token ids. name: its key in TASKS.

    causal: whether tokens attend only to themselves and to earlier tokens.
    """

    name: str
    N: int
    W: int
    causal: bool


class Rule(NamedTuple):
    """A row of TASKS: the examples of a task, and how its N and W follow from the number after the colon (`parse`)."""

    split: Callable[[int, int], tuple[Examples, Examples]]  # (N, W) -> training and held-out examples
    least: int  # the smallest number
    default: int = 12
    sizes: Callable[[int], tuple[int, int]] = lambda number: (number, 2 * number)  # number -> N, W
    causal: bool = False  # also without the suffix _causal


def parse(text: str) -> Task:
    """Return the task that synthetic.task names, as in "ring", "ring_causal" or "ring:20".

    The number gives the task's N and W (`Rule.sizes`). Raises UserError if the text does not have this form, for an
    unknown task, and for a number that is too small or too large.
    """
    match = re.fullmatch(r"([^:]*?)(_causal)?(?::([0-9]{1,9}))?", text)
    if match is None:
        raise errors.UserError(f"synthetic.task = {text}: write 1 to 9 digits after the colon, as in ring:20")
    rule = TASKS[by_name.choose("task", match[1], {name: name for name in TASKS})]
    number = int(match[3] or rule.default)
    problem = f"synthetic.task = {text} has the number {number}. Choose from {rule.least} to {MOST}, as in {match[1]}"
    errors.refuse((not rule.least <= number <= MOST, f"{problem}:{rule.default}"))
    return Task(match[1], *rule.sizes(number), causal=rule.causal or match[2] is not None)


def draw(make: Callable[[np.ndarray, int, int], Answer], N: int, W: int) -> tuple[Examples, Examples]:
    """Return (fetch, number) of training and of held-out examples: N tokens with ids below W, drawn at random.

    make: (u_BRX, N, W) -> w_BN, target_BN and weight_BN. u_BRX: uniform numbers in [0, 1), R = ROWS, X = max(N, W). A
    batch has `w_BN` and `target_BN` (int32, below W) and `weight_BN` (float32): 1 if the token has a target, else 0.
    fetch(index_B, rng) draws new examples each time. With rng = None (evaluation) an example depends only on its index.
    """
    sizes = ROWS, max(N, W)

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        if rng is not None:
            u_BRX = rng.random((len(index_B), *sizes))
        else:
            generators = [np.random.Generator(np.random.Philox(key=[HELD_OUT, index])) for index in index_B.tolist()]
            u_BRX = np.stack([generator.random(sizes) for generator in generators])
        return make_batch(*make(u_BRX, N, W))

    return (fetch, EPOCH), (fetch, EVALUATION)


def make_batch(w_BN: np.ndarray, target_BN: np.ndarray, weight_BN: np.ndarray) -> batches.Batch:
    """Return the batch of these arrays: w_BN and target_BN as int32, weight_BN as float32."""
    w_BN, target_BN = w_BN.astype(np.int32), target_BN.astype(np.int32)
    return {"w_BN": w_BN, "target_BN": target_BN, "weight_BN": weight_BN.astype(np.float32)}


def split_sums(N: int, W: int) -> tuple[Examples, Examples]:
    """Return training and held-out examples of addition modulo P = W - 1: tokens a, b, "=" (Power et al. 2022).

    N is 3. The id of "=" is P. Only this last token has a target: (a + b) mod P. Every pair of a and b is one example.
    A random SHARE of the pairs, the same in every run, is for training.
    """
    P = W - 1
    order_I = np.random.Generator(np.random.Philox(key=[HELD_OUT, P])).permutation(P * P)

    def select(pair_I: np.ndarray) -> Examples:
        def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
            a_B, b_B = np.divmod(pair_I[index_B], P)
            w_BN = np.stack([a_B, b_B, np.full_like(a_B, P)], axis=1)
            is_last_BN = np.broadcast_to(np.arange(N) == N - 1, w_BN.shape)
            return make_batch(w_BN, is_last_BN * ((a_B + b_B) % P)[:, None], is_last_BN)

        return fetch, len(pair_I)

    n = round(SHARE * P * P)
    return select(order_I[:n]), select(order_I[n:])


def spell(task: str, w_N: np.ndarray, *, N: int, W: int) -> list[str]:
    """Return the tokens of one example as a figure shows them, a text for each. W: size of the vocabulary."""
    spellings: dict[str, Callable[[int, int], str]] = {  # of token w at position n
        "reachability": lambda w, n: f"{n}→{w % N}" + " source" * (w >= N),
        "beats": lambda w, n: f"{'rsp'[w // (W // 3)]}{w % (W // 3)}",
        "membership": lambda w, n: f"{w}" + "?" * (n >= N // 2),
        "nearest": lambda w, n: f"{w // math.isqrt(W)}:{w % math.isqrt(W)}",
        "modular_addition": lambda w, n: "=" if w == W - 1 else f"{w}",
    }
    spell_token = spellings.get(task, lambda w, n: str(w))
    return [spell_token(int(w), n) for n, w in enumerate(w_N)]


def scale(u: np.ndarray, n: int | np.ndarray) -> np.ndarray:
    """Return floor(u n): integers from 0 to n - 1, equally likely if u is uniform in [0, 1)."""
    return (u * n).astype(np.int64)


def make_ring(u_BRX: np.ndarray, N: int, W: int) -> Answer:
    """Make tokens whose target is the previous token on a ring, w_{(n-1) mod N}. All weights are 1.

    u_BRX: uniform random numbers in [0, 1). Returns (w_BN, target_BN, weight_BN).
    """
    w_BN = scale(u_BRX[:, 0, :N], W)
    return w_BN, np.roll(w_BN, 1, axis=1), np.ones(w_BN.shape)


def make_previous(u_BRX: np.ndarray, N: int, W: int) -> Answer:
    """Make tokens whose target is the previous token, w_{n-1}. The first token has no target: its weight is 0.

    u_BRX: uniform random numbers in [0, 1).
    """
    w_BN, target_BN, weight_BN = make_ring(u_BRX, N, W)
    return w_BN, target_BN, weight_BN * (np.arange(N) > 0)


def make_reachability(u_BRX: np.ndarray, N: int, W: int) -> Answer:
    """Make graphs: the target of a node is 1 if an edge leads from a source to it, else 0. A source has no target.

    Every node has one outgoing edge: token p at position n is an edge from n to p. Token N + p is the same edge, and
    marks n as a source (weight 0). u_BRX: uniform random numbers in [0, 1). Returns w_BN, target_BN and weight_BN.
    """
    other_BN = scale(u_BRX[:, 0, :N], N - 1)
    pointer_BN = other_BN + (other_BN >= np.arange(N))  # never to itself
    # Each other node points to a node with probability 1 / (N - 1). This share of sources reaches about half of all.
    share = (N - 1) * (1 - 0.5 ** (1 / (N - 1)))
    source_BN = u_BRX[:, 1, :N] < share
    reached_BN = source_BN.copy()
    b, n = np.nonzero(source_BN)
    reached_BN[b, pointer_BN[b, n]] = True
    return pointer_BN + N * source_BN, reached_BN & ~source_BN, ~source_BN


def make_beats(u_BRX: np.ndarray, N: int, W: int) -> Answer:
    """Make tokens of a kind and a payload. The target is the payload of the kind that the token's kind beats.

    Return w_BN, target_BN and weight_BN (all 1). u_BRX: uniform random numbers in [0, 1). Rock (0) beats scissors (1)
    beats paper (2) beats rock. A token is kind * P + payload, P = W // 3. An example has all three kinds, each with one
    payload.
    """
    P = W // 3
    payload_BC = scale(u_BRX[:, 0, :3], P)
    rank_BN = u_BRX[:, 1, :N].argsort(axis=1).argsort(axis=1)  # ranks 0, 1, 2: a token of each kind
    kind_BN = np.where(rank_BN < 3, rank_BN, scale(u_BRX[:, 2, :N], 3))
    w_BN = kind_BN * P + np.take_along_axis(payload_BC, kind_BN, axis=1)
    return w_BN, np.take_along_axis(payload_BC, (kind_BN + 1) % 3, axis=1), np.ones(w_BN.shape)


def make_membership(u_BRX: np.ndarray, N: int, W: int) -> Answer:
    """Make a set (first half) and queries (second half). The target of a query is 1 if the set contains it, else 0.

    u_BRX: uniform random numbers from 0 to 1. The tokens of the set differ, and have no target (weight 0). Both targets
    are equally likely.
    """
    n_set = N // 2
    order_BW = u_BRX[:, 0, :W].argsort(axis=1)
    inside_BN = u_BRX[:, 1, : N - n_set] < 0.5
    u_BN = u_BRX[:, 2, : N - n_set]
    index_BN = np.where(inside_BN, scale(u_BN, n_set), n_set + scale(u_BN, W - n_set))
    w_BN = np.concatenate([order_BW[:, :n_set], np.take_along_axis(order_BW, index_BN, axis=1)], axis=1)
    target_BN = np.concatenate([np.zeros((len(w_BN), n_set)), inside_BN], axis=1)
    return w_BN, target_BN, np.broadcast_to(np.arange(N) >= n_set, w_BN.shape)


def make_nearest(u_BRX: np.ndarray, N: int, W: int) -> Answer:
    """Make tokens of a key and a payload. The target is the payload of the nearest other token with the same key.

    A token is key * P + payload, P = floor(sqrt(W)). It has no target (weight 0) if no other token has its key, or if
    the two nearest are equally near. u_BRX: uniform random numbers from 0 to 1.
    """
    P = math.isqrt(W)
    w_BN = scale(u_BRX[:, 0, :N], W // P * P)
    key_BN, payload_BN = np.divmod(w_BN, P)
    distance_NS = np.abs(np.subtract.outer(np.arange(N), np.arange(N))).astype(np.int16)
    same_BNS = (key_BN[:, :, None] == key_BN[:, None, :]) & (distance_NS > 0)
    distance_BNS = np.where(same_BNS, distance_NS, np.int16(N))
    least_BN = distance_BNS.min(axis=2)
    unique_BN = (least_BN < N) & ((distance_BNS == least_BN[:, :, None]).sum(axis=2) == 1)
    return w_BN, unique_BN * np.take_along_axis(payload_BN, distance_BNS.argmin(axis=2), axis=1), unique_BN


def make_induction(u_BRX: np.ndarray, N: int, W: int) -> Answer:
    """Make T tokens that repeat until there are N. The target of token n is w_{n+1} (Olsson et al. 2022).

    Return w_BN, target_BN and weight_BN (False: no target) from the uniform numbers u_BRX of `draw`, for ids below W.
    Tokens have a target from n = T on, where they have occurred before. T is uniform in N // 4 ... N // 2, so the
    distance does not follow from positions. The T ids differ, so each token determines the next one.
    """
    order_BW = u_BRX[:, 0, :W].argsort(axis=1)
    T_B1 = N // 4 + scale(u_BRX[:, 1, :1], N // 2 - N // 4 + 1)
    place_BN = np.arange(N) % T_B1
    target_BN = np.take_along_axis(order_BW, (place_BN + 1) % T_B1, axis=1)
    return np.take_along_axis(order_BW, place_BN, axis=1), target_BN, np.arange(N) >= T_B1


TASKS = {
    "ring": Rule(functools.partial(draw, make_ring), 3),
    "previous": Rule(functools.partial(draw, make_previous), 2),
    "reachability": Rule(functools.partial(draw, make_reachability), 3),
    "beats": Rule(functools.partial(draw, make_beats), 3),
    "membership": Rule(functools.partial(draw, make_membership), 2),
    "nearest": Rule(functools.partial(draw, make_nearest), 2),
    "induction": Rule(functools.partial(draw, make_induction), 8, default=32, causal=True),
    "modular_addition": Rule(split_sums, 2, default=59, sizes=lambda P: (3, P + 1), causal=True),
}
