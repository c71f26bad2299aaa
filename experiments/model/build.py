"""Build a model from the section `model` of a config: names become functions of `tfm`, sizes become arguments."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from experiments.config import by_name, errors, settings as configs
from experiments.engine import optim
from experiments.model import checks, variants
from tfm import (
    block as blocks,
    embed as embeds,
    encoder_decoder as seq2seq,
    head as heads,
    layout as layouts,
    mlp,
    models,
    transformer,
    variant,
)
from tfm.attention import heads as attentions, implementations, mask as masks, score

DTYPES = {"float32": None, "bfloat16": jnp.bfloat16}  # None: the dtype of the parameters
# Up to this many layers are unrolled: on a TPU or GPU, and on a CPU, where a loop takes 1.15 to 1.25 times as long.
# More layers are unrolled on a TPU or GPU if that saves more seconds of the training than their compilation takes.
UNROLLED, UNROLLED_CPU = 4, 6
UNROLLED_GAIN, LOOP_SPEED = 0.1, 5e13  # share of the time that it saves; FLOP/s of a loop (v5e; ViT-S/16 and GPT-2)
LAYER_SECONDS = 20  # of a processor, to compile one more layer of ViT-S/16 (libtpu 0.0.42)
CLASS_HEADS = {"pooled": heads.pooled, "class_token": heads.class_token}
# text.head -> (whether the output matrix is the embedding, the layer before the matrix), for classes and for tokens
TEXT_CLASS_HEADS = {layer: (False, layer) for layer in ("linear", "pooled", *mlp.ACTIVATIONS)}


def name_head(tied: bool, layer: str) -> str:
    """Return the value of text.head: "linear" or "tied", then "+" and `layer` unless it is "": "linear+gelu".

    tied: whether the output matrix is the embedding. layer: the activation of a layer before it, or "bias" for b_W.
    """
    return "+".join(filter(None, ("tied" if tied else "linear", layer)))


TOKEN_HEADS = {
    name_head(tied, layer): (tied, layer)
    for tied, layer in itertools.product((False, True), ("", "bias", *mlp.ACTIVATIONS))
}


def language_model(
    m: configs.Settings,
    *,
    head: heads.Head | None = None,
    W: int,
    N: int,
    output: str = "linear",
    C: int = 0,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
) -> models.Model:
    """Return a model of texts with W token ids and up to N tokens, which predicts tokens or, with C, classes.

    output: the setting text.head. head: a variant of tfm/head.py, needed for tokens; None, only for classes: the head
    that `output` names. C: number of classes; 0 for tokens. layout, mask: arguments of `model`. Raises UserError for
    settings that are wrong or do not fit together.
    """
    tied, layer = by_name.choose("head", output, TEXT_CLASS_HEADS if C else TOKEN_HEADS)
    activation, norm = mlp.ACTIVATIONS.get(layer), variants.choose(m, "norm")
    excluded = activation and norm.observe
    errors.refuse((excluded, f"text.head = {output} excludes model.norm = {m.norm}. Choose another norm"))
    if C:
        if output == "pooled":
            head = heads.pooled
        elif head is None:
            head = heads.first_word_of(activation) if activation else heads.class_token
        head = bind_sizes(head, C=C)
    elif layer == "bias":
        head = bind_sizes(head, W=W, bias="b_W")
    else:
        head = bind_sizes(head, W=W)
        head = heads.after_layer(head, activation, norm, eps=variants.read_eps(m)) if activation else head
    embed = bind_sizes(embeds.words, W=W, J=m.segments)
    return model(m, embed=embed, head=head, N=N, layout=layout, mask=mask, tied_output=tied)


def bind_sizes(choice: variant.Variant, **sizes: Any) -> variant.Variant:
    """Return the variant with these sizes bound to its `init`."""
    return choice._replace(init=functools.partial(choice.init, **sizes))


def vision_model(
    m: configs.Settings,
    *,
    output: str,
    Y: int,
    X: int,
    Z: int,
    patch: int,
    C: int,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
) -> models.Model:
    """Return a classifier of images with Y x X pixels and Z channels. output: the setting image.head.

    C: number of classes. layout, mask: arguments of `model`. Raises UserError if the image is not a whole number of
    patches of patch x patch pixels.
    """
    N, P = count_patches(Y, X, Z, patch=patch)
    head = bind_sizes(by_name.choose("head", output, CLASS_HEADS), C=C)
    embed, class_token = bind_sizes(embeds.patches, P=P), output == "class_token"
    options = {"class_token": class_token, "layout": layout, "mask": mask}
    return model(m, embed=embed, head=head, N=N + class_token, **options)


def masked_image_model(m: configs.Settings, *, Y: int, X: int, Z: int, patch: int, **options: Any) -> models.Model:
    """Return a model that predicts the pixels of masked patches. options: layout and mask, as in vision_model.

    Raises UserError unless `patch` divides Y and X, and if model.output_cap is set.
    """
    N, P = count_patches(Y, X, Z, patch=patch)
    embed, head = bind_sizes(embeds.masked_patches, P=P), bind_sizes(heads.pixels, P=P)
    errors.refuse((m.output_cap, f"model.output_cap = {m.output_cap} is for logits, not for pixels. Set it to 0"))
    return model(m, embed=embed, head=head, N=N, **options)


def count_patches(Y: int, X: int, Z: int, *, patch: int) -> tuple[int, int]:
    """Return (N, P): the number of patches, and of values in each. Raises UserError unless `patch` divides Y and X."""
    if patch < 1 or Y % patch or X % patch:
        raise errors.UserError(
            f"image.patch = {patch}: images of {Y} x {X} pixels do not divide into patches of {patch} x {patch}. "
            "Choose a divisor of both sides"
        )
    return (Y // patch) * (X // patch), patch * patch * Z


def encoder_decoder(
    m: configs.Settings,
    *,
    W: int,
    N: int,
    tied_output: bool,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
) -> models.Model:
    """Return an encoder-decoder with W token ids, and with M layers and up to N tokens on each side.

    tied_output: the output matrix is the embedding. layout, mask: arguments of `model`. Raises UserError for settings
    that are wrong.
    """
    checks.check_causal(m)
    embed, head = bind_sizes(embeds.words, W=W), bind_sizes(heads.next_word, W=W)
    options = {"cross": True, "tied_output": tied_output}
    return model(m, embed=embed, head=head, N=N, layout=layout, mask=mask, **options)


def model(
    m: configs.Settings,
    *,
    embed: variant.Variant,
    head: variant.Variant,
    N: int,
    cross: bool = False,
    layout: layouts.Layout = layouts.ONE,
    mask: masks.Mask | None = None,
    **init_options: bool,
) -> models.Model:
    """Return the model of the section `m`, for up to N tokens. Raises UserError for settings that are wrong.

    cross: build an encoder-decoder. layout: how the devices of the training share the model. mask: a mask like those of
    later calls; with the layout it decides the implementation of attention. init_options: class_token and tied_output
    of transformer.init.
    """
    by_name.choose("compute_dtype", m.compute_dtype, DTYPES)
    checks.check_model(m, N=N, cross=cross)
    growth, position = optim.measure_growth(m), variants.choose(m, "position")
    spec = transformer.Spec(embed, position, make_block_spec(m, N=N), heads.Head(*head))
    spec = spec._replace(output_scale=1 / growth.width, cap=m.output_cap, dtype=DTYPES[m.compute_dtype], remat=m.remat)
    sizes = checks.check_sizes(m) | {"N": N}
    variants.rehearse(m, spec, sizes, cross=cross)
    chosen = choose_attention(m, spec, sizes, layout=layout, mask=mask, cross=cross)

    fallback = implementations.FLASH if m.attention == "flash" else implementations.EXPLICIT
    attend = {None: fallback.attend, (layout.platform, layout.sequence): chosen.attend}
    at = functools.partial(fit_spec, spec, attend, functools.partial(choose_unrolling, m, N))
    init = functools.partial(initialise, m, spec, sizes=sizes, cross=cross, **init_options)
    bind = models.bind_encoder_decoder if cross else models.bind
    _, how = choose_unrolling(m, N, layout)
    weights = {name: weight for name, weight in blocks.weigh_measures(spec.block).items() if weight}
    return bind(init, spec, at)._replace(layout=layout, weights=weights, lines=(f"attention: {chosen}; {how}",))


def initialise(
    m: configs.Settings,
    spec: transformer.Spec,
    key: jax.Array,
    *,
    sizes: dict[str, int],
    cross: bool,
    class_token: bool = False,
    tied_output: bool = False,
    **block_settings: Any,
) -> dict:
    """Return the initial parameters.

    block_settings: fields of blocks.Spec that replace the model's: score_std, if runs of a study differ in it. Other
    arguments: those of `model`. Raises UserError for layers without parameters, and if score_std, output_std or mup
    is set but misses matrices that it should scale (variants.check_scales).
    """
    embed_norm, final_norm = checks.OUTER_NORMS[m.outer_norm]
    options = sizes | {"final_norm": final_norm, "bias": m.bias, "tied_output": tied_output}
    options |= {"spec": spec._replace(block=spec.block._replace(**block_settings))}
    if cross:
        params = seq2seq.init(key, **options)
    else:
        params = transformer.init(key, **options, class_token=class_token, embed_norm=embed_norm)
    params = transformer.scale_embedding(params, m.embed_std * optim.measure_growth(m).width ** 0.5)
    if not jax.tree.leaves(params.get("blocks", params)):
        rule = "Choose a score, value, MLP or norm with parameters: a number for each layer is enough"
        raise errors.UserError(f"the {m.M} layers have no parameters. {rule}")
    variants.check_scales(m, spec.block, params, set(block_settings))
    return params


def fit_spec(
    spec: transformer.Spec,
    attend: Mapping[tuple[str, str | None] | None, Callable],
    unroll: Callable[[layouts.Layout], tuple[bool, str]],
    layout: layouts.Layout,
) -> transformer.Spec:
    """Return the spec for the devices of `layout`: with their function of attention, and layers unrolled or in a loop.

    attend: (platform, sequence) of the layout in training -> the function of attention; None -> the function for all
    other layouts, for example in figures and generation. unroll: layout -> the result of `choose_unrolling`.
    """
    attention = spec.block.attention._replace(attend=attend.get((layout.platform, layout.sequence), attend[None]))
    return spec._replace(block=spec.block._replace(attention=attention), unroll=unroll(layout)[0] or 1)


def choose_unrolling(m: configs.Settings, N: int, layout: layouts.Layout) -> tuple[bool, str]:
    """Return whether the layers are unrolled, and a description. N: number of tokens.

    FSDP and remat use a loop: XLA would gather the weights of all unrolled layers at once, and keep more activations.
    """
    on_cpu = layout.platform in ("", "cpu")
    few = m.M <= (UNROLLED_CPU if on_cpu else UNROLLED)
    if layout.fsdp or m.remat != "none" or (on_cpu and not few):
        return False, f"{m.M} layers in a loop"
    if few:
        return True, f"{m.M} layers, unrolled"
    flops = 6 * m.M * (4 * m.D**2 + 2 * m.D * m.F) * N * layout.sequences  # of the training: products with matrices
    saved, compiling = UNROLLED_GAIN * flops / LOOP_SPEED, LAYER_SECONDS * m.M
    seconds = f"about {saved:,.0f} s of the training, and compile about {compiling:,.0f} s longer"
    if saved > compiling:
        return True, f"{m.M} layers, unrolled: they save {seconds} (model.remat = products: a loop, with less memory)"
    return False, f"{m.M} layers in a loop: unrolled layers would save {seconds}"


def choose_attention(
    m: configs.Settings,
    spec: transformer.Spec,
    sizes: dict[str, int],
    *,
    layout: layouts.Layout,
    mask: masks.Mask | None,
    cross: bool,
) -> implementations.Implementation:
    """Return the implementation of attention for this layout, mask, and shapes of queries, keys and values.

    The shapes follow from m, spec and `sizes`, {letter: size} with N. cross: whether blocks have cross-attention.
    """
    attention = spec.block.attention
    if attention.weigh and layout.sequence is None:
        return implementations.EXPLICIT._replace(reason=f"model.weights = {m.weights}")

    def project(key: jax.Array, x_BND: jax.Array) -> tuple:
        params = blocks.init(key, **sizes, spec=spec.block, bias=m.bias, cross=cross)
        params, x_BND = transformer.cast(params, spec.dtype), x_BND.astype(spec.dtype or x_BND.dtype)
        pair = attention.score.apply(params["score"], x_BND, x_BND)
        q, k = variant.take_measures(attention.score, pair, {})
        v = attention.value.apply(params["value"], k if attention.value.from_keys else x_BND)
        return q, k, variant.take_measures(attention.value, v, {})

    x_BND = jax.ShapeDtypeStruct((1, sizes["N"], m.D), jnp.float32)
    q, k, v = jax.eval_shape(project, jax.random.key(0), x_BND)
    bias = attention.relative_position.bias is not None or not attention.score.attend_to_self
    options = {"mask": mask, "bias": bias, "cap": m.cap, "axis": layout.sequence}
    return implementations.choose(m.attention, layout.platform, q, k, v, **options)


def make_block_spec(m: configs.Settings, *, N: int = 0) -> blocks.Spec:
    """Return the functions of a block's stages that the section `model` names.

    m: this section. N: number of tokens, for a norm with statistics of each position. Raises UserError for settings
    that are wrong.
    """
    checks.check_sizes(m)
    chosen, eps = variants.choose_all(m), variants.read_eps(m)
    checks.check_variants(m, chosen)
    if chosen["score"].takes_eps:
        apply = functools.partial(chosen["score"].apply, eps=eps)
        chosen["score"] = chosen["score"]._replace(apply=apply)
    if N and chosen["norm"].per_position:
        chosen["norm"] = bind_sizes(chosen["norm"], N=N)
    attention = attentions.Spec(
        score=chosen["score"],
        value=chosen["value"],
        relative_position=chosen["relative_position"],
        attend=implementations.FLASH.attend,
        scale=choose_scale(m),
        H=m.H,
        cap=m.cap,
        weigh=variants.choose_weights(m),
    )
    order, form = by_name.choose("block", m.block, blocks.ORDERS), "Order(apply, residual), with residual True or False"
    errors.refuse((not isinstance(order.residual, bool), f"model.block = {m.block} must have the form {form}"))
    output_std = m.output_std * optim.measure_growth(m).output_std
    return blocks.Spec(attention, chosen["norm"], chosen["mlp"], order, eps, m.dropout, m.score_std, output_std)


def choose_scale(m: configs.Settings) -> Callable[[int, int], float]:
    """Return (K, D) -> the factor on attention logits that m.scale names; if m.mup is not 0, times sqrt(m.mup / m.D).

    m.mup is the base width D_0 of muP (mup.py).
    """
    scale = by_name.choose("scale", m.scale, score.SCALES)
    return (lambda K, D: scale(K, D) * (m.mup / m.D) ** 0.5) if m.mup else scale


def average_tokens(logits_BNC: jax.Array, valid_BN: jax.Array) -> jax.Array:
    """Return the mean over the valid tokens, logits_BC. The head is linear: these are the logits of the mean token."""
    valid_BN1 = valid_BN[..., None]
    return jnp.where(valid_BN1, logits_BNC, 0).sum(1) / valid_BN1.sum(1)


def add_window(m: configs.Settings, mask: masks.Mask | None) -> masks.Mask | None:
    """Return the mask that also hides tokens outside the sliding window model.window. Without a window (0): `mask`."""
    if not m.window:
        return mask
    window = masks.window(m.window)
    return window if mask is None else masks.both(mask, window)


def within_documents(mask: masks.Mask, batch: dict) -> dict:
    """Return the arguments `mask` and `code_n` of models.Model.hidden for a batch of windows.causal.

    If the batch has documents, its tokens attend only to their own document, in which their positions begin at 0.
    Otherwise return only `mask`.
    """
    if "document_BN" not in batch:
        return {"mask": mask}
    return {"mask": masks.both(mask, masks.documents(batch["document_BN"])), "code_n": batch["n_BN"]}
