"""Checks of the config's section `model`: raise UserError for wrong settings before anything is traced."""

from collections.abc import Mapping
from typing import Any

from experiments.config import by_name, errors, settings as configs
from experiments.model import variants
from tfm import block as blocks, transformer
from tfm.attention import implementations, score as scores

OUTER_NORMS = {"last": (False, True), "first": (True, False), "both": (True, True), "none": (False, False)}


def check_model(m: configs.Settings, *, N: int, cross: bool) -> None:
    """Raise UserError for settings of the section `m` that are wrong or do not fit together.

    N: number of tokens. cross: the model is an encoder-decoder.
    """
    by_name.choose("remat", m.remat, transformer.REMAT)
    by_name.choose("bias", m.bias, blocks.BIASES)
    by_name.choose("outer_norm", m.outer_norm, OUTER_NORMS)
    by_name.choose("attention", m.attention, dict.fromkeys(implementations.NAMES))
    embed_norm = OUTER_NORMS[m.outer_norm][0]
    from_config = isinstance(m, configs.Settings)  # a published model may have a window of N tokens or more
    narrow = m.attention == "explicit_bfloat16" and m.compute_dtype != "bfloat16"
    errors.refuse(
        (narrow, f"model.attention = {m.attention} needs model.compute_dtype = bfloat16, not {m.compute_dtype}"),
        (
            from_config and m.window >= N and not has_unlimited_context(m, N=N),
            f"model.window = {m.window} hides none of {N} tokens. Choose a smaller window, or 0 for none",
        ),
        (embed_norm and cross, f"model.outer_norm = {m.outer_norm} is not for encoder-decoders. Choose last or none"),
        (m.window and cross, f"model.window = {m.window} is not for encoder-decoders. Set it to 0"),
    )


def check_sizes(m: configs.Settings) -> dict[str, int]:
    """Return model.M, D, H, K and F by their letters.

    Raises UserError if one of them or G is below 1, if G does not divide H, or if H does not divide D and K is not set.
    """
    numbers = {letter: getattr(m, letter) for letter in "MDHKF"}
    configs.at_least(1, {f"model.{letter}": n for letter, n in {**numbers, "G": m.G}.items()})
    K_is_default = m.K == m.D // m.H
    errors.refuse(
        (m.H % m.G, f"model.G = {m.G} does not divide model.H = {m.H}. Choose a divisor of {m.H}"),
        (
            m.D % m.H and K_is_default,
            f"model.H = {m.H} does not divide model.D = {m.D}. Choose a divisor of {m.D} or set model.K",
        ),
    )
    return numbers


def check_variants(m: configs.Settings, chosen: Mapping[str, Any]) -> None:
    """Raise UserError if variants do not fit together, or do not fit the sizes. chosen: variants.choose_all(m)."""
    score, norm, name = chosen["score"], chosen["norm"], variants.split("norm", m.norm)[0]
    sharing = [name for name, score in by_name.candidates(scores).items() if score.supports_gqa]
    errors.refuse(
        (m.mup and m.scale == "1", f"model.mup = {m.mup} needs model.scale = 1/sqrt(K) or 1/sqrt(D), not 1"),
        (
            score.cuts_tokens and m.D != m.H * m.K,
            f"model.score = {m.score} cuts tokens into heads: model.H x model.K = {m.H} x {m.K} must be model.D = "
            f"{m.D}",
        ),
        (
            m.G < m.H and not score.supports_gqa,
            f"model.G = {m.G} is less than model.H = {m.H}, and model.score = {m.score} does not support shared keys. "
            f"Set model.G = {m.H}, or choose one of: {', '.join(sharing)}",
        ),
        (
            chosen["relative_position"].is_rotary and not score.supports_rope,
            f"model.relative_position = {m.relative_position} rotates queries and keys, which model.score = {m.score} "
            "does not support. Choose another relative_position or score; a score of yours that supports it declares "
            "score.Score(init, apply, supports_rope=True)",
        ),
        (
            name != m.norm and not norm.takes_eps and not score.takes_eps,
            f"model.norm = {m.norm}: nothing uses the number after the colon. Choose model.norm = {name}",
        ),
    )


def check_causal(m: configs.Settings) -> None:
    """Raise UserError if model.norm needs all tokens of a sequence, also those that a causal model must not see."""
    needs_all = variants.choose(m, "norm").needs_all_tokens
    rule = "needs all tokens of a sequence, but a causal model sees only the earlier ones. Choose another norm"
    errors.refuse((needs_all, f"model.norm = {m.norm} {rule}"))


def has_unlimited_context(m: configs.Settings, *, N: int) -> bool:
    """Return True if generation with a KV cache may go beyond the N tokens of training.

    This needs a sliding window of at most N tokens and no absolute positions, so that each token sees what it would see
    in training. False if relative positions are the user's function, because it may depend on N. Without a window, keys
    in the cache would depend on tokens that have left it, unlike in training.
    """
    return 0 < m.window <= N and m.position == "none" and not variants.is_users(m, "relative_position")
