"""What symmetric scores can and cannot do on a ring: the statements of docs/ring.md, checked by its constructions.

Row i of the logits is served if its largest logit is that of the target pi(i). On a ring, pi(i) = i - 1.
"""

import itertools
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from scipy import optimize

from tfm.attention import explicit, score

n = 12
RING = np.roll(np.arange(n), 1)  # pi(i) = i - 1


def find_served(l_NN, target_N, *, diagonal: bool) -> np.ndarray:
    """Return for each row whether its only largest logit is the target's."""
    l_NN = np.array(l_NN, np.float64)
    if not diagonal:
        np.fill_diagonal(l_NN, -np.inf)
    target_N1 = np.asarray(target_N)[:, None]
    others_NN = l_NN.copy()
    np.put_along_axis(others_NN, target_N1, -np.inf, 1)
    return np.take_along_axis(l_NN, target_N1, 1)[:, 0] > others_NN.max(1)


def draw_spiral(start: int = 0, phi: float = 0.1) -> np.ndarray:
    """Return tokens rho^i (cos(i phi), sin(i phi)), where cos(2 phi) / cos(phi) < rho < cos(phi); `start` is i = 0."""
    rho, i = (np.cos(2 * phi) / np.cos(phi) + np.cos(phi)) / 2, np.arange(n)
    u_N2 = rho ** i[:, None] * np.stack([np.cos(i * phi), np.sin(i * phi)], axis=1)
    return np.roll(u_N2, start, axis=0)


def apply(variant: score.Score, x_ND: np.ndarray, **params: np.ndarray) -> np.ndarray:
    """Return the logits of one head."""
    q, k = variant.apply({name: np.float32(leaf)[None] for name, leaf in params.items()}, x_ND[None], x_ND[None])
    return np.asarray(explicit.logits(q, k, scale=1.0))[0, 0]


def test_a_symmetric_score_of_rank_two_serves_all_rows_but_one():
    x_N2 = np.float32(draw_spiral())
    l_NN = apply(score.tied, x_N2, U_HKD=np.eye(2))
    for diagonal in (True, False):
        served_N = find_served(l_NN, RING, diagonal=diagonal)
        assert not served_N[0] and served_N[1:].all()


def can_serve(rows: Iterable[int], target_N: Sequence[int]) -> bool:
    """Return whether some symmetric matrix, without its diagonal, serves these rows: a linear program."""
    size = len(target_N)
    place = {frozenset(pair): k for k, pair in enumerate(itertools.combinations(range(size), 2))}
    rules = []
    for i, j in itertools.product(rows, range(size)):
        if j not in (i, target_N[i]):
            rule = np.zeros(len(place))
            rule[place[frozenset((i, j))]], rule[place[frozenset((i, target_N[i]))]] = 1, -1
            rules.append(rule)
    result = optimize.linprog(np.zeros(len(place)), rules, -np.ones(len(rules)), bounds=(None, None))
    return result.status == 0


def test_a_symmetric_matrix_serves_all_rows_but_one_of_each_cycle_of_three_or_more():
    """All permutations of five without fixed points: 24 with one cycle, 20 with a cycle of three and a pair."""
    counts = dict.fromkeys((5, 3), 0)
    for target in itertools.permutations(range(5)):
        if any(i == j for i, j in enumerate(target)):
            continue
        pairs = [i for i in range(5) if target[target[i]] == i]
        cycle = [i for i in range(5) if i not in pairs]
        assert not can_serve(cycle, target) and all(can_serve({*range(5)} - {i}, target) for i in cycle)
        counts[len(cycle)] += 1
    assert counts == {5: 24, 3: 20}


def test_a_skew_form_of_rank_two_serves_all_rows():
    """Symmetric part cos(a_i - a_s), skew part tan(step) sin(a_i - a_s): their sum is largest one step back."""
    step = 2 * np.pi / n
    x_N2 = np.float32(np.stack([np.cos(step * np.arange(n)), np.sin(step * np.arange(n))], axis=1))
    skew = np.sqrt(np.tan(step)) * np.array([[0.0, 1.0], [1.0, 0.0]])
    l_NN = apply(score.sym_plus_skew_of(2), x_N2, U_HQD=np.concatenate([np.eye(2), skew]))
    assert find_served(l_NN, RING, diagonal=True).all()
    assert (
        find_served(
            apply(score.sym_plus_skew_of(2), x_N2, U_HQD=np.concatenate([np.eye(2), 0 * skew])), RING, diagonal=True
        ).sum()
        == 0
    )


def test_the_mean_weights_of_three_symmetric_heads_serve_all_rows_and_of_one_do_not():
    """Each head fails in another row, where the two others outvote it."""
    mean_NN = np.zeros((n, n))
    for head, start in enumerate((0, 4, 8)):
        l_NN = 3000 * draw_spiral(start) @ draw_spiral(start).T
        np.fill_diagonal(l_NN, -np.inf)
        mean_NN += np.asarray(jax.nn.softmax(l_NN, axis=-1)) / 3
        assert find_served(mean_NN, RING, diagonal=False).sum() == (11, 10, 12)[head]
