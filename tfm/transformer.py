"""The whole: tokens, positions, M blocks, head. `init` makes the parameter tree, `apply` is the model.

params = {embed, position, blocks, head} and, where the model has them, {class, norm}: what is optional is read off the
tree. The settings (`score`, `norm`, ...) are the variants of the other rooms.
"""

import jax

from tfm import attention, embed, initial
from tfm import block as blocks
from tfm import mask as masks


def init(
    key: jax.Array,
    *,
    M: int,
    D: int,
    N: int,
    embed_init,
    head_init,
    position,
    norm,
    final_norm: bool,
    class_token: bool = False,
    tied_output: bool = False,
    **sizes_and_variants,
) -> dict:
    """The parameter tree for up to N tokens (class token included); `embed_init`, `head_init`: (key, D=) -> params.

    With tied_output the head has no matrix of its own: g_w is row w of the embedding.
    """
    layer_keys = jax.vmap(lambda m: jax.random.fold_in(initial.key(key, "blocks"), m))(jax.numpy.arange(M))
    params = {
        "embed": embed_init(initial.key(key, "embed"), D=D),
        "position": position.init(initial.key(key, "position"), N=N, D=D),
        "blocks": jax.vmap(lambda k: blocks.init(k, D=D, M=M, norm=norm, **sizes_and_variants))(layer_keys),
        "head": {} if tied_output else head_init(initial.key(key, "head"), D=D),
    }
    if class_token:
        params["class"] = embed.class_token_init(initial.key(key, "class"), D=D)
    if final_norm:
        params["norm"] = norm.init(initial.key(key, "norm"), D=D)
    return params


def stack(
    layers: dict,
    x_BND: jax.Array,
    *,
    mask: masks.Mask | None,
    order,
    score,
    value,
    norm,
    mlp,
    compute,
    scale,
    eps: float,
    remat: bool = False,
    unroll: int | bool = True,
    maps: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """X^(m) = block(X^(m-1)), m = 1..M (E20): X^(M), and the weights A_MBHNS of all layers if `maps`.

    remat: a block's intermediates are computed again in the backward pass instead of kept. unroll: how many layers of
    the scan are written out (True: all); on CPU writing out is 1.15-1.25 times faster at depths up to 6.
    """

    def layer(x_BND: jax.Array, params: dict):
        def attend(x_BND: jax.Array):
            with jax.named_scope("attention"):
                return attention.multihead(
                    params, x_BND, x_BND, score=score, value=value, mask=mask, scale=scale, compute=compute
                )

        def feed(x_BND: jax.Array) -> jax.Array:
            with jax.named_scope("mlp"):
                return mlp.apply(params["mlp"], x_BND)

        def norms(name: str):
            return lambda x_BND: norm.apply(params[name], x_BND, eps=eps)

        x_BND, A = order(x_BND, attend=attend, feed=feed, norm_1=norms("norm1"), norm_2=norms("norm2"))
        return x_BND, A if maps else None

    with jax.named_scope("blocks"):
        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x_BND, layers, unroll=unroll)


def apply(params: dict, inputs: jax.Array, *, embed_apply, head_apply, position, norm, eps: float, **settings):
    """Logits of words w_BN or patches v_BNP. With maps=True in settings: (logits, A_MBHNS)."""
    with jax.named_scope("embed"):
        x_BND = embed_apply(params["embed"], inputs)
        if "class" in params:
            x_BND = embed.class_token(params["class"], x_BND)
        x_BND = position.apply(params["position"], x_BND)
    x_BND, A_MBHNS = stack(params["blocks"], x_BND, norm=norm, eps=eps, **settings)
    with jax.named_scope("head"):
        if "norm" in params:
            x_BND = norm.apply(params["norm"], x_BND, eps=eps)
        logits = head_apply(params["head"] or {"G_WD": params["embed"]["E_WD"]}, x_BND)
    return (logits, A_MBHNS) if settings.get("maps") else logits
