"""Synthetic tasks: each needs attention to find a certain token; some need its direction from another token."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.engine import batches, by_name, errors

EPOCH = 2**16  # numbers of training examples; their contents are new each time
MOST = 1024  # tokens
ROWS = 4  # of uniform numbers, each as long as N and W, from which one example is made
HELD_OUT = 0x5EED  # begins the random keys of held-out examples, which follow from their numbers alone

Answer = tuple[np.ndarray, np.ndarray, np.ndarray]  # w_BN, target_BN, weight_BN


class Rule(NamedTuple):
    """How a task makes an example from uniform numbers in [0, 1)."""

    make: Callable[..., Answer]  # (u_BRX, *, N, W): X is the larger of N and W
    tokens: int  # the fewest
    spell: Callable[[int, int, int, int], str] = lambda w, n, N, W: str(w)  # how a figure shows word w at place n


def examples(task: str, *, N: int, W: int) -> batches.Fetch:
    """Return `fetch(index_B, rng)` of the task of this name, with W >= 2 N words: `w_BN`, `target_BN` (the answer, a
    word or a number below W; both int32) and `weight_BN`, 1 where there is an answer and 0 elsewhere (float32).

    With an `rng` (training) examples are new each time; without one (held out) each is a function of its number alone,
    the same in every run. Raises UserError for an unknown task, and too few or too many tokens."""
    rule = RULES[by_name.choose("task", task, {name: name for name in RULES})]
    if not rule.tokens <= N <= MOST:
        right = f"from {rule.tokens} to {MOST}"
        raise errors.UserError(f"synthetic.task = {task}:{N} has {N} tokens: choose {right}, as in {task}:12")

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
    """Return the words of one example as a figure shows them."""
    return [RULES[task].spell(int(word), n, N, W) for n, word in enumerate(w_N)]


def scale(u: np.ndarray, n: int | np.ndarray) -> np.ndarray:
    """Return whole numbers from 0 to n - 1, all equally likely."""
    return (u * n).astype(np.int64)


def make_ring(u_BRX: np.ndarray, *, N: int, W: int, **_: Any) -> Answer:
    """Ask for the word at the place before, on a ring: w_{n-1 mod N}."""
    w_BN = scale(u_BRX[:, 0, :N], W)
    return w_BN, np.roll(w_BN, 1, axis=1), np.ones(w_BN.shape)


def make_previous(u_BRX: np.ndarray, *, N: int, W: int, **_: Any) -> Answer:
    """Ask for the word before, w_{n-1}, on a line: the first token has no answer."""
    w_BN, target_BN, weight_BN = make_ring(u_BRX, N=N, W=W)
    return w_BN, target_BN, weight_BN * (np.arange(N) > 0)


def make_reachability(u_BRX: np.ndarray, *, N: int, **_: Any) -> Answer:
    """Ask whether an edge leads from some source to the node, 1 or 0; sources have no answer.

    The graph has one edge from every node: word p of node n is an edge from n to p, and word N + p the same of a
    source."""
    other_BN = scale(u_BRX[:, 0, :N], N - 1)
    pointer_BN = other_BN + (other_BN >= np.arange(N))  # never to itself
    # Each of the N - 1 others points to a node with probability 1 / (N - 1): this share of sources reaches half of the
    # nodes, about.
    share = (N - 1) * (1 - 0.5 ** (1 / (N - 1)))
    source_BN = u_BRX[:, 1, :N] < share
    reached_BN = source_BN.copy()
    b, n = np.nonzero(source_BN)
    reached_BN[b, pointer_BN[b, n]] = True
    return pointer_BN + N * source_BN, reached_BN & ~source_BN, ~source_BN


def make_beats(u_BRX: np.ndarray, *, N: int, W: int, **_: Any) -> Answer:
    """Ask for the payload of the kind that the token's own beats: rock (0) beats scissors (1) beats paper (2) beats
    rock.

    Word kind * P + payload, P = W // 3: all of a kind have the same payload in an example, which has all three
    kinds."""
    P = W // 3
    payload_BC = scale(u_BRX[:, 0, :3], P)
    place_BN = u_BRX[:, 1, :N].argsort(axis=1).argsort(axis=1)  # one token of each kind stands anywhere
    kind_BN = np.where(place_BN < 3, place_BN, scale(u_BRX[:, 2, :N], 3))
    w_BN = kind_BN * P + np.take_along_axis(payload_BC, kind_BN, axis=1)
    return w_BN, np.take_along_axis(payload_BC, (kind_BN + 1) % 3, axis=1), np.ones(w_BN.shape)


def make_membership(u_BRX: np.ndarray, *, N: int, W: int, **_: Any) -> Answer:
    """Ask of each word in the second half whether it is in the first, a set of different words: 1 or 0, equally
    likely."""
    n_set = N // 2
    order_BW = u_BRX[:, 0, :W].argsort(axis=1)
    inside_BN = u_BRX[:, 1, : N - n_set] < 0.5
    u_BN = u_BRX[:, 2, : N - n_set]
    chosen_BN = np.where(inside_BN, scale(u_BN, n_set), n_set + scale(u_BN, W - n_set))
    w_BN = np.concatenate([order_BW[:, :n_set], np.take_along_axis(order_BW, chosen_BN, axis=1)], axis=1)
    target_BN = np.concatenate([np.zeros((len(w_BN), n_set)), inside_BN], axis=1)
    return w_BN, target_BN, np.broadcast_to(np.arange(N) >= n_set, w_BN.shape)


def make_nearest(u_BRX: np.ndarray, *, N: int, W: int, **_: Any) -> Answer:
    """Ask for the payload of the nearest other token with the same key. A token has no answer if there is none, or two
    are equally near. Word key * P + payload, P = floor(sqrt(W))."""
    P = math.isqrt(W)
    w_BN = scale(u_BRX[:, 0, :N], W // P * P)
    key_BN, payload_BN = np.divmod(w_BN, P)
    distance_NS = np.abs(np.subtract.outer(np.arange(N), np.arange(N))).astype(np.int16)
    same_BNS = (key_BN[:, :, None] == key_BN[:, None, :]) & (distance_NS > 0)
    distance_BNS = np.where(same_BNS, distance_NS, np.int16(N))
    least_BN = distance_BNS.min(axis=2)
    unique_BN = (least_BN < N) & ((distance_BNS == least_BN[:, :, None]).sum(axis=2) == 1)
    return w_BN, unique_BN * np.take_along_axis(payload_BN, distance_BNS.argmin(axis=2), axis=1), unique_BN


RULES = {
    "ring": Rule(make_ring, 3),
    "previous": Rule(make_previous, 2),
    "reachability": Rule(make_reachability, 3, lambda w, n, N, W: f"{n}→{w % N}{' source' if w >= N else ''}"),
    "beats": Rule(make_beats, 3, lambda w, n, N, W: f"{'rsp'[w // (W // 3)]}{w % (W // 3)}"),
    "membership": Rule(make_membership, 2, lambda w, n, N, W: f"{w}{'?' if n >= N // 2 else ''}"),
    "nearest": Rule(make_nearest, 2, lambda w, n, N, W: f"{w // math.isqrt(W)}:{w % math.isqrt(W)}"),
}
