"""The transformer: tokens, positions, M blocks, head. `init` returns the parameter tree, `apply` is the model.

params = {embed, position, blocks, head}, optionally class (a token) and norm (after the last block), and in embed
optionally norm. A model has an optional stage if the tree has its parameters. `Spec` holds the function for each stage.
"""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tfm import (
    block as blocks,
    embed as embeds,
    head as heads,
    initial,
    layout as layouts,
    loss as losses,
    mup,
    shapes,
    variant,
)
from tfm.attention.heads import Call

SAVED = ("product", "attention", "statistic")  # products with a matrix, averages, statistics of norms


def _save(primitive: Any, *arrays: Any, name: str = "", **options: Any) -> bool:
    """Return whether jax.checkpoint saves a result: sums over devices, and results that have a name of SAVED.

    So the backward pass of a loop over layers computes the logits and weights of attention again from q and k. If a
    loop over 12 layers of ViT-S/16 saved them, a step would take 30 % longer and 14 % more memory. It also computes
    elementwise results again: with saved activations of the MLP the step takes 2 % longer and 23 % more memory
    (estimates for v5e). And it gathers weights again (FSDP).
    """
    return primitive.name in ("psum", "psum_invariant") or name in SAVED


# Policies of jax.checkpoint. Unrolled layers have none with remat = none: nothing is computed again.
REMAT = {"none": _save, "products": _save, "full": None}
KEEP_FLOAT32 = ("mean_D", "var_D", "mean_N", "var_N", "b_HR")  # running averages, and a bias of attention logits


class Spec(NamedTuple):
    """The function for each stage of a model, and settings of the computation."""

    embed: variant.Variant
    position: variant.Variant
    block: blocks.Spec
    head: heads.Head
    output_scale: float = 1.0  # factor on the output matrices of the head (mup.py)
    cap: float = 0.0  # soft cap of the head's logits; 0: none (explicit.soft_cap)
    dtype: Any = None  # dtype of products and tokens; None: the dtype of the parameters
    remat: str = "none"  # a key of REMAT
    unroll: int | bool = True  # of lax.scan over the layers; True unrolls all, 1.15 to 1.25 times faster on a CPU


def init(
    key: jax.Array,
    *,
    D: int,
    spec: Spec,
    class_token: bool = False,
    embed_norm: bool = False,
    tied_output: bool = False,
    **trunk: Any,
) -> dict:
    """Return a transformer's parameters. trunk: further arguments of `init_trunk`; its N includes the class token.

    class_token: add a class token. embed_norm: add a norm after the embedding. tied_output: the head uses the embedding
    as its matrix.
    """
    params = {
        "embed": spec.embed.init(initial.key(key, "embed"), D=D),
        "head": spec.head.init(initial.key(key, "head"), D=D),
    }
    params |= init_trunk(key, D=D, spec=spec, **trunk)
    if tied_output:
        params["head"].pop("G_WD", None)
    if embed_norm:
        params["embed"]["norm"] = spec.block.norm.init(initial.key(key, "embed_norm"), D=D)
    if class_token:
        params["class"] = embeds.class_token_init(initial.key(key, "class"), D=D)
    return params


def scale_embedding(params: dict, std: float) -> dict:
    """Return the initial parameters with embedding, learned positions and class token multiplied by `std`."""

    def scale(path: Any, leaf: jax.Array) -> jax.Array:
        *_, node, name = shapes.names(path)
        return std * leaf if node in ("embed", "class") or (node == "position" and name.startswith("P_")) else leaf

    return jax.tree_util.tree_map_with_path(scale, params)


def init_trunk(key: jax.Array, *, M: int, D: int, N: int, spec: Spec, final_norm: bool, **sizes: Any) -> dict:
    """Return {position, blocks} and, with final_norm, {norm}: the parameters between the embedding and the head.

    N: largest number of tokens. The leaves of `blocks` have a leading axis of M layers. sizes: further arguments of
    blocks.init.
    """
    layer_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(initial.key(key, "blocks"), jnp.arange(M))
    params = {
        "position": spec.position.init(initial.key(key, "position"), N=N, D=D),
        "blocks": jax.vmap(lambda k: blocks.init(k, D=D, M=M, N=N, spec=spec.block, **sizes))(layer_keys),
    }
    return params | ({"norm": spec.block.norm.init(initial.key(key, "norm"), D=D)} if final_norm else {})


def apply(params: dict, inputs: Any, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return the logits (or predicted pixels) of tokens w_BN or patches v_BNP, and aux, a dict (see `hidden`)."""
    x_BND, aux = hidden(params, inputs, spec, call)
    return logits(params, x_BND, spec, call.layout), aux


def hidden(
    params: dict, inputs: Any, spec: Spec, call: Call, caches: list[dict] | None = None
) -> tuple[jax.Array, dict]:
    """Return X^(M) after the last norm, and aux. X^(0) comes from `embed`; M blocks follow.

    caches: one for each layer; the inputs are then new tokens after the cached ones (decode/kv_cache.py). aux has
    "look" if call.look has names and `caches` is None: {name: activation} of blocks.Order, with a leading axis of
    layers M. aux has "cache", the cache of each layer, if call.keep or caches. In training it has "running": batch
    statistics of norms, at the paths of their running averages (E17). If stages have measures (variant.py), it has
    "measures": their sums over stages and layers. Softmax, statistics and logits are float32.
    """
    params, aux = cast(params, spec.dtype), collections.defaultdict(dict)
    x_BND, call = embed(params, inputs, spec, call, aux)
    if caches is None:
        x_BND, block_aux = stack(params["blocks"], x_BND, spec, call)
    else:
        x_BND, block_aux = decode_stack(params["blocks"], x_BND, spec, call, caches)
    if block_aux.get("running"):
        aux["running"]["blocks"] = block_aux["running"]
    if in_blocks := block_aux.get("measures"):
        aux["measures"] |= variant.add_measures(aux["measures"], jax.tree.map(lambda x_M: jnp.sum(x_M, 0), in_blocks))
    aux |= {"cache": block_aux.get("cache"), "look": block_aux.get("look")}
    if "norm" in params:
        final = layouts.gather_features(params["norm"], call.layout)
        x_BND = blocks.normalise("norm", final, x_BND, spec.block, call, aux)
    return x_BND, {name: values for name, values in aux.items() if values}


def embed(params: dict, inputs: Any, spec: Spec, call: Call, aux: dict) -> tuple[jax.Array, Call]:
    """Return X^(0), tokens with positions (E1, E2, E21, E25), and the call.

    If devices share sequences, call.n of the result has the positions of this device's tokens.

    aux: receives the batch statistics and the measures of the norm of the embedding, if it has one.
    """
    with jax.named_scope("embed"):
        embedding = layouts.gather_features(params["embed"], call.layout)
        x_BND = spec.embed.apply(embedding, inputs, layout=call.layout)
        if "class" in params:
            x_BND = embeds.class_token(layouts.gather_features(params["class"], call.layout), x_BND)
        if call.n is None and call.layout.sequence:
            call = call._replace(n=layouts.positions(call.layout, x_BND.shape[1]))
        code, code_n = layouts.gather_features(params["position"], call.layout), call.code_n
        x_BND = spec.position.apply(code, x_BND, call.n if code_n is None else code_n)
        if "norm" in embedding:
            x_BND = blocks.normalise("embed/norm", embedding["norm"], x_BND, spec.block, call, aux)
        return blocks.dropout("embed", x_BND, spec.block, call), call


def stack(layers: dict, x_BND: jax.Array, spec: Spec, call: Call) -> tuple[jax.Array, dict]:
    """Return X^(M), X^(m) = block(X^(m-1)) for m = 1 ... M (E20), and aux of the blocks, stacked over layers.

    layers: the parameters of the blocks, stacked over layers. aux: what the stages record (blocks.Order), such as
    "cache".
    """

    def layer(x_BND: jax.Array, m_and_params: tuple) -> tuple[jax.Array, dict]:
        m, params = m_and_params
        key_B = None if call.key_B is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(call.key_B, m)
        params = layouts.gather_features(params, call.layout)
        return spec.block.order.apply(params, x_BND, spec.block, call._replace(key_B=key_B, m=m))

    unrolled = spec.unroll is True
    if not unrolled or spec.remat != "none" or call.layout.fsdp:
        layer = jax.checkpoint(layer, policy=REMAT[spec.remat], prevent_cse=unrolled)
    m_M = jnp.arange(len(jax.tree.leaves(layers)[0]))
    with jax.named_scope("blocks"):
        return jax.lax.scan(layer, x_BND, (m_M, layers), unroll=spec.unroll)


def decode_stack(layers: Any, x_BND: jax.Array, spec: Spec, call: Call, caches: list[dict]) -> tuple[jax.Array, dict]:
    """Return X^(M) like `stack`, and {"cache": the new caches}. A Python loop lets XLA update caches in place.

    layers: the parameters of the blocks, stacked over layers or as a list (`unstack`).
    """
    new_caches = []
    with jax.named_scope("blocks"):
        for m, (params, cache) in enumerate(zip(unstack(layers), caches, strict=True)):
            layer_call = call._replace(cache=cache, m=jnp.int32(m))
            x_BND, block_aux = spec.block.order.apply(params, x_BND, spec.block, layer_call)
            new_caches.append(block_aux["cache"])
    return x_BND, {"cache": new_caches}


def unstack(stacked: Any) -> list:
    """Return a list with the tree of each layer. stacked: a tree of stacked leaves, or a list, returned unchanged."""
    if isinstance(stacked, list):
        return stacked
    return [jax.tree.map(lambda leaf, m=m: leaf[m], stacked) for m in range(len(jax.tree.leaves(stacked)[0]))]


def logits(params: dict, x_BND: jax.Array, spec: Spec, layout: layouts.Layout = layouts.ONE) -> jax.Array:
    """Return the head's logits or pixels (E24-E27), softly capped, in float32. x_BND: X^(M), as `hidden` returns it."""
    with jax.named_scope("head"):
        x_BND, head = output(params, x_BND, spec, layout)
        return spec.head.logits(head, x_BND, cap=spec.cap, layout=layout)


def loss(
    params: dict,
    x_BND: jax.Array,
    target: jax.Array,
    weight: jax.Array,
    spec: Spec,
    layout: layouts.Layout = layouts.ONE,
    *,
    sparse: bool = False,
) -> dict[str, losses.Ratio]:
    """Return {"loss", "accuracy"}, pairs (sum, count), of the head's logits of x_BND = X^(M).

    target, weight, sparse: as in heads.Head.loss.
    """
    x_BND, head = output(params, x_BND, spec, layout)
    return spec.head.loss(head, x_BND, target, weight, cap=spec.cap, sparse=sparse, layout=layout)


def output(
    params: dict, x_BND: jax.Array, spec: Spec, layout: layouts.Layout = layouts.ONE
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the input of the head's `apply` (x, after `before` if the head has it), and the head's parameters.

    If the output is tied, G_WD is the embedding. The output matrices are multiplied by spec.output_scale.
    """
    head = layouts.gather_features(cast(params["head"], spec.dtype), layout)
    if spec.head.before:
        x_BND = spec.head.before(head, x_BND, layout=layout)
    if "E_WD" in params["embed"] and not {"G_WD", "G_CD"} & head.keys():
        rows = cast({"E_WD": params["embed"]["E_WD"]}, spec.dtype)
        head |= {"G_WD": layouts.gather_features(rows, layout)["E_WD"]}
    if spec.output_scale != 1:
        matrices = [name for name in head if shapes.is_matrix(name) and mup.grows(name) == (False, True)]
        head |= {name: spec.output_scale * head[name] for name in matrices}
    return x_BND, head


def cast(params: dict, dtype: Any) -> dict:
    """Return the parameters, with the floating-point ones in `dtype` unless KEEP_FLOAT32 has their name.

    dtype: None changes no parameter.

    NumPy arrays become JAX arrays, because traced token ids cannot index NumPy arrays.
    """

    def convert(path: Any, leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        unchanged = dtype is None or path[-1].key in KEEP_FLOAT32 or not jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf if unchanged else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(convert, params)
