"""Tasks that are made, not read: each asks whether attention finds one certain token, and some need to know the
direction from one token to another.

Every task gives `w_BN` (N words out of W), `target_BN` (the answer, a word or a number below W; both int32) and
`weight_BN`, 1 where an answer is asked for and 0 elsewhere (float32). All have the same shapes, so that one compiled
program serves them all.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.engine import batches, by_name, errors

EPOCH = 2**16  # numbers that examples of the training part have; what they hold is new each time
MOST = 1024  # tokens, and words
ROWS = 4  # of uniform numbers, each as long as N and W, from which one example is made
HELD_OUT = 0x5EED  # begins the random keys of held-out examples, which follow from their numbers alone

Answer = tuple[np.ndarray, np.ndarray, np.ndarray]  # w_BN, target_BN, weight_BN


class Rule(NamedTuple):
    """How an example of a task is made from uniform numbers in [0, 1)."""

    make: Callable[..., Answer]  # (u_BRX, *, N, W, steps): X is the larger of N and W
    tokens: int  # the fewest there can be
    words: Callable[[int], int]  # N -> the fewest there can be
    spell: Callable[[int, int, int, int], str]  # (word, n, N, W) -> what a person reads for the word at place n


def examples(task: str, *, N: int, W: int, steps: int = 1) -> batches.Fetch:
    """`fetch(index_B, rng)` of the task of this name: with an `rng` (training) examples are new each time; without one
    (held out) each is a function of its number alone, the same in every run.

    steps: of `reachability`.

    Raises:
      UserError: an unknown task, or too few or too many tokens, words or steps.
    """
    if task not in RULES:
        listed = ", ".join(RULES)
        raise errors.UserError(f'unknown task "{task}"{by_name.nearest(task, RULES)}; the right ones are: {listed}')
    rule = RULES[task]
    least = {"synthetic.N": (rule.tokens, N), "synthetic.W": (rule.words(N), W), "synthetic.steps": (1, steps)}
    for key, (fewest, value) in least.items():
        if not fewest <= value <= MOST:
            raise errors.UserError(
                f"the task {task} with {N} tokens needs {key} from {fewest} to {MOST}, and {value} is not"
            )

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        if rng is not None:
            return _batch(*rule.make(rng.random((len(index_B), ROWS, max(N, W))), N=N, W=W, steps=steps))
        number_B, at_B = np.unique(index_B, return_inverse=True)  # the last batch is filled up with one example
        own = [np.random.Generator(np.random.Philox(key=[HELD_OUT, number])) for number in number_B.tolist()]
        u_BRX = np.stack([each.random((ROWS, max(N, W))) for each in own])
        return _batch(*(array[at_B] for array in rule.make(u_BRX, N=N, W=W, steps=steps)))

    return fetch


def _batch(w_BN: np.ndarray, target_BN: np.ndarray, weight_BN: np.ndarray) -> batches.Batch:
    return {
        "w_BN": w_BN.astype(np.int32),
        "target_BN": target_BN.astype(np.int32),
        "weight_BN": weight_BN.astype(np.float32),
    }


def spelled(task: str, w_N: np.ndarray, *, N: int, W: int) -> list[str]:
    """The words of one example as a person reads them."""
    return [RULES[task].spell(int(word), n, N, W) for n, word in enumerate(w_N)]


def _whole(u: np.ndarray, n: int | np.ndarray) -> np.ndarray:
    """Whole numbers from 0 to n - 1, all equally likely."""
    return (u * n).astype(np.int64)


def _ring(u_BRX: np.ndarray, *, N: int, W: int, **_: Any) -> Answer:
    """The word at the place before, on a ring: w_{n-1 mod N}."""
    w_BN = _whole(u_BRX[:, 0, :N], W)
    return w_BN, np.roll(w_BN, 1, axis=1), np.ones(w_BN.shape)


def _previous(u_BRX: np.ndarray, *, N: int, W: int, **_: Any) -> Answer:
    """The word before, w_{n-1}, on a line: the first token is not asked."""
    w_BN, target_BN, weight_BN = _ring(u_BRX, N=N, W=W)
    return w_BN, target_BN, weight_BN * (np.arange(N) > 0)


def _reachability(u_BRX: np.ndarray, *, N: int, steps: int, **_: Any) -> Answer:
    """A graph with one edge from every node: word p of node n is an edge from n to p, and word N + p the same of a
    source. Answers 1 where 1 to `steps` edges lead from some source to the node, else 0; sources are not asked."""
    other_BN = _whole(u_BRX[:, 0, :N], N - 1)
    pointer_BN = other_BN + (other_BN >= np.arange(N))  # never to itself
    source_BN = u_BRX[:, 1, :N] < source_share(N, steps)
    reached_BN = source_BN
    for _step in range(min(steps, N)):
        b, n = np.nonzero(reached_BN)
        reached_BN = reached_BN.copy()
        reached_BN[b, pointer_BN[b, n]] = True
    return pointer_BN + N * source_BN, reached_BN & ~source_BN, ~source_BN


@functools.cache
def source_share(N: int, steps: int) -> float:
    """The share of sources that lets about half of the other nodes be reached, found by bisection.

    A node is missed within k steps if it is no source, and every of the N - 1 others that points to it (each does with
    probability 1 / (N - 1)) is missed within k - 1.
    """

    def missed(share: float) -> float:
        part = 1.0
        for _ in range(steps):
            part = (1 - (1 - (1 - share) * part) / (N - 1)) ** (N - 1)
        return part  # of the nodes that are no source

    low, high = 0.0, 1.0
    for _ in range(40):
        share = (low + high) / 2
        low, high = (low, share) if missed(share) < 0.5 else (share, high)
    return low


def _beats(u_BRX: np.ndarray, *, N: int, W: int, **_: Any) -> Answer:
    """Rock (0) beats scissors (1) beats paper (2) beats rock. Word kind * P + payload, P = W // 3: all of a kind have
    the same payload in an example, and all three kinds are there. The answer is the payload of the kind that the
    token's own beats."""
    P = W // 3
    payload_BC = _whole(u_BRX[:, 0, :3], P)
    place_BN = u_BRX[:, 1, :N].argsort(axis=1).argsort(axis=1)  # one token of each kind stands anywhere
    kind_BN = np.where(place_BN < 3, place_BN, _whole(u_BRX[:, 2, :N], 3))
    w_BN = kind_BN * P + np.take_along_axis(payload_BC, kind_BN, axis=1)
    return w_BN, np.take_along_axis(payload_BC, (kind_BN + 1) % 3, axis=1), np.ones(w_BN.shape)


def _membership(u_BRX: np.ndarray, *, N: int, W: int, **_: Any) -> Answer:
    """The first half is a set of different words, each of the others a question: is this word in the set? 1 or 0, with
    equal probability."""
    n_set = N // 2
    order_BW = u_BRX[:, 0, :W].argsort(axis=1)
    inside_BN = u_BRX[:, 1, : N - n_set] < 0.5
    u_BN = u_BRX[:, 2, : N - n_set]
    chosen_BN = np.where(inside_BN, _whole(u_BN, n_set), n_set + _whole(u_BN, W - n_set))
    w_BN = np.concatenate([order_BW[:, :n_set], np.take_along_axis(order_BW, chosen_BN, axis=1)], axis=1)
    target_BN = np.concatenate([np.zeros((len(w_BN), n_set)), inside_BN], axis=1)
    return w_BN, target_BN, np.broadcast_to(np.arange(N) >= n_set, w_BN.shape)


def _nearest(u_BRX: np.ndarray, *, N: int, W: int, **_: Any) -> Answer:
    """Word key * P + payload, P = floor(sqrt(W)). The answer is the payload of the nearest other token with the same
    key. A token is not asked where there is none, or two are equally near."""
    P = math.isqrt(W)
    w_BN = _whole(u_BRX[:, 0, :N], W // P * P)
    key_BN, payload_BN = np.divmod(w_BN, P)
    target_BN, weight_BN, open_BN = np.zeros_like(w_BN), np.zeros(w_BN.shape), np.ones(w_BN.shape, bool)
    for distance in range(1, N):
        same_BN = key_BN[:, distance:] == key_BN[:, :-distance]
        none = np.zeros((len(w_BN), distance), bool)
        before_BN, after_BN = np.concatenate([none, same_BN], axis=1), np.concatenate([same_BN, none], axis=1)
        from_BN = np.where(before_BN, np.roll(payload_BN, distance, axis=1), np.roll(payload_BN, -distance, axis=1))
        unique_BN = open_BN & (before_BN ^ after_BN)
        target_BN = np.where(unique_BN, from_BN, target_BN)
        weight_BN = np.where(unique_BN, 1, weight_BN)
        open_BN = open_BN & ~(before_BN | after_BN)
    return w_BN, target_BN, weight_BN


def _number(word: int, n: int, N: int, W: int) -> str:
    return str(word)


RULES = {
    "ring": Rule(_ring, 3, lambda N: 2, _number),
    "previous": Rule(_previous, 2, lambda N: 2, _number),
    "reachability": Rule(
        _reachability, 3, lambda N: 2 * N, lambda w, n, N, W: f"{n}→{w % N}{' source' if w >= N else ''}"
    ),
    "beats": Rule(_beats, 3, lambda N: 6, lambda w, n, N, W: f"{'rsp'[w // (W // 3)]}{w % (W // 3)}"),
    "membership": Rule(_membership, 2, lambda N: N // 2 + 1, lambda w, n, N, W: f"{w}{'?' if n >= N // 2 else ''}"),
    "nearest": Rule(_nearest, 2, lambda N: 4, lambda w, n, N, W: f"{w // math.isqrt(W)}:{w % math.isqrt(W)}"),
}
