"""Checks of the config's `model` section: settings that are wrong or do not fit together are refused before tracing."""

from experiments.build import variants
from experiments.engine import by_name, config, errors
from tfm import block, transformer
from tfm.attention import implementations

OUTER_NORMS = {"last": (False, True), "first": (True, False), "both": (True, True), "none": (False, False)}
CUTS = ("identity_query", "nonlinear_query")  # scores that cut whole tokens into heads


def check_model(m: config.Settings, *, N: int, cross: bool, pixels: bool) -> None:
    """Raise UserError for settings of the section `m` that are wrong or do not fit together."""
    by_name.choose("remat", m.remat, transformer.REMAT)
    by_name.choose("bias", m.bias, block.BIASES)
    by_name.choose("outer_norm", m.outer_norm, OUTER_NORMS)
    by_name.choose("attention", m.attention, dict.fromkeys(implementations.NAMES))
    config.at_least(0, {"model.window": m.window})
    config.at_least(1, {"model.share": m.share})
    batch_norm, embed_norm = m.norm.startswith("batch"), OUTER_NORMS[m.outer_norm][0]
    from_config = isinstance(m, config.Settings)  # a published model may have a window that hides nothing
    errors.refuse(
        (
            from_config and m.window >= N and not has_unlimited_context(m, N=N),
            f"model.window = {m.window} hides none of {N} tokens: choose less, or 0 for no window",
        ),
        (m.share > 1 and batch_norm, f"model.share = {m.share}: shared layers cannot have model.norm = {m.norm}"),
        (m.M % m.share, f"model.share = {m.share} must divide model.M = {m.M}"),
        (embed_norm and cross, f"model.outer_norm = {m.outer_norm} needs a single sequence: choose last or none"),
        (m.output_cap and pixels, f"model.output_cap = {m.output_cap} is for logits, not for pixels: set it to 0"),
        (m.window and cross, f"model.window = {m.window} needs a single sequence: set it to 0"),
    )


def check_sizes(m: config.Settings) -> dict[str, int]:
    """Return the sizes {"M", "D", "H", "K", "F"}. Raises UserError if they, or G, do not fit together."""
    numbers = {letter: getattr(m, letter) for letter in "MDHKF"}
    config.at_least(1, {f"model.{letter}": n for letter, n in {**numbers, "G": m.G}.items()})
    K_is_default = m.K == m.D // m.H
    errors.refuse(
        (m.H % m.G, f"model.G = {m.G} heads of keys and values must divide model.H = {m.H} heads"),
        (
            m.D % m.H and K_is_default,
            f"model.H = {m.H} heads do not divide model.D = {m.D}: choose others or set model.K",
        ),
    )
    return numbers


def check_block(m: config.Settings) -> None:
    """Raise UserError for numbers outside their range, or sizes that the score cannot cut into heads."""
    config.at_least(0, {"model.dropout": m.dropout, "model.score_std": m.score_std, "model.output_std": m.output_std})
    config.at_least(0, {"model.cap": m.cap, "model.output_cap": m.output_cap})
    sizes = f"model.D = {m.D} must be model.H x model.K = {m.H} x {m.K}"
    errors.refuse(
        (m.dropout >= 1, f"model.dropout = {m.dropout} must be less than 1"),
        (cuts_tokens(m) and m.D != m.H * m.K, f"model.score = {m.score} cuts a token into heads: {sizes}"),
    )


def cuts_tokens(m: config.Settings) -> bool:
    """Return whether the score cuts whole tokens into heads, without a matrix of its own."""
    return m.score.removesuffix(variants.NOSELF) in CUTS


def check_embedding(m: config.Settings, *, output: str, tied: bool, transformed: bool) -> None:
    """Raise UserError if model.E or the layer before the output matrix do not fit the rest of the model."""
    batch_norm = m.norm.startswith("batch")
    heads = "text.head = linear, or one with a layer such as tied+gelu"
    errors.refuse(
        (m.E and batch_norm, f"model.E = {m.E} needs another model.norm than {m.norm}"),
        (m.E and tied and not transformed, f"model.E = {m.E} and text.head = {output}: choose {heads}"),
        (transformed and batch_norm, f"text.head = {output} needs another model.norm than {m.norm}"),
    )


def check_causal(m: config.Settings) -> None:
    """Raise UserError for a norm that needs the tokens a causal model must not see."""
    if variants.choose(m, "norm").needs_all_tokens:
        raise errors.UserError(
            f"model.norm = {m.norm} needs all tokens of a sequence, and a causal model sees only earlier ones: choose"
            " another norm"
        )


def has_unlimited_context(m: config.Settings, *, N: int) -> bool:
    """Return whether the KV cache serves texts longer than the context of N tokens.

    It does if each token sees a window of tokens, and how far they are away, both as in training. (Without a window,
    keys that saw what has left the context would mislead.)
    """
    return 0 < m.window <= N and m.position == "none" and not by_name.CODE.fullmatch(m.relative_position)
