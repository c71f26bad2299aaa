"""Symmetry and directionality once more, slowly: float64, plain loops over every index.

The bilinear form of a head is M = W_q W_k^T, as Saponati et al. 2025 write it: tokens are rows there, and W_q is D x K.
"""

import math

import numpy as np
import reference


def form(W_q, W_k) -> np.ndarray:
    """M = sum_h W_q,h W_k,h^T over these heads."""
    D = len(W_q[0])
    M = reference.zeros(D, D)
    for one, other in zip(W_q, W_k, strict=True):
        M += reference.product(one, reference.transpose(other))
    return M


def squares(M) -> float:
    """|M|^2."""
    return sum(x * x for row in reference.floats(M) for x in row)


def symmetry(M) -> float:
    """(|S|^2 - |N|^2) / |M|^2 for the symmetric part S and the skew part N of M."""
    S, N = reference.zeros(*M.shape), reference.zeros(*M.shape)
    for i in range(len(M)):
        for j in range(len(M)):
            S[i, j], N[i, j] = (M[i, j] + M[j, i]) / 2, (M[i, j] - M[j, i]) / 2
    return (squares(S) - squares(N)) / squares(M)


def excess(norms: list[float]) -> float:
    """What the norms have beyond their mean plus two standard deviations, added up."""
    mean = sum(norms) / len(norms)
    variance = sum((norm - mean) ** 2 for norm in norms) / (len(norms) - 1)
    threshold = mean + 2 * math.sqrt(variance)
    return sum(norm - threshold for norm in norms if norm > threshold)


def directionality(M) -> float:
    """(R - C) / (R + C) from the norms of rows and columns."""
    rows = [math.sqrt(squares([row])) for row in M]
    columns = [math.sqrt(squares([column])) for column in reference.transpose(M)]
    R, C = excess(rows), excess(columns)
    return (R - C) / (R + C) if R + C else 0.0
