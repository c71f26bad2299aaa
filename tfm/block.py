"""The transformer block: stages across tokens and across features, each with a residual connection (E13).

`Design` says which function fills each place. What the tree holds decides the rest: biases where there are bias
leaves, cross-attention where there are `score_cross` and `value_cross` (E26).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tfm import dropout, initial, shapes
from tfm import layout as layouts
from tfm.attention import heads
from tfm.attention import mask as masks


class Design(NamedTuple):
    """The function that fills each place of a block; the rooms of the same names say what each must be."""

    score: Any
    value: Any
    relative_position: Any
    norm: Any
    mlp: Any
    order: Callable
    compute: Callable
    scale: Callable[[int, int], float]  # (K, D) -> the factor on the logits
    H: int  # heads, for relative positions that have no parameter of their own to tell them by
    eps: float = 1e-5  # inside the root of the norms
    dropout: float = 0.0  # share of a stage's output that is set to 0 in training
    itself: bool = True  # whether a token attends to itself where it may attend to others too
    score_std: float | jax.Array = 1.0  # factor on the initial scale of the score's matrices, the leaves U...
    layout: layouts.Layout = layouts.ONE  # which devices share the model, inside shard_map


class Memory(NamedTuple):
    """What a decoder attends to: the encoder's tokens, and which of them are real."""

    x_BSD: jax.Array
    mask: masks.Mask | None


def init(
    key: jax.Array, *, D: int, H: int, K: int, F: int, M: int, N: int, design: Design, bias: bool, cross: bool = False
) -> dict:
    """Parameters of one block; M, the depth of the stack, sets the initial scale of the output projections."""

    def part(name: str, variant: Any, **sizes: Any) -> dict:
        return {name: variant.init(initial.key(key, name), **sizes)}

    def attend(suffix: str) -> dict:
        score = part(f"score{suffix}", design.score, H=H, K=K, D=D, bias=bias)
        return scaled(score, design.score_std) | part(f"value{suffix}", design.value, H=H, K=K, D=D, M=M, bias=bias)

    params = (
        part("norm1", design.norm, D=D)
        | attend("")
        | part("relative_position", design.relative_position, H=H, K=K, N=N)
    )
    if cross:
        params |= part("norm_cross", design.norm, D=D) | attend("_cross")
    return params | part("norm2", design.norm, D=D) | part("mlp", design.mlp, D=D, F=F, M=M, bias=bias)


def scaled(score: dict, std: float | jax.Array) -> dict:
    """The score's parameters with a factor on the matrices U that make queries and keys."""

    def times(path: Any, leaf: jax.Array) -> jax.Array:
        return std * leaf if shapes.names(path)[-1].startswith("U") else leaf

    return jax.tree_util.tree_map_with_path(times, score)


def pre_norm(x_BND: jax.Array, residual: Callable, norm: Callable) -> jax.Array:
    """x + res(LN(x)): with attention, then the MLP, as res, these are the two lines of E18."""
    return x_BND + residual(norm(x_BND))


def post_norm(x_BND: jax.Array, residual: Callable, norm: Callable) -> jax.Array:
    """LN(x + res(x)): the two lines of E19."""
    return norm(x_BND + residual(x_BND))


ORDERS = {"pre_norm": pre_norm, "post_norm": post_norm}


def apply(
    params: dict,
    x_BND: jax.Array,
    *,
    design: Design,
    mask: masks.Mask | None,
    n: jax.Array | None = None,
    memory: Memory | None = None,
    cache: dict | None = None,
    key_B: jax.Array | None = None,
    maps: bool = False,
    keep: bool = False,
) -> tuple[jax.Array, dict]:
    """One block (E18, E19; with `memory` a decoder's block, E26): the tokens, and what was seen on the way.

    n: the tokens' positions, (N,) or (B, N); None: 0 .. N-1. key_B: a random key for each sequence in training, None
    in evaluation. cache: the keys and values of earlier tokens, from `keep` or from the step before.
    Seen are `A`, `A_cross` with maps (the weights, (B, H, N, S)), `cache` with keep or a cache, and `running`, the
    statistics of norms that keep running averages, in training.
    """
    seen: dict = {"running": {}}
    kept: dict = {}
    params = layouts.gathered(params, design.layout)

    def normed(name: str) -> Callable:
        return lambda x: statistical_norm(params[name], x, name=name, design=design, key_B=key_B, seen=seen["running"])

    def dropped(name: str, residual: Callable) -> Callable:
        def run(x: jax.Array) -> jax.Array:
            with jax.named_scope(name):
                return dropout.drop(keys(key_B, name), residual(x), design.dropout, layout=design.layout)

        return run

    def attend(x: jax.Array) -> jax.Array:
        y, A, kept["self"] = heads.self_attention(
            params, x, design=design, mask=mask, n=n, cache=cache and cache["self"]
        )
        seen.update({"A": A} if maps else {})
        return y

    def cross(x: jax.Array) -> jax.Array:
        own = {name: params[f"{name}_cross"] for name in ("score", "value")}
        y, A, kept["cross"] = heads.cross_attention(
            own, x, design=design, memory=memory, cache=cache and cache["cross"]
        )
        seen.update({"A_cross": A} if maps else {})
        return y

    def feed(x: jax.Array) -> jax.Array:
        return design.mlp.apply(params["mlp"], x, **shared(design))

    x_BND = design.order(x_BND, dropped("attention", attend), normed("norm1"))
    if "score_cross" in params:
        x_BND = design.order(x_BND, dropped("cross", cross), normed("norm_cross"))
    x_BND = design.order(x_BND, dropped("mlp", feed), normed("norm2"))
    if keep or cache is not None:
        seen["cache"] = kept
    return x_BND, seen


def statistical_norm(
    params: dict, x_BND: jax.Array, *, name: str, design: Design, key_B: jax.Array | None, seen: dict
) -> jax.Array:
    """The norm; in training with the batch's own statistics where it has any, which are put into `seen` (E17)."""
    observe = getattr(design.norm, "observe", None)
    if key_B is not None and observe is not None:
        seen[name] = observe(x_BND, axis=design.layout.tokens)
        params = params | seen[name]
    return design.norm.apply(params, x_BND, eps=design.eps)


def keys(key_B: jax.Array | None, name: str) -> jax.Array | None:
    """The random keys of the stage `name`, one for each sequence."""
    return None if key_B is None else jax.vmap(lambda key: initial.key(key, name))(key_B)


def shared(design: Design) -> dict[str, str]:
    """The argument of functions whose heads or hidden units may be shared by devices, where they are."""
    return {"tensor": design.layout.tensor} if design.layout.tensor else {}
