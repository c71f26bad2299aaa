"""The scores once more, slowly: float64, plain loops, tokens as columns (see reference.py), one head at a time.

L[n', n] is the logit with which n attends to n', before the scale. X_key and X_query are D x tokens; the parameters are
one head's, by the letters of the papers: U, b (beta), U_q, U_k, b_q, b_k, sigma, P. h: which head it is.
"""

import math
from collections.abc import Callable

import numpy as np
import reference


def tabulated(logit: Callable[[list, list], float], keys, queries) -> np.ndarray:
    """L[n', n] = logit(query n, key n') of the columns."""
    columns_key, columns_query = reference.floats(np.asarray(keys).T), reference.floats(np.asarray(queries).T)
    L = reference.zeros(len(columns_key), len(columns_query))
    for other, k in enumerate(columns_key):
        for n, q in enumerate(columns_query):
            L[other, n] = logit(q, k)
    return L


def dot(a: list, b: list) -> float:
    """a . b"""
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


def tied(X_key, X_query, *, U, h, b=None) -> np.ndarray:
    """(U x_n' + b) . (U x_n + b), of however many rows U has (Turner's symmetric weights)."""
    return reference.symmetric_logits(X_key, X_query, U, b)


def tied_keynorm(X_key, X_query, *, U, h, b=None) -> np.ndarray:
    """Kitaev et al. 2020: keys are the queries divided by their length; here then times sqrt(K)."""

    def logit(q: list, u: list) -> float:
        return dot(q, u) / math.sqrt(dot(u, u)) * math.sqrt(len(u))

    return tabulated(logit, reference.affine(U, X_key, b), reference.affine(U, X_query, b))


def tied_signed(X_key, X_query, *, U, sigma, h, b=None) -> np.ndarray:
    """sum_k sigma_k u_k(n') u_k(n)."""

    def logit(q: list, k: list) -> float:
        return sum(sigma[i] * q[i] * k[i] for i in range(len(q)))

    return tabulated(logit, reference.affine(U, X_key, b), reference.affine(U, X_query, b))


def l2_tied(X_key, X_query, *, U, h) -> np.ndarray:
    """Kim et al. 2021, equation 4 with W^Q = W^K: minus the squared distance of U x_n' and U x_n."""

    def logit(q: list, k: list) -> float:
        return -sum((q[i] - k[i]) ** 2 for i in range(len(q)))

    return tabulated(logit, reference.affine(U, X_key), reference.affine(U, X_query))


def pairwise(X_key, X_query, *, U, P, h, b=None) -> np.ndarray:
    """sum_ij u_i(n) P_ij u_j(n'): row i of P belongs to the query."""

    def logit(q: list, k: list) -> float:
        return sum(q[i] * P[i][j] * k[j] for i in range(len(q)) for j in range(len(k)))

    return tabulated(logit, reference.affine(U, X_key, b), reference.affine(U, X_query, b))


def pairwise_sym(X_key, X_query, *, U, P, h, b=None) -> np.ndarray:
    """`pairwise` with the symmetric part of P."""
    K = len(P)
    symmetric = [[(P[i][j] + P[j][i]) / 2 for j in range(K)] for i in range(K)]
    return pairwise(X_key, X_query, U=U, P=symmetric, h=h, b=b)


def sym_plus_skew(X_key, X_query, *, U, h, b=None) -> np.ndarray:
    """u(n') . u(n), and of the last two rows a and b of U: a(n) b(n') - b(n) a(n')."""

    def logit(q: list, k: list) -> float:
        return dot(q[:-2], k[:-2]) + q[-2] * k[-1] - q[-1] * k[-2]

    return tabulated(logit, reference.affine(U, X_key, b), reference.affine(U, X_query, b))


def asymmetric(X_key, X_query, *, Uq, Uk, h, bq=None, bk=None) -> np.ndarray:
    """(U_k x_n' + b_k) . (U_q x_n + b_q) (Turner's asymmetric weights)."""
    return reference.asymmetric_logits(X_key, X_query, Uq, Uk, bq, bk)


def identity_query(X_key, X_query, *, Uk, h, bk=None) -> np.ndarray:
    """Karbevski 2025: W_Q is the identity, so the query of head h is the h-th part of the token."""
    K = len(Uk)
    part = [reference.floats(X_query)[h * K + i] for i in range(K)]
    return tabulated(dot, reference.affine(Uk, X_key, bk), part)


OF = {
    "tied": tied,
    "tied_keynorm": tied_keynorm,
    "tied_wide": tied,
    "tied_signed": tied_signed,
    "l2_tied": l2_tied,
    "pairwise": pairwise,
    "pairwise_sym": pairwise_sym,
    "sym_plus_skew": sym_plus_skew,
    "identity_query": identity_query,
    "symmetric_init": asymmetric,
    "asymmetric": asymmetric,
    "asymmetric_std": asymmetric,
}


def logits(name: str, params: dict, X_key, X_query, h: int) -> np.ndarray:
    """L of head h, from the code's parameters."""
    own = {leaf: value[h] if "_H" in leaf else value for leaf, value in params.items()}  # or all heads'
    head = {leaf.split("_")[0]: np.asarray(value, np.float64) for leaf, value in own.items()}
    return OF[name](X_key, X_query, **head, h=h)


def without_itself(allowed) -> np.ndarray:
    """allowed[n', n] where a token attends to itself only if nothing else is allowed; queries and keys are one's."""
    kept = reference.zeros(len(allowed), len(allowed[0]))
    for n in range(len(allowed[0])):
        others = [other for other in range(len(allowed)) if allowed[other][n] and other != n]
        for other in others or [n]:
            kept[other, n] = allowed[other][n]
    return kept
