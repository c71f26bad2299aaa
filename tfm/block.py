"""The transformer block: stages across tokens and across features, each with a residual connection (E13).

`Parts` says which function fills each place. What the tree holds decides the rest: biases where there are bias leaves,
cross-attention where there are `score_cross` and `value_cross` (E26).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tfm import dropout, initial, norm, shapes, variant
from tfm import layout as layouts
from tfm.attention import heads
from tfm.attention import mask as masks


class Parts(NamedTuple):
    """The function that fills each place of a block, and the numbers that go with them."""

    attention: heads.Parts
    norm: norm.Norm
    mlp: variant.Variant
    order: Callable[[jax.Array, Callable, Callable], tuple[jax.Array, Any, Any]]
    eps: float = 1e-5  # inside the root of the norms
    dropout: float = 0.0  # share of a stage's output that is set to 0 in training
    score_std: float | jax.Array = 1.0  # factor on the initial scale of the score's matrices, the leaves U...


class Memory(NamedTuple):
    """What a decoder attends to: the encoder's tokens, and which of them are real."""

    x_BSD: jax.Array
    mask: masks.Mask | None


def init(
    key: jax.Array, *, D: int, H: int, K: int, F: int, M: int, N: int, parts: Parts, bias: bool, cross: bool = False
) -> dict:
    """Parameters of one block; M, the depth of the stack, sets the initial scale of the output projections."""

    def made(name: str, variant: Any, **sizes: Any) -> dict:
        return {name: variant.init(initial.key(key, name), **sizes)}

    def attend(suffix: str) -> dict:
        score = made(f"score{suffix}", heads.score, H=H, K=K, D=D, bias=bias)
        return scaled(score, parts.score_std) | made(f"value{suffix}", heads.value, H=H, K=K, D=D, M=M, bias=bias)

    heads = parts.attention
    params = made("norm1", parts.norm, D=D) | attend("")
    params |= made("relative_position", heads.relative_position, H=H, K=K, N=N)
    if cross:
        params |= made("norm_cross", parts.norm, D=D) | attend("_cross")
    return params | made("norm2", parts.norm, D=D) | made("mlp", parts.mlp, D=D, F=F, M=M, bias=bias)


def scaled(score: dict, std: float | jax.Array) -> dict:
    """The score's parameters with a factor on the matrices U that make queries and keys."""

    def times(path: Any, leaf: jax.Array) -> jax.Array:
        return std * leaf if shapes.names(path)[-1].startswith("U") else leaf

    return jax.tree_util.tree_map_with_path(times, score)


# order(x, residual, norm) -> (x, aux, statistics): residual also returns what is to be seen of it, and norm the
# statistics of the batch.


def pre_norm(x_BND: jax.Array, residual: Callable, norm: Callable) -> tuple[jax.Array, Any, Any]:
    """x + res(LN(x)): with attention, then the MLP, as res, these are the two lines of E18."""
    y_BND, statistics = norm(x_BND)
    y_BND, aux = residual(y_BND)
    return x_BND + y_BND, aux, statistics


def post_norm(x_BND: jax.Array, residual: Callable, norm: Callable) -> tuple[jax.Array, Any, Any]:
    """LN(x + res(x)): the two lines of E19."""
    y_BND, aux = residual(x_BND)
    y_BND, statistics = norm(x_BND + y_BND)
    return y_BND, aux, statistics


ORDERS = {"pre_norm": pre_norm, "post_norm": post_norm}


def apply(
    params: dict,
    x_BND: jax.Array,
    *,
    parts: Parts,
    mask: masks.Mask | None,
    n: jax.Array | None = None,
    memory: Memory | None = None,
    cache: dict | None = None,
    key_B: jax.Array | None = None,
    layout: layouts.Layout = layouts.ONE,
    maps: bool = False,
    keep: bool = False,
) -> tuple[jax.Array, dict]:
    """One block (E18, E19; with `memory` a decoder's block, E26): the tokens, and what was seen on the way.

    n: the tokens' positions, (N,) or (B, N); None: 0 .. N-1. key_B: a random key for each sequence in training, None
    in evaluation. cache: the keys and values of earlier tokens, from `keep` or from the step before. layout: which
    devices share the model, inside shard_map.
    Seen are `A`, `A_cross` with maps (the weights, (B, H, N, S)), `cache` with keep or a cache, and `running`, the
    statistics of norms that keep running averages, in training.
    """
    params = layouts.gathered(params, layout)
    past = {"self": None, "cross": None} if cache is None else cache
    call = {"parts": parts.attention, "layout": layout}

    def attend(x: jax.Array) -> tuple[jax.Array, tuple]:
        y, *aux = heads.self_attention(params, x, mask=mask, n=n, cache=past["self"], **call)
        return y, aux

    def cross(x: jax.Array) -> tuple[jax.Array, tuple]:
        own = {name: params[f"{name}_cross"] for name in ("score", "value")}
        y, *aux = heads.cross_attention(own, x, memory=memory, cache=past["cross"], **call)
        return y, aux

    def feed(x: jax.Array) -> tuple[jax.Array, tuple]:
        return layouts.on(layout, parts.mlp)(params["mlp"], x), ()

    stages = {"attention": (attend, "norm1"), "cross": (cross, "norm_cross"), "mlp": (feed, "norm2")}
    if "score_cross" not in params:
        del stages["cross"]
    aux, running = {}, {}
    for name, (residual, norm_name) in stages.items():
        x_BND, aux[name], running[norm_name] = parts.order(
            x_BND,
            _dropped(name, residual, parts=parts, key_B=key_B, layout=layout),
            lambda x, name=norm_name: statistical_norm(params[name], x, parts=parts, key_B=key_B, layout=layout),
        )
    result: dict = {"running": {name: statistics for name, statistics in running.items() if statistics}}
    if maps:
        result |= {name: aux[stage][0] for name, stage in (("A", "attention"), ("A_cross", "cross")) if stage in aux}
    if keep or cache is not None:
        both = (("self", "attention"), ("cross", "cross"))
        result["cache"] = {name: aux[stage][1] for name, stage in both if stage in aux}
    return x_BND, result


def _dropped(name: str, residual: Callable, *, parts: Parts, key_B, layout: layouts.Layout) -> Callable:
    """The stage `name`, with dropout of what it adds to the tokens."""

    def run(x_BND: jax.Array) -> tuple[jax.Array, Any]:
        with jax.named_scope(name):
            y_BND, aux = residual(x_BND)
            return dropout.drop(keys(key_B, name), y_BND, parts.dropout, layout=layout), aux

    return run


def statistical_norm(
    params: dict, x_BND: jax.Array, *, parts: Parts, key_B: jax.Array | None, layout: layouts.Layout
) -> tuple[jax.Array, dict]:
    """The norm; in training with the batch's own statistics where it has any, which are returned beside it (E17)."""
    observe = getattr(parts.norm, "observe", None)
    statistics = observe(x_BND, layout=layout) if key_B is not None and observe is not None else {}
    return layouts.on(layout, parts.norm)(params | statistics, x_BND, eps=parts.eps), statistics


def keys(key_B: jax.Array | None, name: str) -> jax.Array | None:
    """The random keys of the stage `name`, one for each sequence."""
    return None if key_B is None else jax.vmap(lambda key: initial.key(key, name))(key_B)
