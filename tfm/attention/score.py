"""Scores: a score maps tokens to queries and keys, whose scalar product is the logit.

l_{n,s} = scale * q_n . k_s, and query n attends to key s. A score is `(init, apply)`: `init(key, *, H, K, D, bias) ->
params` and `apply(params, x_BND, x_BSD) -> (q_BHNK, k_BHSK)`. A head axis of size one is shared by all heads. In
self-attention x_BND and x_BSD are the same array. `Score` lists further properties of a score.

| score                       | l_{n,s}, unscaled, without biases | parameters / head | source                         |
|-----------------------------|-----------------------------------|-------------------|--------------------------------|
| none                        | x_n . x_s                         | 0                 | E4                             |
| tied                        | U x_n . U x_s                     | D K               | E5                             |
| tied_keynorm                | U x_n . U x_s sqrt(K) / |U x_s|   | D K               | Kitaev et al. 2020             |
| tied_wide                   | as tied, with 2 K features        | 2 D K             | not from a paper               |
| tied_signed                 | U x_n . (sigma * U x_s)           | D K + K           | not from a paper               |
| l2_tied                     | -|U x_n - U x_s|^2                | D K               | Kim et al. 2021                |
| pairwise                    | U x_n . P U x_s                   | D K + K^2         | Courtois et al. 2024           |
| pairwise_sym                | U x_n . (P + P^T)/2 U x_s         | D K + K^2         | Courtois et al. 2024           |
| sym_plus_skew:r             | tied + a skew form of rank r      | D (K + r)         | after Jamil and Kapadia 2026   |
| identity_query              | x_n, cut into heads, . U_k x_s    | D K               | Karbevski 2025                 |
| nonlinear_query             | (x_n + f(x_n))/2, cut, . U_k x_s  | 2 D K             | Karbevski 2026                 |
| asymmetric, asymmetric_std  | U_q x_n . U_k x_s                 | 2 D K             | E6; initial std differ         |
| symmetric_init              | as asymmetric, at first U_k = U_q | 2 D K             | Saponati et al. 2025           |
| asymmetric_qknorm           | RMS(U_q x_n) . RMS(U_k x_s)       | 2 D K + 2 K shared| Henry et al. 2020; Qwen3       |
| constant                    | 0                                 | 0                 | E28                            |

In tied_keynorm a token attends to itself only if it may attend to no other. tied_wide has as many parameters as
asymmetric. The heads of a group may share U_k (groups.py), which then has D K parameters per group; in symmetric_init
the heads of a group also begin with the same U_q.

The initial logits of a query with the keys of other tokens have variance 1 in all scores except asymmetric_std,
symmetric_init and constant. This assumes that tokens are independent, with D features of mean 0 and variance 1 (as
after a token norm), and that the scale is 1/sqrt(features of a query).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import initial, linear, mlp, norm, variant
from tfm.attention import groups, score_symmetric

Pair = tuple[jax.Array, jax.Array]  # queries and keys, or the factors of a bilinear form


class Score(NamedTuple):
    """`init` and `apply`, described at the top of score.py, and properties of the score.

    factors(params, *, D) -> (Uq_HKD, Uk_HKD): the bilinear form of head h is M_h = U_q,h^T U_k,h, so that
    l_{n,s} = x_n^T M_h x_s without biases and scale. None: the score has no bilinear form.
    attend_to_self: False if a token attends to itself only if it may attend to no other (relative_position.self_bias).
    supports_rope: True if rotary positions may rotate queries and keys (relative_position.py). Their features must then
    not be squares or constants, as in l2_tied.
    supports_gqa: True if `init` also takes G, the number of heads of keys (groups.py).
    takes_eps: True if `apply` also takes eps, which its norms add inside the square root.
    cuts_tokens: True if the queries are tokens, cut into heads. This needs D = H K, and all heads on each device.
    inner: the beginnings of the names of the matrices whose initial values model.score_std scales.
    measures: as in variant.py; `apply` then returns ((q, k), measures).
    """

    init: Callable[..., dict[str, Any]]
    apply: Callable[..., Pair]
    factors: Callable[..., Pair] | None = None
    attend_to_self: bool = True
    supports_rope: bool = False
    supports_gqa: bool = False
    takes_eps: bool = False
    inner: tuple[str, ...] = ("U",)
    measures: variant.Weights = ()
    cuts_tokens: bool = False


def _none(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return the tokens as queries and keys of one head, with K = D: A ~ exp(x_s^T x_n), the same in all heads (E4)."""
    return x_BND[:, None], x_BSD[:, None]


def _constant(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return zeros: the weights depend only on positions, by a mask or the bias of relative positions (E28)."""
    return jnp.zeros_like(x_BND[:, None, :, :1]), jnp.zeros_like(x_BSD[:, None, :, :1])


def _asymmetric(params: dict, x_BND: jax.Array, x_BSD: jax.Array) -> Pair:
    """Return q_n = U_q x_n + b_q and k_s = U_k x_s + b_k: A ~ exp(x_s^T U_k^T U_q x_n) (E6, biases E11)."""
    return linear.matmul_heads(x_BND, params["Uq_HKD"], params.get("bq_HK")), linear.matmul_heads(
        x_BSD, *groups.find_matrix(params, "k")
    )


def _qknorm(params: dict, x_BND: jax.Array, x_BSD: jax.Array, *, eps: float = 1e-5) -> Pair:
    """Return q_n = RMS(U_q x_n + b_q) * g_q and k_s = RMS(U_k x_s + b_k) * g_k, normalised over each head's features.

    All heads share the gains g. With scale 1/sqrt(K), no logit exceeds max|g_q| max|g_k| sqrt(K), where max is over the
    features (Henry et al. 2020; with RMS norms as in Qwen3).
    """
    q_BHNK, k_BHSK = _asymmetric(params, x_BND, x_BSD)
    q_BHNK = norm.rms.apply({"gain_D": params["gainq_K"]}, q_BHNK, eps=eps)
    return q_BHNK, norm.rms.apply({"gain_D": params["gaink_K"]}, k_BHSK, eps=eps)


def _nonlinear_query(params: dict, x_BND: jax.Array, x_BSD: jax.Array, *, eps: float = 1e-5) -> Pair:
    """Return q_n = (x_n + f(x_n)) / 2, cut into heads, and k_s = U_k x_s + b_k.

    f(x) = LN(W_2 gelu(W_1 RMS(x))) with I = D/2 hidden units has as many weights as U_q of all heads (Karbevski 2026,
    second version). LN and RMS have gains, but no shifts.
    """
    normed_BND = norm.rms.apply({"gain_D": params["gain1_D"]}, x_BND, eps=eps)
    h_BNI = mlp.exact_gelu(linear.matmul(normed_BND, params["W1_ID"]))
    f_BND = norm.token.apply({"gain_D": params["gain2_D"]}, linear.matmul(h_BNI, params["W2_DI"]), eps=eps)
    return score_symmetric.identity_query(params, (x_BND + f_BND) / 2, x_BSD)


# ------------------------------------------------------------------------------------------ initial parameters, factors


def _init(*biases: str, **std: Callable[[int, int], float]) -> Callable[..., dict]:
    """Return an `init` that draws each matrix of `std` from N(0, std[name](K, D)^2).

    biases: names of biases, which are 0; the tree has them if the argument `bias` of `init` is True.
    """

    def init(key: jax.Array, *, H: int, K: int, D: int, bias: bool, G: int | None = None) -> dict:
        sizes, params = {"H": H, "G": G, "K": K, "D": D, "Q": 2 * K}, {}
        for name, std_of in std.items():
            params |= initial.normal(key, groups.name_leaf(name, H, G), std_of(K, D), **sizes)
        for name in biases if bias else ():
            params |= initial.zeros(groups.name_leaf(name, H, G), **sizes)
        return params

    return init


def _unit(K: int, D: int) -> float:
    """Return 1/sqrt(D), the std of independent U_q and U_k for which logits have variance 1."""
    return D**-0.5


def _narrow(K: int, D: int) -> float:
    """Return 1/sqrt(3 D), the std with which Saponati et al. 2025 draw U_k = U_q: PyTorch's default.

    Their code draws all other matrices with BERT's std, 0.02; for D = 256, 1/sqrt(3 D) is 1.8 times larger.
    """
    return 3**-0.5 * D**-0.5


def _tied(K: int, D: int) -> float:
    """Return the std of U for logits of variance E tr((U^T U)^2)/K = 1; std 1/sqrt(D) would give (D + K + 1)/D."""
    return (D * (D + K + 1)) ** -0.25


def _l2(K: int, D: int) -> float:
    """Return the std s for which the logits of one query, with scale 1/sqrt(K + 4), have variance 1.

    Without the scale, 2 u_n . u_s gives variance 4 tr(C^2) with C = U U^T, and |u_s|^2 gives 2 s^4 K D (D - 1). The sum
    is s^4 K D (6 D + 4 K + 2).
    """
    return ((K + 4) / (K * D * (6 * D + 4 * K + 2))) ** 0.25


def _signed_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool) -> dict:
    # With signs of both kinds the form is indefinite from the start. The logits have variance 1 + 1/D.
    sign_K = jnp.where(jnp.arange(K) < (K + 1) // 2, 1.0, -1.0)
    return _init("b_HK", U_HKD=_unit)(key, H=H, K=K, D=D, bias=bias) | {"sigma_HK": jnp.tile(sign_K, (H, 1))}


def _skew_init(key: jax.Array, *, H: int, K: int, D: int, bias: bool, r: int) -> dict:
    # The variance of the skew form, before the scale, is r D (D - 1) std^4 = r.
    params = initial.normal(key, "U_HQD", 1.0, H=H, Q=K + r, D=D)
    std_Q1 = jnp.where(jnp.arange(K + r) < K, _tied(K, D), (D * max(1, D - 1)) ** -0.25)[:, None]
    return {"U_HQD": std_Q1 * params["U_HQD"]} | (initial.zeros("b_HQ", H=H, Q=K + r) if bias else {})


def _identity_query_init(key: jax.Array, *, H: int, K: int, D: int, **more: Any) -> dict:
    if D != H * K:
        raise ValueError(f"D = {D} is not H x K = {H} x {K}, but this score cuts tokens into heads. Choose K = D / H.")
    return _init("bk_GK", Uk_GKD=_unit)(key, H=H, K=K, D=D, **more)


def _nonlinear_query_init(key: jax.Array, *, D: int, **sizes: Any) -> dict:
    """Draw the parameters. U_k is sqrt(2) times as large as usual.

    The reason is that the query (x + f(x)) / 2 has half the variance of x.
    """
    params, I = initial.scaled(identity_query.init(key, D=D, **sizes), 2**0.5, "U"), max(1, D // 2)  # noqa: E741
    params |= initial.normal(key, "W1_ID", D**-0.5, I=I, D=D) | initial.normal(key, "W2_DI", I**-0.5, I=I, D=D)
    return params | {"gain1_D": jnp.ones(D), "gain2_D": jnp.ones(D)}


def _qknorm_init(key: jax.Array, *, K: int, **sizes: Any) -> dict:
    return asymmetric.init(key, K=K, **sizes) | {"gainq_K": jnp.ones(K), "gaink_K": jnp.ones(K)}


def _symmetric_init(key: jax.Array, *, H: int, G: int | None = None, **sizes: Any) -> dict:
    params, heads_per_group = asymmetric_std.init(key, H=H, G=G, **sizes), H // (G or H)
    Uk_GKD = params["Uq_HKD"][::heads_per_group]
    # A copy, because a training step donates its arrays to XLA, and can donate an array only once.
    return params | {"Uq_HKD": jnp.repeat(Uk_GKD, heads_per_group, 0), groups.name_leaf("Uk_GKD", H, G): Uk_GKD.copy()}


def _factors(params: dict, *, D: int) -> Pair:
    """Return U_q, multiplied by sigma if the score has it, and U_k, multiplied by P if the score has it.

    A shared U is both. If there is neither U nor U_q, U_q is the identity, cut into heads; a missing U_k is U_q. The
    U_k of a group is repeated for the heads of this group.
    """
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
    """Return (gain_q * U_q, gain_k * U_k), without the norms, which only change the lengths of queries and keys."""
    Uq_HKD, Uk_HKD = _factors(params, D=D)
    return params["gainq_K"][..., None] * Uq_HKD, params["gaink_K"][..., None] * Uk_HKD


def _pairwise_sym_factors(params: dict, *, D: int) -> Pair:
    return _factors(score_symmetric.symmetric(params), D=D)


def _l2_factors(params: dict, *, D: int) -> Pair:
    """Return the factors of 2 U^T U. The other terms of the logit depend on one of the two tokens only."""
    return _factors({"U_HKD": math.sqrt(2) * params["U_HKD"]}, D=D)


# ---------------------------------------------------------------------------------------- scores, by their config names

_bilinear = functools.partial(Score, factors=_factors, supports_rope=True)

none = _bilinear(_init(), _none)
tied = _bilinear(_init("b_HK", U_HKD=_tied), score_symmetric.tied)
# For logits of variance 1, the std of tied_keynorm allows for keys of fixed length, and that of pairwise_sym for the
# smaller variance of (P + P^T)/2.
tied_keynorm = _bilinear(
    _init("b_HK", U_HKD=lambda K, D: (D + K - 1) ** -0.5), score_symmetric.tied_keynorm, attend_to_self=False
)
tied_wide = _bilinear(_init("b_HQ", U_HQD=lambda K, D: _tied(2 * K, D)), score_symmetric.tied_wide)
tied_signed = _bilinear(_signed_init, score_symmetric.tied_signed)
l2_tied = Score(_init(U_HKD=_l2), score_symmetric.l2_tied, _l2_factors)  # no bias: it would cancel in U x_n - U x_s
pairwise = _bilinear(_init("b_HK", U_HKD=_unit, P_HKK=lambda K, D: K**-0.5), score_symmetric.pairwise)
_pairwise_sym_init = _init("b_HK", U_HKD=_unit, P_HKK=lambda K, D: (2 / (K + 1)) ** 0.5)
pairwise_sym = _bilinear(_pairwise_sym_init, score_symmetric.pairwise_sym, factors=_pairwise_sym_factors)


@functools.cache  # equal scores are the same object, so that a program is compiled once
def sym_plus_skew_of(r: int) -> Score:
    """Return the score whose logits are a symmetric form plus a skew form of rank r, which must be even."""
    return _bilinear(
        functools.partial(_skew_init, r=r),
        functools.partial(score_symmetric.sym_plus_skew, r=r),
        factors=lambda params, *, D: score_symmetric.skew_factors(params, r=r),
    )


sym_plus_skew = sym_plus_skew_of(2)
identity_query = _bilinear(_identity_query_init, score_symmetric.identity_query, supports_gqa=True, cuts_tokens=True)
nonlinear_query = identity_query._replace(
    init=_nonlinear_query_init, apply=_nonlinear_query, factors=None, takes_eps=True
)
symmetric_init = _bilinear(_symmetric_init, _asymmetric, supports_gqa=True)
asymmetric = _bilinear(_init("bq_HK", "bk_GK", Uq_HKD=_unit, Uk_GKD=_unit), _asymmetric, supports_gqa=True)
asymmetric_std = _bilinear(_init("bq_HK", "bk_GK", Uq_HKD=_narrow, Uk_GKD=_narrow), _asymmetric, supports_gqa=True)
asymmetric_qknorm = _bilinear(_qknorm_init, _qknorm, factors=_qknorm_factors, supports_gqa=True, takes_eps=True)
constant = Score(_init(), _constant)

# The factor on the logits (E7), from the numbers of features of a query, K, and of a token, D.
SCALES = {
    "1/sqrt(K)": lambda K, D: 1 / math.sqrt(K),  # Vaswani et al. 2017, Prince 2023; the default
    "1/sqrt(D)": lambda K, D: 1 / math.sqrt(D),  # Turner 2023
    "1": lambda K, D: 1.0,  # Prince 2023: the scale is part of U
}
