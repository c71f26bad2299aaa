"""A table of learned positions for another number of positions, by a named rule."""

import math

import numpy as np


def resize(P_ND: np.ndarray, N: int, rule: str) -> np.ndarray | None:
    """The table for N positions.

    cut: its first N rows. linear: between the first and the last row, which stay, by straight lines.
    grid: the rows are a square grid of patches in reading order (and before them a class token, where there is one
    more row than a square has; it stays), interpolated bilinearly between the centres of patches. None where they
    are not two such grids, both with a class token or both without.
    """
    old = P_ND.shape[0]
    if rule == "cut":
        return P_ND[:N]
    if rule == "linear":
        return _between(np.linspace(0, old - 1, N), old).astype(P_ND.dtype) @ P_ND
    (first, old_side), (also_first, side) = _class_token_and_side(old), _class_token_and_side(N)
    if first != also_first or 0 in (old_side, side):
        return None
    one_way = _between((np.arange(side) + 0.5) * old_side / side - 0.5, old_side)
    both = np.kron(one_way, one_way).astype(P_ND.dtype)
    return np.concatenate([P_ND[:first], both @ P_ND[first:]])


def _between(place: np.ndarray, old: int) -> np.ndarray:
    """The matrix that interpolates `old` rows at the given places, which are held between the first and the last."""
    place = np.clip(place, 0, old - 1)
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(old)[None]))


def _class_token_and_side(N: int) -> tuple[int, int]:
    """(0 to 2 class tokens, side of the square grid), with side 0 where there is no such grid."""
    for first in (0, 1, 2):
        if N > first and math.isqrt(N - first) ** 2 == N - first:
            return first, math.isqrt(N - first)
    return 0, 0
