"""Tasks that are made: each asks whether attention finds one certain token, and some where it lies from another."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.engine import batches, by_name, errors

EPOCH = 2**16  # numbers that examples of the training part have; what they hold is new each time
MOST = 1024  # tokens
ROWS = 4  # of uniform numbers, each as long as N and W, from which one example is made
HELD_OUT = 0x5EED  # begins the random keys of held-out examples, which follow from their numbers alone

Answer = tuple[np.ndarray, np.ndarray, np.ndarray]  # w_BN, target_BN, weight_BN


class Rule(NamedTuple):
    """How an example of a task is made from uniform numbers in [0, 1)."""

    make: Callable[..., Answer]  # (u_BRX, *, N, W): X is the larger of N and W
    tokens: int  # the fewest there can be
    spell: Callable[[int, int, int, int], str] = lambda w, n, N, W: str(w)  # what a person reads for word w at place n


def examples(task: str, *, N: int, W: int) -> batches.Fetch:
    """`fetch(index_B, rng)` of the task of this name, of W >= 2 N words: `w_BN`, `target_BN` (the answer, a word or a
    number below W; both int32) and `weight_BN`, 1 where an answer is asked for and 0 elsewhere (float32).

    With an `rng` (training) examples are new each time; without one (held out) each is a function of its number alone,
    the same in every run. UserError for an unknown task, and too few or too many tokens.
    """
    rule = RULES[by_name.choose("task", task, {name: name for name in RULES})]
    if not rule.tokens <= N <= MOST:
        right = f"the task {task} has from {rule.tokens} to {MOST} tokens"
        raise errors.UserError(f"{right}, and not {N}: synthetic.task = {task}:12")

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        sizes = ROWS, max(N, W)
        if rng is not None:
            u_BRX = rng.random((len(index_B), *sizes))
        else:
            own = (np.random.Generator(np.random.Philox(key=[HELD_OUT, number])) for number in index_B.tolist())
            u_BRX = np.stack([each.random(sizes) for each in own])
        w_BN, target_BN, weight_BN = rule.make(u_BRX, N=N, W=W)
        w_BN, target_BN = w_BN.astype(np.int32), target_BN.astype(np.int32)
        return {"w_BN": w_BN, "target_BN": target_BN, "weight_BN": weight_BN.astype(np.float32)}

    return fetch


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


def _reachability(u_BRX: np.ndarray, *, N: int, **_: Any) -> Answer:
    """A graph with one edge from every node: word p of node n is an edge from n to p, and word N + p the same of a
    source. Answers 1 where an edge leads from some source to the node, else 0; sources are not asked."""
    other_BN = _whole(u_BRX[:, 0, :N], N - 1)
    pointer_BN = other_BN + (other_BN >= np.arange(N))  # never to itself
    # Of the N - 1 others each points to a node with probability 1 / (N - 1): with this share of sources, about half of
    # the nodes are missed by all of them.
    share = (N - 1) * (1 - 0.5 ** (1 / (N - 1)))
    source_BN = u_BRX[:, 1, :N] < share
    reached_BN = source_BN.copy()
    b, n = np.nonzero(source_BN)
    reached_BN[b, pointer_BN[b, n]] = True
    return pointer_BN + N * source_BN, reached_BN & ~source_BN, ~source_BN


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
    distance_NS = np.abs(np.subtract.outer(np.arange(N), np.arange(N))).astype(np.int16)
    same_BNS = (key_BN[:, :, None] == key_BN[:, None, :]) & (distance_NS > 0)
    distance_BNS = np.where(same_BNS, distance_NS, np.int16(N))
    least_BN = distance_BNS.min(axis=2)
    asked_BN = (least_BN < N) & ((distance_BNS == least_BN[:, :, None]).sum(axis=2) == 1)
    return w_BN, asked_BN * np.take_along_axis(payload_BN, distance_BNS.argmin(axis=2), axis=1), asked_BN


RULES = {
    "ring": Rule(_ring, 3),
    "previous": Rule(_previous, 2),
    "reachability": Rule(_reachability, 3, lambda w, n, N, W: f"{n}→{w % N}{' source' if w >= N else ''}"),
    "beats": Rule(_beats, 3, lambda w, n, N, W: f"{'rsp'[w // (W // 3)]}{w % (W // 3)}"),
    "membership": Rule(_membership, 2, lambda w, n, N, W: f"{w}{'?' if n >= N // 2 else ''}"),
    "nearest": Rule(_nearest, 2, lambda w, n, N, W: f"{w // math.isqrt(W)}:{w % math.isqrt(W)}"),
}
