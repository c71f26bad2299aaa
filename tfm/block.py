"""The transformer block: one stage across tokens, one across features, each with a residual connection (E13).

`attend` maps tokens to (tokens, weights A); `feed`, `norm_1` and `norm_2` map tokens to tokens. The two orders are
functions of the same signature, and a config names one of them.
"""

from collections.abc import Callable

import jax

from tfm import initial

Tokens = Callable[[jax.Array], jax.Array]


def init(key: jax.Array, *, D: int, H: int, K: int, F: int, M: int, score, value, norm, mlp, bias: bool) -> dict:
    """Parameters of one block; M, the depth of the stack, sets the initial scale of the two output projections."""
    return {
        "norm1": norm.init(initial.key(key, "norm1"), D=D),
        "score": score.init(initial.key(key, "score"), H=H, K=K, D=D, bias=bias),
        "value": value.init(initial.key(key, "value"), H=H, K=K, D=D, M=M, bias=bias),
        "norm2": norm.init(initial.key(key, "norm2"), D=D),
        "mlp": mlp.init(initial.key(key, "mlp"), D=D, F=F, M=M, bias=bias),
    }


def pre_norm(x_BND: jax.Array, *, attend, feed: Tokens, norm_1: Tokens, norm_2: Tokens):
    """Y = X + MHSA(LN(X)); X' = Y + MLP(LN(Y)) (E18). Returns (X', A)."""
    y_BND, A = attend(norm_1(x_BND))
    x_BND = x_BND + y_BND
    return x_BND + feed(norm_2(x_BND)), A


def post_norm(x_BND: jax.Array, *, attend, feed: Tokens, norm_1: Tokens, norm_2: Tokens):
    """X <- LN(X + MHSA(X)); X <- LN(X + MLP(X)) (E19). Returns (X, A)."""
    y_BND, A = attend(x_BND)
    x_BND = norm_1(x_BND + y_BND)
    return norm_2(x_BND + feed(x_BND)), A


ORDERS = {"pre_norm": pre_norm, "post_norm": post_norm}
