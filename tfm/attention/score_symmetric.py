"""One matrix U for queries and keys: the tied score and what lies between it and two matrices, or beside both. They ask
whether a transformer needs two. score.py gives them their names.

u_n = U_h x_n + b_h; l_{n,s} is said before the scale. Initial values make the logits of a query with the keys of other
tokens vary alike, with variance 1, where tokens are independent, of mean 0 and of D features of variance 1, as a token
norm makes them, and where the scale is 1/sqrt(the features of a query).
"""

import math

import jax
import jax.numpy as jnp

from tfm import initial, linear

Pair = tuple[jax.Array, jax.Array]  # queries and keys, or the factors of score.Score


# ------------------------------------------------------------------------------------------------ queries that are keys


def drawn(key: jax.Array, std: float, *, H: int, K: int, D: int, bias: bool) -> dict:
    """{U_HKD} and, with biases, {b_HK}: in all scores here the same draws, but for the scale."""
    params = initial.normal(key, "U_HKD", std, H=H, K=K, D=D)
    return params | (initial.zeros("b_HK", H=H, K=K) if bias else {})


def tied_std(K: int, D: int) -> float:
    """Entries of N(0, 1/D) would give logits of the variance E tr((U^T U)^2)/K = (D + K + 1)/D, not 1."""
    return (D * (D + K + 1)) ** -0.25


def tied_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    return drawn(key, tied_std(K, D), H=H, K=K, D=D, bias=bias)


def tied(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """A proportional to exp(x_s^T U^T U x_n): one matrix for queries and keys, symmetric logits (E5).

    D K parameters a head.
    """
    q_BHNK = linear.heads(x_BND, params["U_HKD"], params.get("b_HK"))
    return q_BHNK, q_BHNK if x_BSD is x_BND else linear.heads(x_BSD, params["U_HKD"], params.get("b_HK"))


def tied_factors(params: dict, *, D: int) -> Pair:
    """U^T U."""
    return params["U_HKD"], params["U_HKD"]


def tied_keynorm_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    return drawn(key, (D + K - 1) ** -0.5, H=H, K=K, D=D, bias=bias)  # queries have a length here, keys have not


def tied_keynorm(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """l_{n,s} = u_n . sqrt(K) u_s / |u_s|: keys of one length, and no token attends to itself (Kitaev et al. 2020).

    D K parameters a head. No longer symmetric: each key has a scale of its own. Keys of length 1, as in that paper,
    would make logits sqrt(K) times smaller than in the other scores. A zero vector stays one, with zero gradient.
    """
    q_BHNK, u_BHSK = tied(params, x_BND, x_BSD)
    wide_BHSK = linear.wide(u_BHSK)
    square_BHS1 = jnp.sum(wide_BHSK * wide_BHSK, axis=-1, keepdims=True)
    K, some = wide_BHSK.shape[-1], square_BHS1 > 0
    k_BHSK = jnp.where(some, wide_BHSK * jax.lax.rsqrt(jnp.where(some, square_BHS1 / K, 1)), 0)
    return q_BHNK, k_BHSK.astype(u_BHSK.dtype)


def tied_wide_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    params = initial.normal(key, "U_HQD", tied_std(2 * K, D), H=H, Q=2 * K, D=D)
    return params | (initial.zeros("b_HQ", H=H, Q=2 * K) if bias else {})


def tied_wide(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """l_{n,s} = u_n . u_s (E5) with Q = 2 K features: 2 D K parameters a head, as many as `asymmetric` has."""
    return tied({name.replace("Q", "K"): leaf for name, leaf in params.items()}, x_BND, x_BSD)


def tied_wide_factors(params: dict, *, D: int) -> Pair:
    """U^T U, of Q features."""
    return params["U_HQD"], params["U_HQD"]


def tied_signed_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    sign_K = jnp.where(jnp.arange(K) < (K + 1) // 2, 1.0, -1.0)  # indefinite from the start; variance 1 + 1/D
    return drawn(key, D**-0.5, H=H, K=K, D=D, bias=bias) | {"sigma_HK": jnp.tile(sign_K, (H, 1))}


def tied_signed(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """l_{n,s} = u_n . (sigma * u_s), sigma free: symmetric, but not positive semi-definite as U^T U is.

    D K + K parameters a head. Found in no paper: it tells apart what is lost by symmetry and what by definiteness.
    """
    q_BHNK, k_BHSK = tied(params, x_BND, x_BSD)
    return params["sigma_HK"][:, None] * q_BHNK, k_BHSK


def tied_signed_factors(params: dict, *, D: int) -> Pair:
    """U^T diag(sigma) U."""
    return params["sigma_HK"][..., None] * params["U_HKD"], params["U_HKD"]


def l2_tied_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    """A bias would cancel: there is none.

    With entries of N(0, s^2) the variance over the keys of one query is 4 tr(C^2) from u_n . u_s and 2 s^4 K D (D - 1)
    from |u_s|^2, C = U U^T, together s^4 K D (6 D + 4 K + 2); and the scale is 1/sqrt(K + 4).
    """
    std = ((K + 4) / (K * D * (6 * D + 4 * K + 2))) ** 0.25
    return initial.normal(key, "U_HKD", std, H=H, K=K, D=D)


def l2_tied(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """l_{n,s} = -|U x_n - U x_s|^2 (Kim et al. 2021): D K parameters a head, symmetric, and none is above l_{n,n} = 0.

    As a product of K + 4 features: with w = sqrt(2) U x and a = |w|^2 / 2 it is w_n . w_s - a_n - a_s.
    """
    sides = [_with_square(x, params["U_HKD"]) for x in ((x_BND,) if x_BSD is x_BND else (x_BND, x_BSD))]
    (wq_BHNK, aq_BHN2), (wk_BHSK, ak_BHS2) = sides[0], sides[-1]
    q = jnp.concatenate([wq_BHNK, -aq_BHN2, jnp.ones_like(aq_BHN2)], axis=-1)
    return q, jnp.concatenate([wk_BHSK, jnp.ones_like(ak_BHS2), -ak_BHS2], axis=-1)


def _with_square(x_BND: jax.Array, U_HKD: jax.Array) -> Pair:
    """w = sqrt(2) U x, and |w|^2 / 2 as a sum of two, since it is large and differences of it count.

    The first has the 8 binary digits of bfloat16 and is exact in any product; the second has the rest, in bfloat16
    another 8 digits. The square is of w as it is rounded, which a compiler would leave out unasked.
    """
    w_BHNK = _rounded(math.sqrt(2) * linear.heads(x_BND, U_HKD), x_BND.dtype)
    wide_BHNK = linear.wide(w_BHNK)
    a_BHN1 = jnp.sum(wide_BHNK * wide_BHNK, axis=-1, keepdims=True) / 2
    high_BHN1 = jax.lax.stop_gradient(_rounded(a_BHN1, jnp.bfloat16))
    return w_BHNK, jnp.concatenate([high_BHN1, a_BHN1 - high_BHN1], axis=-1).astype(w_BHNK.dtype)


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


def l2_tied_factors(params: dict, *, D: int) -> Pair:
    """2 U^T U, beside what depends on one of the two tokens only."""
    U_HKD = math.sqrt(2) * params["U_HKD"]
    return U_HKD, U_HKD


# -------------------------------------------------------------------------------------- one matrix, and what pairs do


def pairwise_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    params = drawn(key, D**-0.5, H=H, K=K, D=D, bias=bias)
    return params | initial.normal(key, "P_HKK", K**-0.5, H=H, K=K)


def pairwise(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """l_{n,s} = u_n . P u_s, P free: D K + K^2 parameters a head, and not symmetric (Courtois et al. 2024)."""
    q_BHNK, u_BHSK = tied(params, x_BND, x_BSD)
    return q_BHNK, jnp.matmul(u_BHSK, params["P_HKK"].swapaxes(-1, -2))


def pairwise_factors(params: dict, *, D: int) -> Pair:
    """U^T P U."""
    return params["U_HKD"], jnp.matmul(params["P_HKK"], params["U_HKD"])


def pairwise_sym_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    params = drawn(key, D**-0.5, H=H, K=K, D=D, bias=bias)
    return params | initial.normal(key, "P_HKK", (2 / (K + 1)) ** 0.5, H=H, K=K)  # the mean of two spreads less


def pairwise_sym(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """l_{n,s} = u_n . (P + P^T)/2 u_s: D K + K^2 parameters a head, as `pairwise`, but symmetric and indefinite."""
    return pairwise(_symmetric(params), x_BND, x_BSD)


def pairwise_sym_factors(params: dict, *, D: int) -> Pair:
    """U^T (P + P^T)/2 U."""
    return pairwise_factors(_symmetric(params), D=D)


def _symmetric(params: dict) -> dict:
    return params | {"P_HKK": (params["P_HKK"] + params["P_HKK"].swapaxes(-1, -2)) / 2}


# ------------------------------------------------------------------------------------------- a matrix for the keys only


def identity_query_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    """ValueError unless D = H K."""
    if D != H * K:
        raise ValueError(f"queries that are the token cut into heads need D = H K, and {D} is not {H} x {K}")
    params = initial.normal(key, "Uk_HKD", D**-0.5, H=H, K=K, D=D)
    return params | (initial.zeros("bk_HK", H=H, K=K) if bias else {})


def identity_query(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """l_{n,s} = x_n^(h) . (U_k x_s + b_k), x^(h) the features hK ... (h+1)K-1 of x: D K parameters (Karbevski 2025)."""
    H, K, _ = params["Uk_HKD"].shape
    q_BHNK = x_BND.reshape(*x_BND.shape[:-1], H, K).swapaxes(-2, -3)
    return q_BHNK, linear.heads(x_BSD, params["Uk_HKD"], params.get("bk_HK"))


def identity_query_factors(params: dict, *, D: int) -> Pair:
    """U_q is the identity, cut into heads."""
    return jnp.eye(D).reshape(params["Uk_HKD"].shape), params["Uk_HKD"]
