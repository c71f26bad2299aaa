"""Positions once more, slowly: float64, plain loops over every index, tokens as columns (see reference.py).

X is D x N, and column n stands at position `positions[n]`. Logits and weights are [n', n]: n attends to n'.
"""

import cmath
import math

import numpy as np
import reference


def sinusoid_columns(D: int, positions) -> np.ndarray:
    """E21 at any positions: the columns of the table that belong to them."""
    P = reference.sinusoids(D, max(positions) + 1)
    return np.array([[P[d, n] for n in positions] for d in range(D)])


def concatenated_positions(X, P, W) -> np.ndarray:
    """E21: W [x_n; p_n], the position put below the token (seed 003, "concatenating"), W of D x 2D."""
    below = [*reference.floats(X), *reference.floats(P)]
    return reference.product(W, below)


def rotary(X, positions, *, base: float = 10000.0, halves: bool = False) -> np.ndarray:
    """Su et al. 2021: feature pair i, read as a complex number, times exp(i n theta_i), theta_i = base^(-2i/K)."""
    K, N = len(X), len(X[0])
    Y = reference.zeros(K, N)
    for n in range(N):
        for i in range(K // 2):
            first, second = (i, i + K // 2) if halves else (2 * i, 2 * i + 1)
            turned = complex(X[first][n], X[second][n]) * cmath.exp(1j * positions[n] * base ** (-2 * i / K))
            Y[first, n], Y[second, n] = turned.real, turned.imag
    return Y


def biases(of_offset, key_positions, query_positions) -> np.ndarray:
    """B[n', n] = b(n' - n), to be added to the logits."""
    B = reference.zeros(len(key_positions), len(query_positions))
    for i, key in enumerate(key_positions):
        for j, query in enumerate(query_positions):
            B[i, j] = of_offset(key - query)
    return B


def relative(b, offset: int) -> float:
    """b holds the offsets -(N-1) ... N-1; what is farther has the bias of the farthest."""
    N = (len(b) + 1) // 2
    while offset > N - 1:
        offset -= 1
    while offset < -(N - 1):
        offset += 1
    return b[N - 1 + offset]


def bucket(offset: int) -> int:
    """Raffel et al. 2020, section 2.1: 32 buckets, 16 for either direction, growing logarithmically up to 128.

    Eight single offsets 0 ... 7; then floor(8 log(distance / 8) / log(128 / 8)) of the eight wide ones.
    """
    direction = 16 if offset > 0 else 0
    distance = abs(offset)
    if distance < 8:
        return direction + distance
    if distance >= 128:
        return direction + 15
    return direction + 8 + math.floor(8 * math.log(distance / 8) / math.log(16) + 1e-9)


def alibi_slopes(H: int) -> list[float]:
    """Press et al. 2022: a geometric sequence that starts at 2^(-8/H) and has that ratio, if H is a power of two.

    Else the sequence of the power of two below, and the 1st, 3rd, 5th ... of the sequence of the power above.
    """

    def geometric(count: int) -> list[float]:
        slopes, ratio = [], 2 ** -(8 / count)
        for _ in range(count):
            slopes.append((slopes[-1] if slopes else 1) * ratio)
        return slopes

    power = 1
    while 2 * power <= H:
        power *= 2
    slopes = geometric(power)
    for i, slope in enumerate(geometric(2 * power)):
        if i % 2 == 0 and len(slopes) < H:
            slopes.append(slope)
    return slopes


def depthwise_convolution(X, kernel, offsets, *, edge: bool) -> np.ndarray:
    """E28: Y[d, n] = sum_o kernel[d][o] X[d, n + offset_o]; zeros beyond the ends, or with `edge` the last token."""
    D, N = len(X), len(X[0])
    Y = reference.zeros(D, N)
    for d in range(D):
        for n in range(N):
            for o, offset in enumerate(offsets):
                at = n + offset
                inside = 0 <= at < N
                if edge:
                    at = max(0, min(N - 1, at))
                Y[d, n] += kernel[d][o] * X[d][at] if inside or edge else 0.0
    return Y
