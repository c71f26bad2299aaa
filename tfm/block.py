"""The transformer block: stages across tokens and across features, each with a residual connection (E13).

`Parts` says which function fills each place. What the tree holds decides the rest: biases where there are bias leaves,
cross-attention where there are `score_cross` and `value_cross` (E26).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import initial, layout as layouts, norm, variant
from tfm.attention import heads, mask as masks


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


# What `bias` may be, and the stages that then have biases; the output is that of attention, b_o.
BIASES = {
    "all": ("score", "value", "output", "mlp"),
    "none": (),
    "attention": ("score", "value", "output"),
    "mlp": ("mlp",),
    "qkv": ("score", "value"),  # of queries, keys and values alone
}


def biased(stage: str, bias: bool | str) -> bool:
    """Whether this stage has biases; `bias` is one of BIASES, or True for all and False for none."""
    return bias if isinstance(bias, bool) else stage in BIASES[bias]


def init(
    key: jax.Array, *, D: int, H: int, K: int, F: int, M: int, N: int, parts: Parts, bias: bool | str, cross=False
) -> dict:
    """Parameters of one block; M, the depth of the stack, sets the initial scale of the output projections. bias: one
    of BIASES. cross: with cross-attention."""
    attention, params = parts.attention, {}
    M = 0.5 if parts.order is plain else M  # 1/sqrt(2 M) = 1 of what stands alone, where others are 2 M terms of a sum

    def add(name: str, part: Any, **sizes: Any) -> None:
        params[name] = part.init(initial.key(key, name), **sizes)

    for suffix in ("", "_cross") if cross else ("",):
        add(f"norm{suffix or 1}", parts.norm, D=D)
        add(f"score{suffix}", attention.score, H=H, K=K, D=D, bias=biased("score", bias))
        add(f"value{suffix}", attention.value, H=H, K=K, D=D, M=M, bias=biased("value", bias))
        if not biased("output", bias):
            params[f"value{suffix}"].pop("bo_D", None)
        params[f"score{suffix}"] = initial.scaled(params[f"score{suffix}"], parts.score_std, "U")
    add("relative_position", attention.relative_position, H=H, K=K, N=N)
    add("norm2", parts.norm, D=D)
    add("mlp", parts.mlp, D=D, F=F, M=M, bias=biased("mlp", bias))
    return params


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


def plain(x_BND: jax.Array, residual: Callable, norm: Callable) -> tuple[jax.Array, Any, Any]:
    """res(LN(x)): nothing is added, and the stage's output takes the tokens' place, as before seed 003 adds residual
    connections."""
    y_BND, statistics = norm(x_BND)
    y_BND, aux = residual(y_BND)
    return y_BND, aux, statistics


ORDERS = {"pre_norm": pre_norm, "post_norm": post_norm, "plain": plain}


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
    embedded: jax.Array | None = None,
) -> tuple[jax.Array, dict]:
    """One block (E18, E19; with `memory` a decoder's block, E26): the tokens, and what was seen on the way.

    n: the tokens' positions, (N,) or (B, N); None: 0 .. N-1. key_B: a random key for each sequence in training, None
    in evaluation. cache: the keys and values of earlier tokens, from `keep` or from the step before. layout: which
    devices share the model, inside shard_map. embedded: what is added to values (heads.self_attention).
    Seen are `A`, `A_cross` with maps (the weights, (B, H, N, S)), `cache` with keep or a cache, and `running`, the
    statistics of norms that keep running averages, in training.
    """
    params = layouts.gathered(params, layout)
    past = {} if cache is None else cache
    cross = {"score": params.get("score_cross"), "value": params.get("value_cross")}
    call = {"parts": parts.attention, "layout": layout}
    among = {"mask": mask, "n": n, "cache": past.get("self"), "embedded": embedded}
    attend = functools.partial(heads.self_attention, params, **among, **call)
    ask = functools.partial(heads.cross_attention, cross, memory=memory, cache=past.get("cross"), **call)
    stages = {
        "attention": (attend, "norm1"),
        "cross": (ask, "norm_cross"),
        "mlp": (lambda x_BND: (layouts.on(layout, parts.mlp)(params["mlp"], x_BND),), "norm2"),
    }
    if "score_cross" not in params:
        del stages["cross"]
    how = {"parts": parts, "key_B": key_B, "layout": layout}
    seen, running = {}, {}
    for name, (stage, norm_name) in stages.items():

        def residual(x_BND: jax.Array, name: str = name, stage: Callable = stage) -> tuple[jax.Array, Any]:
            with jax.named_scope(name):
                y_BND, *aux = stage(x_BND)
                return dropped(name, y_BND, **how), aux

        normed = functools.partial(statistical_norm, params[norm_name], **how)
        x_BND, seen[name], running[norm_name] = parts.order(x_BND, residual, normed)
    result: dict = {"running": {name: statistics for name, statistics in running.items() if statistics}}
    if maps:
        result |= {name: seen[stage][0] for name, stage in (("A", "attention"), ("A_cross", "cross")) if stage in seen}
    if keep or cache is not None:
        both = (("self", "attention"), ("cross", "cross"))
        result["cache"] = {name: seen[stage][1] for name, stage in both if stage in seen}
    return x_BND, result


def statistical_norm(
    params: dict, x_BND: jax.Array, *, parts: Parts, key_B: jax.Array | None, layout: layouts.Layout
) -> tuple[jax.Array, dict]:
    """The norm; in training with the batch's own statistics where it has any, which are returned beside it (E17)."""
    observe = getattr(parts.norm, "observe", None)
    statistics = observe(x_BND, layout=layout) if key_B is not None and observe is not None else {}
    return layouts.on(layout, parts.norm)(params | statistics, x_BND, eps=parts.eps), statistics


def dropped(
    name: str, x_BND: jax.Array, *, parts: Parts, key_B: jax.Array | None, layout: layouts.Layout = layouts.ONE
) -> jax.Array:
    """Dropout of the stage `name` (Srivastava et al. 2014): each number is 0 with probability parts.dropout, p, else
    x / (1 - p), so that the mean stays what it was.

    The zeros of a sequence depend on its own random key and the stage alone, not on its neighbours, the number of
    devices or the parts of an accumulation. Of a sequence whose tokens devices share, each draws the zeros of all and
    takes its own. Without keys (evaluation) or at rate 0 the result is x. ValueError for a rate outside [0, 1).
    """
    if not 0 <= parts.dropout < 1:
        raise ValueError(f"a dropout rate of {parts.dropout}; it must be at least 0 and less than 1")
    if key_B is None or parts.dropout == 0:
        return x_BND
    _, N, D = x_BND.shape
    N = N * jax.lax.axis_size(layout.sequence) if layout.sequence else N
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - parts.dropout, (N, D)))(keys(key_B, name))
    return jnp.where(layouts.own(keep, layout), x_BND / (1 - parts.dropout), 0)


def keys(key_B: jax.Array | None, name: str) -> jax.Array | None:
    """The random keys of the stage `name`, one for each sequence."""
    return None if key_B is None else jax.vmap(lambda key: initial.key(key, name))(key_B)
