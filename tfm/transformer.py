"""The transformer: tokens, positions, M blocks, head. `init` makes the parameter tree, `apply` is the model.

params = {embed, position, blocks, head} and, if the model has them, {class, norm}, and {norm, up} in embed: what is
optional is read off the tree. `Spec` has the function for each of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import (
    block as blocks,
    embed as embeds,
    head as heads,
    initial,
    layout as layouts,
    linear,
    mlp,
    shapes,
    variant,
)
from tfm.attention import explicit
from tfm.attention.spec import Call


def _save(*names: str) -> Callable[..., bool]:
    """Return a policy of jax.checkpoint that saves products, sums over devices and arrays with one of these names.

    It saves no weight that was gathered from several devices (FSDP), which is gathered again, and nothing that is made
    element by element, which a loop would have to write in float32.
    """

    def saved(primitive: Any, *_: Any, name: str = "", **__: Any) -> bool:
        return primitive.name in ("dot_general", "psum", "psum_invariant") or name in names

    return saved


# What the backward pass computes again: norms; also what an MLP makes of its products; all of a block.
REMAT = {
    "none": _save("product", "attention", "statistic", "activation"),
    "products": _save("product", "attention", "statistic"),
    "full": None,
}
KEEP_FLOAT32 = ("mean_D", "var_D", "mean_N", "var_N", "b_HR")  # running averages, and what is added to logits


class Spec(NamedTuple):
    """The function that fills each place of a model, and how its layers are computed."""

    embed: variant.Variant
    position: variant.Variant
    block: blocks.Spec
    head: variant.Variant
    activation: Callable[[jax.Array], jax.Array] = mlp.exact_gelu  # of the layer before the head, if any
    cap: float = 0.0  # soft cap of the head's logits; 0: none (explicit.capped)
    share: int = 1  # so many successive layers have the same parameters (Lan et al. 2020, section 3.1)
    dtype: Any = None  # of products and tokens; None: that of the parameters
    remat: str = "none"  # what the backward pass computes again (REMAT)
    unroll: int | bool = True  # of lax.scan over the layers; True unrolls all, 1.15 to 1.25 times faster on a CPU


def init(
    key: jax.Array,
    *,
    D: int,
    spec: Spec,
    class_token: int = 0,
    embed_norm: bool = False,
    tied_output: bool = False,
    E: int = 0,
    **trunk: Any,
) -> dict:
    """Return the parameter tree for up to N tokens (class token included); trunk: as in init_trunk.

    With tied_output the head has no matrix of its own: g_w is row w of the embedding. E: features of a token up to the
    norm of the embedding, from which a matrix makes D, as `head.transform` makes E again (Lan et al. 2020, section
    3.1); 0: D.
    """
    own = {"E": E} if E else {}
    params = {
        "embed": spec.embed.init(initial.key(key, "embed"), D=D, **own),
        "head": spec.head.init(initial.key(key, "head"), D=D),
    }
    params |= init_trunk(key, D=D, spec=spec, **trunk)
    if E:
        params["position"] = spec.position.init(initial.key(key, "position"), N=trunk["N"], D=D, E=E)
    if tied_output:
        params["head"].pop("G_WE" if E else "G_WD", None)
    if embed_norm:
        params["embed"]["norm"] = spec.block.norm.init(initial.key(key, "embed_norm"), D=D, **own)
    if class_token:
        params["class"] = embeds.class_token_init(initial.key(key, "class"), D=D, many=class_token)
    return params


def init_trunk(key: jax.Array, *, M: int, D: int, N: int, spec: Spec, final_norm: bool, **sizes: Any) -> dict:
    """Return {position, blocks} and, with final_norm, {norm}: what lies between the embedding and the head. There are
    parameters of M / spec.share layers. sizes: as in block.init."""
    layer_keys = jax.vmap(lambda m: jax.random.fold_in(initial.key(key, "blocks"), m))(jnp.arange(M // spec.share))
    params = {
        "position": spec.position.init(initial.key(key, "position"), N=N, D=D),
        "blocks": jax.vmap(lambda k: blocks.init(k, D=D, M=M, N=N, spec=spec.block, **sizes))(layer_keys),
    }
    return params | ({"norm": spec.block.norm.init(initial.key(key, "norm"), D=D)} if final_norm else {})


def apply(params: dict, inputs: Any, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return the logits of tokens w_BN or patches v_BNP (or predicted pixels), and aux as `hidden` does."""
    x_BND, aux = hidden(params, inputs, spec, call)
    return logits(params, x_BND, spec, call.layout), aux


def hidden(
    params: dict, inputs: Any, spec: Spec, call: Call, caches: list[dict] | None = None
) -> tuple[jax.Array, dict]:
    """Return X^(M) after the last norm, from X^(0) (`read`) through M blocks, and what was asked for on the way.

    aux: A_MBHNS (and A_cross_MBHNS) with call.maps; `cache` with call.keep or caches, one for each layer; in training
    `running`, a tree like the parameters' with the batch statistics (E17). Softmax, statistics and logits are float32.
    """
    params = cast(params, spec.dtype)
    x_BND, call, running = read(params, inputs, spec, call)
    if caches is None:
        x_BND, seen = stack(params["blocks"], x_BND, spec, call)
    else:
        x_BND, seen = decode_stack(params["blocks"], x_BND, spec, call, caches)
    if seen.get("running"):
        running["blocks"] = seen["running"]
    if "norm" in params:
        final = layouts.gather_features(params["norm"], call.layout)
        x_BND, statistics = blocks.normalise(final, x_BND, spec.block, call)
        running |= {"norm": statistics} if statistics else {}
    names = {"A": "A_MBHNS", "A_cross": "A_cross_MBHNS", "cache": "cache"}
    aux = {name: seen[key] for key, name in names.items() if key in seen}
    return x_BND, aux | ({"running": running} if running else {})


def read(params: dict, inputs: Any, spec: Spec, call: Call) -> tuple[jax.Array, Call, dict]:
    """Return X^(0), what the tokens are and where they stand (E1, E2, E21, E25); the call with their positions; and the
    batch statistics of a norm."""
    own = {name: params[name] for name in params.keys() & {"embed", "class", "position"}}
    own, running = layouts.gather_features(own, call.layout), {}
    with jax.named_scope("embed"):
        x_BND = spec.embed.apply(own["embed"], inputs, layout=call.layout)
        if "class" in own:
            x_BND = embeds.class_token(own["class"], x_BND)
        if call.n is None:
            call = call._replace(n=layouts.positions(call.layout, x_BND.shape[1]))
        x_BND = spec.position.apply(own["position"], x_BND, call.n)
        if "norm" in own["embed"]:
            x_BND, statistics = blocks.normalise(own["embed"]["norm"], x_BND, spec.block, call)
            running |= {"embed": {"norm": statistics}} if statistics else {}
        x_BND = blocks.dropout("embed", x_BND, spec.block, call)
        if "up" in own["embed"]:
            x_BND = linear.matmul(x_BND, own["embed"]["up"]["W_DE"], own["embed"]["up"]["b_D"])
    return x_BND, call, running


def stack(layers: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """X^(m) = block(X^(m-1)), m = 1 ... M (E20), by lax.scan. Return X^(M), and what the blocks saw, stacked over
    layers. If layers share parameters, `layers` holds each of them once."""

    def layer(x_BND: jax.Array, numbered: tuple) -> tuple[jax.Array, dict]:
        m, params = numbered
        if spec.share > 1:
            params = jax.tree.map(lambda leaf: leaf[m // spec.share], layers)
        key_B = None if call.key_B is None else jax.vmap(lambda key: jax.random.fold_in(key, m))(call.key_B)
        params = layouts.gather_features(params, call.layout)
        return blocks.apply(params, x_BND, spec.block, call._replace(key_B=key_B))

    unrolled = spec.unroll is True
    if not unrolled or spec.remat != "none" or call.layout.fsdp:
        layer = jax.checkpoint(layer, policy=REMAT[spec.remat], prevent_cse=unrolled)
    m = jnp.arange(spec.share * len(jax.tree.leaves(layers)[0]))
    with jax.named_scope("blocks"):
        return jax.lax.scan(layer, x_BND, (m, layers if spec.share == 1 else None), unroll=spec.unroll)


def decode_stack(layers: Any, x_BND: jax.Array, spec: Spec, call: Call, caches: list[dict]) -> tuple[jax.Array, dict]:
    """Return X^(M) like `stack`, and the new caches: a Python loop, in which each cache is updated in place.
    layers: stacked, or a list (`unstack`)."""
    layers, new = unstack(layers), []
    with jax.named_scope("blocks"):
        for m, cache in enumerate(caches):
            x_BND, seen = blocks.apply(layers[m // spec.share], x_BND, spec.block, call._replace(cache=cache))
            new.append(seen["cache"])
    return x_BND, {"cache": new}


def unstack(stacked: Any) -> list:
    """Return the part of each layer of a tree whose leaves are stacked over layers; a list of such parts as it is."""
    if isinstance(stacked, list):
        return stacked
    return [jax.tree.map(lambda leaf, m=m: leaf[m], stacked) for m in range(len(jax.tree.leaves(stacked)[0]))]


def logits(params: dict, x_BND: jax.Array, spec: Spec, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return what the head says of X^(M) (E24-E27), softly capped, in float32."""
    with jax.named_scope("head"):
        x_BND, head = output(params, x_BND, spec, layout)
        return explicit.capped(spec.head.apply(head, x_BND, layout=layout), spec.cap)


def output(
    params: dict, x_BND: jax.Array, spec: Spec, layout: layouts.Layout = layouts.ONE
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the tokens that the output matrix maps, and the head's parameters: its matrix, which a tied head takes
    from the embedding (g_w is row w of it), and bias."""
    head = layouts.gather_features(cast(params["head"], spec.dtype), layout)
    if "transform" in head:
        own = {"activation": spec.activation, "norm": spec.block.norm, "eps": spec.block.eps}
        x_BND = heads.transform(head["transform"], x_BND, layout=layout, **own)
    if not {"G_WD", "G_WE", "G_CD", "W_PD"} & head.keys():
        rows = {name: params["embed"][name] for name in params["embed"].keys() & {"E_WD", "E_WE"}}
        head |= {"G_WD": shapes.find(layouts.gather_features(cast(rows, spec.dtype), layout), "E")}
    return x_BND, head


def cast(params: dict, dtype: Any) -> dict:
    """Return the parameters in the dtype of the products; statistics and biases of logits stay as they are. NumPy
    arrays become JAX's, since NumPy's cannot be indexed by traced token ids."""

    def convert(path: Any, leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        keep = dtype is None or path[-1].key in KEEP_FLOAT32 or not jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf if keep else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(convert, params)
