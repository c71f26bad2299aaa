"""The whole: tokens, positions, M blocks, head. `init` makes the parameter tree, `apply` is the model.

params = {embed, position, blocks, head} and, where the model has them, {class, norm, skips}, and {norm, up, values} in
embed: what is optional is read off the tree. `Parts` has the function for each of them.
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
    word_loss,
)
from tfm.attention import explicit


def _keeping(*names: str) -> Callable[..., bool]:
    """A policy of jax.checkpoint: products, sums over devices and what has one of these names are kept; no weight that
    was gathered from several devices (FSDP), which is gathered again, and nothing that is made of one element by
    element, which a loop would have to write in float32."""

    def kept(primitive: Any, *_: Any, name: str = "", **__: Any) -> bool:
        return primitive.name in ("dot_general", "psum", "psum_invariant") or name in names

    return kept


# What the backward pass computes again: norms; also what an MLP makes of its products; all of a block.
REMAT = {
    "none": _keeping("product", "attention", "statistic", "activation"),
    "products": _keeping("product", "attention", "statistic"),
    "full": None,
}
KEPT_WIDE = (
    "mean_D",
    "var_D",
    "mean_N",
    "var_N",
    "b_HR",
)  # running averages, and what is added to logits, keep their precision


class Parts(NamedTuple):
    """The function that fills each place of a model. init of embed and head: (key, *, D) -> params."""

    embed: variant.Variant
    position: variant.Variant
    block: blocks.Parts
    head: variant.Variant
    transform: Callable[[jax.Array], jax.Array] = mlp.exact_gelu  # activation of the layer before the head, if any
    cap: float = 0.0  # which no logit of the head passes; 0: none (explicit.capped)


def init(
    key: jax.Array,
    *,
    D: int,
    parts: Parts,
    class_token: int = 0,
    embed_norm: bool = False,
    tied_output: bool = False,
    E: int = 0,
    value_embedding: bool = False,
    **trunk: Any,
) -> dict:
    """The parameter tree for up to N tokens (class token included); trunk: as in trunk_init. With tied_output the head
    has no matrix of its own: g_w is row w of the embedding. E: features of a token up to the norm of the embedding,
    from which a matrix makes D, as `head.transformed_init` makes E again (Lan et al. 2020, section 3.1); 0: D.
    value_embedding: values get their own embedding of the word too, of zeros at first, and each head of each layer a
    weight of it, 1 at first (embed.values); for words, and values of low rank."""
    params = {name: getattr(parts, name).init(initial.key(key, name), D=D) for name in ("embed", "head")}
    params |= trunk_init(key, D=D, parts=parts, **trunk)
    if E:
        params["embed"] = parts.embed.init(initial.key(key, "embed"), D=E)
        position = parts.position.init(initial.key(key, "position"), N=trunk["N"], D=E)
        params["position"] = shapes.relettered(position, "D", "E")
    if tied_output:
        params["head"].pop("G_WE" if E else "G_WD", None)
    if embed_norm:
        params["embed"]["norm"] = parts.block.norm.init(initial.key(key, "embed_norm"), D=E or D)
    if E:
        up = initial.normal(initial.key(key, "up"), "W_DE", E**-0.5, D=D, E=E) | initial.zeros("b_D", D=D)
        params["embed"] = shapes.relettered(params["embed"], "D", "E") | {"up": up}
    if value_embedding:
        value = params["blocks"]["value"]
        name, (M, H, K, _) = next((name[3], U.shape) for name, U in value.items() if name in ("Uv_HKD", "Uv_GKD"))
        value[f"mix_{name}"] = jnp.ones((M, H))
        W = len(params["embed"]["E_WE" if E else "E_WD"])
        params["embed"]["values"] = {f"E_W{name}K": jnp.zeros((W, H, K))}
    if class_token:
        params["class"] = embeds.class_token_init(initial.key(key, "class"), D=D, many=class_token)
    return params


def trunk_init(
    key: jax.Array,
    *,
    M: int,
    D: int,
    N: int,
    parts: Parts,
    final_norm: bool,
    share: int = 1,
    skips: bool = False,
    **sizes: Any,
) -> dict:
    """{position, blocks} and, with final_norm, {norm}, with skips {skips}, whose weights are 1 at first: what lies
    between the embedding and the head. share, skips: as in `stack`; there are parameters of M / share layers."""
    layer_keys = jax.vmap(lambda m: jax.random.fold_in(initial.key(key, "blocks"), m))(jnp.arange(M // share))
    params = {
        "position": parts.position.init(initial.key(key, "position"), N=N, D=D),
        "blocks": jax.vmap(lambda k: blocks.init(k, D=D, M=M, N=N, parts=parts.block, **sizes))(layer_keys),
    }
    params |= {"skips": {"weight_U": jnp.ones(M // 2)}} if skips else {}
    return params | ({"norm": parts.block.norm.init(initial.key(key, "norm"), D=D)} if final_norm else {})


def stack(
    layers: dict,
    x_BND: jax.Array,
    *,
    parts: blocks.Parts,
    key_B: jax.Array | None = None,
    caches: list[dict] | None = None,
    layout: layouts.Layout = layouts.ONE,
    remat: str = "none",
    unroll: int | bool = True,
    share: int = 1,
    skips: dict | None = None,
    **call: Any,
) -> tuple[jax.Array, dict]:
    """X^(m) = block(X^(m-1)), m = 1..M (E20): X^(M), and what the blocks saw, stacked over layers. share: so many
    layers, one after the other, have the same parameters (Lan et al. 2020, section 3.1), which `layers` holds once.
    skips: weight_U of U = M/2 pairs of layers, as in a U-net: X^(M+1-u) = block(X^(M-u) + weight_u X^(u)), u = 1..U
    (modded-nanogpt, its record 11); then all layers are written out.

    remat: what the backward pass computes again (REMAT). unroll: how many layers of the scan are written out (True:
    all, of which the compiler keeps what it likes); on CPU writing out is 1.15-1.25 times faster at depths up to 6.
    call: mask, n, memory, maps, keep (block.apply). With caches, one for each layer, the new ones are in a list.
    """

    def layer(x_BND: jax.Array, numbered: tuple, cache: dict | None = None) -> tuple[jax.Array, dict]:
        m, params = numbered
        own_B = None if key_B is None else jax.vmap(lambda key: jax.random.fold_in(key, m))(key_B)
        return blocks.apply(params, x_BND, parts=parts, key_B=own_B, cache=cache, layout=layout, **call)

    with jax.named_scope("blocks"):
        if caches is None:
            unroll = True if skips else unroll
            if unroll is not True or remat != "none" or layout.fsdp:
                layer = jax.checkpoint(layer, policy=REMAT[remat], prevent_cse=unroll is True)
            numbers = jnp.arange(jax.tree.leaves(layers)[0].shape[0])
            if share == 1 and not skips:
                return jax.lax.scan(layer, x_BND, (numbers, layers), unroll=unroll)

            if skips:
                x_BND, seen = _through(layer, x_BND, layers_of((numbers, layers)), skips["weight_U"])
                return x_BND, jax.tree.map(lambda *each: jnp.stack(each), *seen)

            def alike(x_BND: jax.Array, numbered: tuple) -> tuple[jax.Array, dict]:
                i, params = numbered
                m = i * share + jnp.arange(share)
                return jax.lax.scan(lambda x_BND, m: layer(x_BND, (m, params)), x_BND, m, unroll=unroll)

            x_BND, aux = jax.lax.scan(alike, x_BND, (numbers, layers), unroll=unroll)
            return x_BND, jax.tree.map(lambda seen: seen.reshape(-1, *seen.shape[2:]), aux)
        each = [params for params in layers_of(layers) for _ in range(share)]
        # A loop written out: each layer's cache is updated in place.
        x_BND, seen = _through(layer, x_BND, list(enumerate(each)), skips["weight_U"] if skips else (), caches)
        return x_BND, {"cache": [aux["cache"] for aux in seen]}


def _through(layer: Callable, x_BND: jax.Array, numbered: list, weight_U: Any, caches: Any = None) -> tuple:
    """X^(M), and what each layer saw, one after the other, with the skips of these weights."""
    outputs, seen = [], []
    for m, cache in enumerate(caches or [None] * len(numbered)):
        u = len(numbered) - m - 1  # of a pair the first
        x_BND = x_BND + weight_U[u] * outputs[u] if u < len(weight_U) else x_BND
        x_BND, aux = layer(x_BND, numbered[m], cache)
        outputs.append(x_BND)
        seen.append(aux)
    return x_BND, seen


def layers_of(stacked: Any) -> list:
    """The part of each layer of a tree whose leaves are stacked over layers; of a list of such parts, these."""
    if isinstance(stacked, list):
        return stacked
    return [jax.tree.map(lambda leaf, m=m: leaf[m], stacked) for m in range(len(jax.tree.leaves(stacked)[0]))]


def hidden_states(
    params: dict,
    inputs: Any,
    *,
    parts: Parts,
    n: jax.Array | None = None,
    key_B: jax.Array | None = None,
    layout: layouts.Layout = layouts.ONE,
    **call: Any,
) -> tuple[jax.Array, dict]:
    """X^(M) after the last norm, and what was seen on the way (`apply`), from X^(0): what the input is, and where it
    stands (E1, E2, E21, E25)."""
    training, running = {"key_B": key_B, "layout": layout}, {}
    own = {name: params[name] for name in params.keys() & {"embed", "class", "position"}}
    own = layouts.gathered(own, layout)
    own = shapes.relettered(own, "E", "D") if "up" in own["embed"] else own
    with jax.named_scope("embed"):
        rows = {name: leaf for name, leaf in own["embed"].items() if name not in ("norm", "up", "values")}
        x_BND = layouts.on(layout, parts.embed)(rows, inputs)
        if "class" in own:
            x_BND = embeds.class_token(own["class"], x_BND)
        n = layouts.positions(layout, x_BND.shape[1]) if n is None else n
        x_BND = parts.position.apply(own["position"], x_BND, n)
        if "norm" in own["embed"]:
            x_BND, seen = blocks.statistical_norm(own["embed"]["norm"], x_BND, parts=parts.block, **training)
            running |= {"embed": {"norm": seen}} if seen else {}
        x_BND = blocks.dropped("embed", x_BND, parts=parts.block, **training)
        if "up" in own["embed"]:
            x_BND = linear.rows(x_BND, own["embed"]["up"]["W_DD"], own["embed"]["up"]["b_D"])
        if "values" in own["embed"]:
            call["embedded"] = embeds.values(own["embed"]["values"], inputs)
    call |= {"skips": params["skips"]} if "skips" in params else {}
    x_BND, aux = stack(params["blocks"], x_BND, parts=parts.block, n=n, **training, **call)
    running |= {"blocks": aux["running"]} if aux.get("running") else {}
    if "norm" in params:
        final = layouts.gathered(params["norm"], layout)
        x_BND, seen = blocks.statistical_norm(final, x_BND, parts=parts.block, **training)
        running |= {"norm": seen} if seen else {}
    named = {"A": "A_MBHNS", "A_cross": "A_cross_MBHNS", "cache": "cache"}
    result = {name: aux[key] for key, name in named.items() if key in aux}
    return x_BND, result | ({"running": running} if running else {})


def logits(
    params: dict, x_BND: jax.Array, *, parts: Parts, layout: layouts.Layout = layouts.ONE, asked: Any = None
) -> Any:
    """What the head says (E24-E27); asked (word_loss.Asked), a model of words has its loss and accuracy instead. A head
    without a matrix of its own takes the embedding: g_w is row w of it."""
    head = layouts.gathered(params["head"], layout)
    with jax.named_scope("head"):
        if "transform" in head:
            head = shapes.relettered(head, "E", "D")
            how = {"activation": parts.transform, "norm": parts.block.norm, "eps": parts.block.eps}
            x_BND = heads.transform(head["transform"], x_BND, layout=layout, **how)
        if not {"G_WD", "G_CD", "W_PD"} & head.keys():
            rows = {name: params["embed"][name] for name in params["embed"].keys() & {"E_WD", "E_WE"}}
            head |= {"G_WD": next(iter(layouts.gathered(rows, layout).values()))}
        if asked is not None:
            return word_loss.measures(head, x_BND, asked, cap=parts.cap, layout=layout)
        return explicit.capped(layouts.on(layout, parts.head)(head, x_BND), parts.cap)


def cast(params: dict, dtype: Any) -> dict:
    """The parameters in the dtype of the products; statistics and biases of logits stay as they are. Those of numpy
    become JAX's, for numpy's cannot be asked for the rows of words that are only traced."""

    def narrow(path: Any, leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        wide = dtype is None or path[-1].key in KEPT_WIDE or not jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf if wide else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(narrow, params)


def apply(
    params: dict,
    inputs: Any,
    *,
    parts: Parts,
    layout: layouts.Layout = layouts.ONE,
    dtype: Any = None,
    asked: word_loss.Asked | None = None,
    **call: Any,
) -> tuple[Any, dict]:
    """(logits, aux) of words w_BN or patches v_BNP; asked, (word_loss.measures, aux) of words.

    dtype: that of products and tokens (None: the parameters' own); softmax, statistics of norms and logits are float32
    at least. call: key_B, one random key for each sequence in training (dropout, batch statistics), None in evaluation;
    mask, n, memory, remat, unroll, caches, maps, keep (stack).
    Seen, where asked for: A_MBHNS with maps, `cache` with keep or caches, and in training `running`, a tree like the
    parameters' with the statistics of this batch (E17).
    """
    params = cast(params, dtype)
    x_BND, aux = hidden_states(params, inputs, parts=parts, layout=layout, **call)
    return logits(params, x_BND, parts=parts, layout=layout, asked=asked), aux
