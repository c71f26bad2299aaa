"""A table of learned positions for another number of positions: never silently, and by a named rule."""

import math

import numpy as np

from experiments.engine import errors

RULES = ("cut", "linear", "grid")


def resize(P_ND: np.ndarray, N: int, how: str = "") -> np.ndarray:
    """The table for N positions, by the rule `how` where it holds another number of them.

    cut: its first N rows. linear: between the first and the last row, which stay, by straight lines.
    grid: the rows are a square grid of patches in reading order (and before them a class token, where there is one
    more row than a square has; it stays), interpolated bilinearly between the centres of patches.
    UserError without a rule, for an unknown one, or where it does not apply.
    """
    old = P_ND.shape[0]
    if old == N:
        return P_ND
    if how not in RULES:
        wrong = f"there is no rule {how!r}" if how else "no rule says how"
        raise errors.UserError(
            f"the position table holds {old} positions and {N} are asked for, and {wrong}: choose {', '.join(RULES)}"
        )
    if N < 1 or (how == "cut" and N > old):
        raise errors.UserError(f"a table of {old} positions cannot be cut to {N}")
    if how == "cut":
        return P_ND[:N]
    if how == "linear":
        return _between(np.linspace(0, old - 1, N), old).astype(P_ND.dtype) @ P_ND
    return _grid(P_ND, N)


def _between(place: np.ndarray, old: int) -> np.ndarray:
    """The matrix that interpolates `old` rows at the given places, which are held between the first and the last."""
    place = np.clip(place, 0, old - 1)
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(old)[None]))


def _grid(P_ND: np.ndarray, N: int) -> np.ndarray:
    first, old = _class_token_and_side(P_ND.shape[0])
    also_first, new = _class_token_and_side(N)
    if first != also_first or 0 in (old, new):
        raise errors.UserError(
            f"{P_ND.shape[0]} and {N} positions are not two square grids, both with a class token or both without"
        )
    one_way = _between((np.arange(new) + 0.5) * old / new - 0.5, old)
    both = np.kron(one_way, one_way).astype(P_ND.dtype)
    return np.concatenate([P_ND[:first], both @ P_ND[first:]])


def _class_token_and_side(N: int) -> tuple[int, int]:
    """(0 or 1 class tokens, side of the square grid), with side 0 where there is no such grid."""
    for first in (0, 1):
        if N > first and math.isqrt(N - first) ** 2 == N - first:
            return first, math.isqrt(N - first)
    return 0, 0
