"""Variants: the functions for the stages of a model, chosen by the names in the config's section `model`.

A name may carry numbers, rotary:500000 or rms:1e-6, and may name the user's code, my_file:my_score. `rehearse` traces a
block with the chosen variants, so that an error of the user's code names its line before the training.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.engine import by_name, config, errors
from tfm import block, mlp, norm, position, shapes, transformer
from tfm.attention import mask as masks, relative_position, rotary_scaling, score, spec as attentions, value

MODULES = dict(score=score, value=value, relative_position=relative_position, norm=norm, mlp=mlp, position=position)
ROTARY = ("rotary", "rotary_halves")
# The variants whose names may be followed by numbers, and the numbers if there are none.
NUMBERED = {"relative_position": ROTARY, "norm": tuple(by_name.candidates(norm))}
DEFAULTS = {"relative_position": "10000", "norm": "1e-5"}
NOSELF = "_noself"  # suffix of a score: tokens attend to themselves only if they may attend to no other


def choose(m: config.Settings, setting: str) -> Any:
    """Return the variant that this setting of the section `m` names. Raises UserError if there is none."""
    name, numbers = split(setting, getattr(m, setting))
    noself = setting == "score" and name.endswith(NOSELF) and ":" not in name
    name = name.removesuffix(NOSELF) if noself else name
    chosen = by_name.choose(setting, name, by_name.candidates(MODULES[setting]))
    if noself:
        chosen = chosen._replace(attend_to_self=False)
    if name in ROTARY:
        return _make_rotary(m, name, *numbers.split(":"))
    return _ignore_layout(setting, chosen)


def _ignore_layout(setting: str, chosen: Any) -> Any:
    """Return the variant with a function that accepts `layout` and ignores it, if it does not take `layout`."""
    if setting not in ("norm", "mlp", "value") or chosen.takes_layout:
        return chosen
    if setting == "value":
        return chosen._replace(out_proj=_drop_layout(chosen.out_proj))
    return chosen._replace(apply=_drop_layout(chosen.apply))


def _drop_layout(function: Callable) -> Callable:
    """Return the function with an argument `layout` that it ignores."""
    return lambda *arrays, layout, **options: function(*arrays, **options)


def split(setting: str, text: str) -> tuple[str, str]:
    """Return the name of a variant and its numbers: ('rotary', '10000') for both 'rotary' and 'rotary:10000'.

    The colon of the user's my_file:my_norm belongs to the name; its numbers are the defaults.
    """
    name, colon, numbers = text.partition(":")
    if name not in NUMBERED.get(setting, ()):
        return text, DEFAULTS.get(setting, "")
    return name, numbers if colon else DEFAULTS[setting]


def join(setting: str, name: str, numbers: str) -> str:
    """Return the inverse of `split`, without default numbers."""
    return name if numbers == DEFAULTS[setting] else f"{name}:{numbers}"


def format_number(number: float) -> str:
    """Return a number as it stands in a name, with all its digits: 10000, 1e-6."""
    return repr(number).removesuffix(".0").replace("e-0", "e-")


def read_eps(m: config.Settings) -> float:
    """Return the number inside the root of the norms. Raises UserError if it is not a number >= 0."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(split("norm", m.norm)[1])) < np.inf:
            return number
    raise errors.UserError(f"model.norm = {m.norm}: the colon must be followed by a number >= 0, as in rms:1e-6")


def _make_rotary(
    m: config.Settings, name: str, base: str, kind: str = "none", *numbers: str
) -> relative_position.RelativePosition:
    """Return rotary positions with this base and scaling: '10000', or '10000', 'linear', '2'."""
    scale = by_name.choose("rotary scaling", kind, rotary_scaling.KINDS)
    try:
        base, *values = [float(text) for text in (base, *numbers)]
        with np.errstate(all="ignore"), jax.ensure_compile_time_eval():
            angles, length = scale(np.arange(3), m.K, base, *values)
        valid = np.isfinite(angles).all() and length > 0 and min([1, *values]) >= 0 and 1 <= base < np.inf
    except (TypeError, ValueError, ZeroDivisionError):
        valid = False
    if not valid:
        names = [*inspect.signature(scale).parameters][3:]
        form = ":".join([name, "base", *([] if kind == "none" else [kind]), *names])
        raise errors.UserError(
            f"model.relative_position = {m.relative_position} must have the form {form}, with numbers and base >= 1"
        )
    return relative_position.rotary_of(
        base, halves=name == "rotary_halves", scaling=lambda n, K, base: scale(n, K, base, *values)
    )


def choose_all(m: config.Settings, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the variants of the section `m` by setting.

    Raises UserError if the score does not support shared keys or rotary positions, and the section has these.
    """
    chosen = {setting: choose(m, setting) for setting in MODULES}
    if m.G < sizes["H"]:
        if not chosen["score"].supports_gqa:
            names = [name for name, variant in by_name.candidates(score).items() if variant.supports_gqa]
            raise errors.UserError(
                f"model.G = {m.G} is less than model.H = {sizes['H']}, and model.score = {m.score} does not support "
                f"shared keys. Set model.G = {sizes['H']}, or choose one of: {', '.join(names)}"
            )
        for setting in ("score", "value"):
            if chosen[setting].supports_gqa:
                chosen[setting] = chosen[setting]._replace(init=functools.partial(chosen[setting].init, G=m.G))
    if split("relative_position", m.relative_position)[0] in ROTARY and not chosen["score"].supports_rope:
        raise errors.UserError(
            f"model.relative_position = {m.relative_position} rotates queries and keys, which model.score = {m.score} "
            "does not support. Choose another relative_position or score; a score of yours that supports it declares "
            "score.Score(init, apply, supports_rope=True)"
        )
    return chosen


def rehearse(m: config.Settings, spec: transformer.Spec, sizes: dict[str, int], *, cross: bool = False) -> None:
    """Trace a block on shapes alone, if it has variants of the user's, rotary positions, or values made of keys.

    Raises UserError if a variant of the user's fails, or returns arrays of other shapes than its stage needs, or if
    numbers of features do not fit together.
    """
    users = [f"model.{name} = {getattr(m, name)}" for name in MODULES if ":" in split(name, getattr(m, name))[0]]
    rotary = split("relative_position", m.relative_position)[0] in ROTARY
    from_keys = spec.block.attention.value.from_keys
    if not (users or rotary or from_keys):
        return
    label = " and ".join(users) or f"model.score = {m.score} with model.value = {m.value}"
    label += f" and model.relative_position = {m.relative_position}" if rotary and not users else ""
    n = min(sizes["N"], 3)
    x_BND = jax.ShapeDtypeStruct((2, n, sizes["D"]), jnp.float32)

    def trace_stages(key: jax.Array, x_BND: jax.Array) -> dict[str, Any]:
        params = block.init(key, **sizes, spec=spec.block, bias=m.bias, cross=cross)
        shapes.check(params)
        q, k = spec.block.attention.score.apply(params["score"], x_BND, x_BND)
        code = spec.position.init(key, N=sizes["N"], D=sizes["D"])
        return {"params": params, "queries": q, "keys": k, "position": spec.position.apply(code, x_BND, None)}

    def trace_block(params: dict, x_BND: jax.Array) -> jax.Array:
        memory = attentions.Memory(x_BND, None) if cross else None
        apply = block.choose(params, spec.block.order)
        return apply(params, x_BND, spec.block, attentions.Call(mask=masks.causal, memory=memory))[0]

    with by_name.user_errors(label):
        arrays = jax.eval_shape(trace_stages, jax.random.key(0), x_BND)
    params = arrays.pop("params")
    sizes = sizes | {"G": m.G}
    if misfit := _find_misfit(arrays, shapes.check(params), sizes, n, rotary=rotary, from_keys=from_keys):
        raise errors.UserError(f"{label}: {misfit}")
    with by_name.user_errors(label):
        y_BND = jax.eval_shape(trace_block, params, x_BND)
    if y_BND.shape != x_BND.shape:
        raise errors.UserError(f"{label}: its block returns tokens of shape {y_BND.shape}, not {x_BND.shape}")


def _find_misfit(arrays: dict, letters: dict, sizes: dict[str, int], n: int, *, rotary: bool, from_keys: bool) -> str:
    """Return what does not fit of the sizes of parameters, queries, keys and position code; '' if all fit."""
    for letter in "HKDF":
        if letters.get(letter, sizes[letter]) != sizes[letter]:
            return f"{letter} is {letters[letter]} in its parameters, not {sizes[letter]}"
    K = (arrays["queries"].shape or (0,))[-1]
    for name in ("queries", "keys"):
        shape = arrays[name].shape
        if len(shape) != 4 or shape[:1] + shape[2:] != (2, n, K) or shape[1] not in (1, sizes["G"], sizes["H"]):
            return f"its {name} have the shape {shape}, not {(2, sizes['H'], n, K)}"
    if not K:
        return "its queries have 0 features"
    if rotary and K % 2:
        return f"its queries have {K} features; rotary positions need an even number"
    if from_keys and K != sizes["K"]:
        return f"values made of keys need keys of model.K = {sizes['K']} features, not {K}"
    shape, tokens = arrays["position"].shape, (2, n, sizes["D"])
    return "" if shape == tokens else f"its position code returns the shape {shape}, not {tokens}"


def check_scales(m: config.Settings, changed: set[str], params: dict, outputs: tuple[str, ...]) -> None:
    """Raise UserError if a changed setting does not scale the matrices of its variant.

    score_std scales leaves of a score whose names begin with U; output_std those of a value or an MLP in `outputs`.
    The user's score must have only matrices that score_std scales.
    """
    for setting, stage, prefixes in (
        ("score_std", "score", ("U",)),
        ("output_std", "value", outputs),
        ("output_std", "mlp", outputs),
    ):
        paths = [path for path in shapes.flat(params) if stage in re.split("/|_cross/", path)[:-1]]
        matrices = [path.rpartition("/")[2] for path in paths if shapes.is_matrix(path)]
        unscaled, is_users = [name for name in matrices if not name.startswith(prefixes)], ":" in getattr(m, stage)
        nothing_scaled = len(unscaled) == len(matrices)
        if stage == "score":
            misses = nothing_scaled or (is_users and bool(unscaled))
        else:
            misses = nothing_scaled and is_users and bool(unscaled)
        if setting in changed and misses:
            matrix = unscaled[0] if unscaled else "matrix"
            raise errors.UserError(
                f"model.{setting} scales no {matrix} of model.{stage} = {getattr(m, stage)}. Begin the names of such "
                f"matrices with {' or '.join(prefixes)}, or set model.{setting} = 1"
            )
