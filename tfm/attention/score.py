"""How two tokens are compared: a score turns tokens into the queries and keys whose product is the logit.

l_{n,s} = scale * q_n . k_s, where n attends to s. A score is `(init, apply)`:
`init(key, *, H, K, D, bias) -> params` and `apply(params, x_BND, x_BSD) -> (q_BHNK, k_BHSK)`; a head axis of size one
is shared by all heads. In self-attention both arguments are the same array. `Score` says what else a score may declare.

| score                       | l_{n,s}, unscaled, without biases | parameters a head | from                           |
|-----------------------------|-----------------------------------|-------------------|--------------------------------|
| none                        | x_n . x_s                         | 0                 | E4                             |
| tied                        | U x_n . U x_s                     | D K               | E5                             |
| tied_keynorm                | U x_n . U x_s sqrt(K) / |U x_s|   | D K               | Kitaev et al. 2020; others only|
| tied_wide                   | as tied, of 2 K features          | 2 D K             | as many as asymmetric          |
| tied_signed                 | U x_n . (sigma * U x_s)           | D K + K           | symmetric, but not definite    |
| l2_tied                     | -|U x_n - U x_s|^2                | D K               | Kim et al. 2021                |
| pairwise                    | U x_n . P U x_s                   | D K + K^2         | Courtois et al. 2024           |
| pairwise_sym                | U x_n . (P + P^T)/2 U x_s         | D K + K^2         | Courtois et al. 2024           |
| identity_query              | x_n, cut into heads, . U_k x_s    | D K               | Karbevski 2025                 |
| nonlinear_query             | (x_n + f(x_n))/2, cut, . U_k x_s  | 2 D K             | Karbevski 2026                 |
| asymmetric, asymmetric_std  | U_q x_n . U_k x_s                 | 2 D K             | E6; with the next one's std    |
| symmetric_init              | the same, at first U_k = U_q      | 2 D K             | Saponati et al. 2025           |
| asymmetric_qknorm           | RMS(U_q x_n) . RMS(U_k x_s)       | 2 D K + 2 K shared| Henry et al. 2020; Qwen3       |
| constant                    | 0                                 | 0                 | E28                            |

Keys of a matrix of their own, U_k, may be shared by the heads of a group (groups.py): then they are D K parameters a
group, and in symmetric_init the heads of a group also begin with one U_q.

Initial values make the logits of a query with the keys of other tokens vary alike, with variance 1, where tokens are
independent, of mean 0 and of D features of variance 1, as a token norm makes them, and where the scale is
1/sqrt(the features of a query).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import initial, linear, mlp, norm
from tfm.attention import groups, score_symmetric as one

Pair = tuple[jax.Array, jax.Array]  # queries and keys, or the factors of a bilinear form


class Score(NamedTuple):
    """`init` and `apply` as above, and what else is known of the comparison.

    factors(params, *, D) -> (Uq_HKD, Uk_HKD): the bilinear form of head h is M_h = U_q,h^T U_k,h, so that
    l_{n,s} = x_n^T M_h x_s without biases and scale; None: there is no such form.
    attend_to_self: whether a token attends to itself if it may attend to others too (heads.py).
    supports_rope: whether rotary positions may turn queries and keys (relative_position.py). They may if all features
    are of one kind and only the product of two tokens is used: not if one of them is a square or a 1.
    supports_gqa: whether `init` also takes G, the number of heads of keys (groups.py).
    takes_eps: whether `apply` also takes eps, the number inside the root of its norms.
    """

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., Pair]
    factors: Callable[..., Pair] | None = None
    attend_to_self: bool = True
    supports_rope: bool = False
    supports_gqa: bool = False
    takes_eps: bool = False


def _none(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """A proportional to exp(x_s^T x_n): queries and keys are the tokens, K = D, one map for all heads (E4)."""
    return x_BND[:, None], x_BSD[:, None]


def _constant(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """All logits 0: the weights follow from positions alone, from a mask or a relative position's bias (E28)."""
    return jnp.zeros_like(x_BND[:, None, :, :1]), jnp.zeros_like(x_BSD[:, None, :, :1])


def _asymmetric(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """A proportional to exp(x_s^T U_k^T U_q x_n): q_n = U_q x_n + b_q, k_s = U_k x_s + b_k (E6, biases E11)."""
    return linear.matmul_heads(x_BND, params["Uq_HKD"], params.get("bq_HK")), groups.heads(params, "k", x_BSD)


def _qknorm(params: dict, x_BND: jax.Array, x_BSD: jax.Array, *, eps: float = 1e-5) -> Pair:
    """q_n = RMS(U_q x_n + b_q) * g_q, k_s = RMS(U_k x_s + b_k) * g_k, over the features of each head, with gains that
    all heads share: no logit passes |g_q| |g_k| sqrt(K) (Henry et al. 2020; with RMS norms as in Qwen3)."""
    q_BHNK, k_BHSK = _asymmetric(params, x_BND, x_BSD)
    return tuple(
        norm.rms.apply({"gain_D": params[gain]}, x, eps=eps) for gain, x in (("gainq_K", q_BHNK), ("gaink_K", k_BHSK))
    )


def _nonlinear_query(params: dict, x_BND: jax.Array, x_BSD: jax.Array, *, eps: float = 1e-5) -> Pair:
    """q_n = (x_n + f(x_n)) / 2, cut into heads, f(x) = LN(W_2 gelu(W_1 RMS(x))) with D/2 hidden units, I: as many
    weights as U_q of all heads has (Karbevski 2026, with the half of its second version); norms have gains alone."""
    h_BNI = mlp.exact_gelu(
        linear.matmul(norm.rms.apply({"gain_D": params["gain1_D"]}, x_BND, eps=eps), params["W1_ID"])
    )
    f_BND = norm.token.apply({"gain_D": params["gain2_D"]}, linear.matmul(h_BNI, params["W2_DI"]), eps=eps)
    return one.identity_query(params, (x_BND + f_BND) / 2, x_BSD)


# ------------------------------------------------------------------------------------------- parameters and their forms


def _init(*biases: str, **std: Callable[[int, int], float]) -> Callable[..., dict]:
    """The `init` of matrices of normal numbers, whose standard deviations follow from (K, D), and of biases."""

    def init(key: jax.Array, *, H: int, K: int, D: int, bias: bool, G: int | None = None) -> dict:
        sizes, params = {"H": H, "G": G, "K": K, "D": D, "Q": 2 * K}, {}
        for name, of in std.items():
            params |= initial.normal(key, groups.named(name, H, G), of(K, D), **sizes)
        for name in biases if bias else ():
            params |= initial.zeros(groups.named(name, H, G), **sizes)
        return params

    return init


def _unit(K: int, D: int) -> float:
    """Of either of two matrices that are independent."""
    return D**-0.5


def _narrow(K: int, D: int) -> float:
    """In the published code of Saponati et al. 2025, matrices that begin with U_k = U_q are drawn as PyTorch draws any,
    with this, and the others as BERT's, with 0.02: at D = 256 the first are 1.8 times larger. Here the first is theirs.
    """
    return 3**-0.5 * D**-0.5


def _tied(K: int, D: int) -> float:
    """Entries of N(0, 1/D) would give logits of the variance E tr((U^T U)^2)/K = (D + K + 1)/D, not 1."""
    return (D * (D + K + 1)) ** -0.25


def _l2(K: int, D: int) -> float:
    """With entries of N(0, s^2) the variance over the keys of one query is 4 tr(C^2) from u_n . u_s, C = U U^T, and
    2 s^4 K D (D - 1) from |u_s|^2, together s^4 K D (6 D + 4 K + 2); and the scale is 1/sqrt(K + 4).
    """
    return ((K + 4) / (K * D * (6 * D + 4 * K + 2))) ** 0.25


def _signed_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    sign_K = jnp.where(jnp.arange(K) < (K + 1) // 2, 1.0, -1.0)  # indefinite from the start; variance 1 + 1/D
    return _init("b_HK", U_HKD=_unit)(key, H=H, K=K, D=D, bias=bias) | {"sigma_HK": jnp.tile(sign_K, (H, 1))}


def _identity_query_init(key: jax.Array, *, H: int, K: int, D: int, **more: Any) -> dict:
    if D != H * K:
        raise ValueError(f"queries that are the token cut into heads need D = H K, and {D} is not {H} x {K}")
    return _init("bk_GK", Uk_GKD=_unit)(key, H=H, K=K, D=D, **more)


def _nonlinear_query_init(key: jax.Array, *, D: int, **sizes: Any) -> dict:
    """Half the sum of two independent tokens has half their variance, which the keys make up for."""
    params, I = initial.scaled(identity_query.init(key, D=D, **sizes), 2**0.5, "U"), max(1, D // 2)  # noqa: E741
    params |= initial.normal(key, "W1_ID", D**-0.5, I=I, D=D) | initial.normal(key, "W2_DI", I**-0.5, I=I, D=D)
    return params | {"gain1_D": jnp.ones(D), "gain2_D": jnp.ones(D)}


def _qknorm_init(key: jax.Array, *, K: int, **sizes: Any) -> dict:
    return asymmetric.init(key, K=K, **sizes) | {"gainq_K": jnp.ones(K), "gaink_K": jnp.ones(K)}


def _symmetric_init(key: jax.Array, *, H: int, G: int | None = None, **sizes: Any) -> dict:
    params, share = asymmetric_std.init(key, H=H, G=G, **sizes), H // (G or H)
    Uk_GKD = params["Uq_HKD"][::share]
    # A training step may give away an array only once.
    return params | {"Uq_HKD": jnp.repeat(Uk_GKD, share, 0), groups.named("Uk_GKD", H, G): Uk_GKD.copy()}


def _factors(params: dict, *, D: int) -> Pair:
    """U_q and U_k, by the names of the leaves; where there is none of queries it is the identity, cut into heads. That
    of a group's keys is repeated for its heads."""
    U = params.get("U_HKD", params.get("U_HQD"))
    Uq_HKD, Uk_HKD = params.get("Uq_HKD", U), params.get("Uk_HKD", params.get("Uk_GKD", U))
    if Uq_HKD is None:
        Uq_HKD = jnp.eye(D).reshape(-1, D if Uk_HKD is None else Uk_HKD.shape[-2], D)
    if "Uk_GKD" in params:
        Uk_HKD = jnp.repeat(Uk_HKD, len(Uq_HKD) // len(Uk_HKD), 0)
    if "sigma_HK" in params:
        Uq_HKD = params["sigma_HK"][..., None] * Uq_HKD
    if "P_HKK" in params:
        Uk_HKD = jnp.matmul(params["P_HKK"], Uk_HKD)
    return Uq_HKD, Uq_HKD if Uk_HKD is None else Uk_HKD


def _qknorm_factors(params: dict, *, D: int) -> Pair:
    """Of queries and keys before they are divided by their length, which turns none."""
    Uq_HKD, Uk_HKD = _factors(params, D=D)
    return params["gainq_K"][..., None] * Uq_HKD, params["gaink_K"][..., None] * Uk_HKD


def _pairwise_sym_factors(params: dict, *, D: int) -> Pair:
    return _factors(one.symmetric(params), D=D)


def _l2_factors(params: dict, *, D: int) -> Pair:
    """2 U^T U, beside what depends on one of the two tokens only."""
    return _factors({"U_HKD": math.sqrt(2) * params["U_HKD"]}, D=D)


# ----------------------------------------------------------------------------------------------- what a config can name

_product = functools.partial(Score, factors=_factors, supports_rope=True)

none = _product(_init(), _none)
tied = _product(_init("b_HK", U_HKD=_tied), one.tied)
# Queries have a length in tied_keynorm, keys have not; the mean of two spreads less in pairwise_sym.
tied_keynorm = _product(_init("b_HK", U_HKD=lambda K, D: (D + K - 1) ** -0.5), one.tied_keynorm, attend_to_self=False)
tied_wide = _product(_init("b_HQ", U_HQD=lambda K, D: _tied(2 * K, D)), one.tied_wide)
tied_signed = _product(_signed_init, one.tied_signed)
l2_tied = Score(_init(U_HKD=_l2), one.l2_tied, _l2_factors)  # a bias would cancel
pairwise = _product(_init("b_HK", U_HKD=_unit, P_HKK=lambda K, D: K**-0.5), one.pairwise)
_wider = _init("b_HK", U_HKD=_unit, P_HKK=lambda K, D: (2 / (K + 1)) ** 0.5)
pairwise_sym = _product(_wider, one.pairwise_sym, factors=_pairwise_sym_factors)
identity_query = _product(_identity_query_init, one.identity_query, supports_gqa=True)
nonlinear_query = Score(_nonlinear_query_init, _nonlinear_query, supports_rope=True, supports_gqa=True, takes_eps=True)
symmetric_init = _product(_symmetric_init, _asymmetric, supports_gqa=True)
asymmetric = _product(_init("bq_HK", "bk_GK", Uq_HKD=_unit, Uk_GKD=_unit), _asymmetric, supports_gqa=True)
asymmetric_std = _product(_init("bq_HK", "bk_GK", Uq_HKD=_narrow, Uk_GKD=_narrow), _asymmetric, supports_gqa=True)
asymmetric_qknorm = _product(_qknorm_init, _qknorm, factors=_qknorm_factors, supports_gqa=True, takes_eps=True)
constant = Score(_init(), _constant)

# The factor on the logits (E7) from K, the features that queries and keys really have, and D.
SCALES = {
    "1/sqrt(K)": lambda K, D: 1 / math.sqrt(K),  # seeds 001 and 004, the default
    "1/sqrt(D)": lambda K, D: 1 / math.sqrt(D),  # seed 000
    "1": lambda K, D: 1.0,  # seed 002; in seed 003 the scale is absorbed in U
}
