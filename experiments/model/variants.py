"""Variants: the functions for the stages of a model, chosen by the names in the config's section `model`.

A name can contain numbers (rotary:500000, rms:1e-6), or name the user's code (my_file:my_score). `rehearse` traces a
block with the chosen variants before the training, so that an error in the user's code is reported with its line.
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

from experiments.config import by_name, errors, settings as configs
from experiments.folder import checkpoint
from tfm import block as blocks, mlp, mup, norm, position, shapes, transformer, variant
from tfm.attention import explicit, mask as masks, relative_position, rotary_scaling, score, spec as attentions, value

MODULES = dict(score=score, value=value, relative_position=relative_position, norm=norm, mlp=mlp, position=position)
ROTARY = ("rotary", "rotary_halves")
# The variants whose names may be followed by numbers, and the numbers that count if none follow.
NUMBERED = {"relative_position": ROTARY, "norm": tuple(by_name.candidates(norm))}
DEFAULTS = {"relative_position": "10000", "norm": "1e-5"}
NOSELF = "_noself"  # suffix of a score: tokens attend to themselves only if they may attend to no other


def choose(m: configs.Settings, setting: str) -> Any:
    """Return the variant that this setting of the section `m` names. Raises UserError for an unknown name."""
    name, numbers = split(setting, getattr(m, setting))
    noself = setting == "score" and name.endswith(NOSELF) and ":" not in name
    name = name.removesuffix(NOSELF) if noself else name
    chosen = by_name.choose(setting, name, by_name.candidates(MODULES[setting]))
    if noself:
        chosen = chosen._replace(attend_to_self=False)
    if name in ROTARY:
        return _make_rotary(m, name, *numbers.split(":"))
    return _ignore_layout(setting, chosen)


def choose_weights(m: configs.Settings) -> Callable | None:
    """Return the user's function of model.weights, (l_BHNS, allowed) -> A_BHNS; None for the softmax."""
    chosen = by_name.choose("weights", m.weights, {"softmax": explicit.weights})
    return chosen if ":" in m.weights else None


def _ignore_layout(setting: str, chosen: Any) -> Any:
    """Return the variant with an argument `layout`, which is ignored if the variant does not declare takes_layout."""
    if setting not in ("norm", "mlp", "value") or chosen.takes_layout:
        return chosen
    if setting == "value":
        return chosen._replace(out_proj=_drop_layout(chosen.out_proj))
    return chosen._replace(apply=_drop_layout(chosen.apply))


def _drop_layout(function: Callable) -> Callable:
    """Return the function with an additional argument `layout`, which it ignores."""

    @functools.wraps(function, updated=())
    def call(*arrays: Any, layout: Any, **options: Any) -> Any:
        return function(*arrays, **options)

    return call


def split(setting: str, text: str) -> tuple[str, str]:
    """Return the name of a variant and its numbers: ('rotary', '10000') for both 'rotary' and 'rotary:10000'.

    The colon in the user's my_file:my_norm belongs to the name, so the numbers are the defaults.
    """
    name, colon, numbers = text.partition(":")
    if name not in NUMBERED.get(setting, ()):
        return text, DEFAULTS.get(setting, "")
    return name, numbers if colon else DEFAULTS[setting]


def has_number(setting: str, text: str) -> bool:
    """Return True if numbers follow the name of a variant of ours: rms:1e-6."""
    name, colon, _ = text.partition(":")
    return bool(colon) and name in NUMBERED.get(setting, ())


def join(setting: str, name: str, numbers: str) -> str:
    """Return the inverse of `split`, without default numbers."""
    return name if numbers == DEFAULTS[setting] else f"{name}:{numbers}"


def format_number(number: float) -> str:
    """Return a number as it is written in a name, with all its digits: 10000, 1e-6."""
    return repr(number).removesuffix(".0").replace("e-0", "e-")


def read_eps(m: configs.Settings) -> float:
    """Return eps, the number inside the root of the norms, from model.norm. Raises UserError unless eps >= 0."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(split("norm", m.norm)[1])) < np.inf:
            return number
    raise errors.UserError(f"model.norm = {m.norm}: write a number >= 0 after the colon, as in rms:1e-6")


def _make_rotary(
    m: configs.Settings, name: str, base: str, kind: str = "none", *numbers: str
) -> relative_position.RelativePosition:
    """Return rotary positions with this base and scaling, given as texts: '10000', or '10000', 'linear', '2'.

    Raises UserError for an unknown scaling, or numbers that it cannot use.
    """
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
            f"model.relative_position = {m.relative_position} must have the form {form}, with base >= 1 and other "
            "numbers >= 0 that give finite angles (factor > 0)"
        )
    return relative_position.rotary_of(
        base, halves=name == "rotary_halves", scaling=lambda n, K, base: scale(n, K, base, *values)
    )


def choose_all(m: configs.Settings, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the variants of the section `m` by setting.

    Raises UserError if the section has G < H or rotary positions, and the score does not support this.
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


def rehearse(m: configs.Settings, spec: transformer.Spec, sizes: dict[str, int], *, cross: bool = False) -> None:
    """Trace a block with abstract arrays, if it has variants of the user's, rotary positions, or values made of keys.

    Raises UserError if a variant of the user's fails or returns arrays of the wrong shape, or if the features of keys
    do not suit the positions or the values.
    """
    texts = {name: getattr(m, name) for name in (*MODULES, "weights")}
    users = [f"model.{name} = {text}" for name, text in texts.items() if ":" in split(name, text)[0]]
    rotary = split("relative_position", m.relative_position)[0] in ROTARY
    from_keys = spec.block.attention.value.from_keys and ":" not in m.value  # the user's value takes keys of any width
    if not (users or rotary or from_keys):
        return
    label = " and ".join(users) or f"model.score = {m.score} with model.value = {m.value}"
    label += f" and model.relative_position = {m.relative_position}" if rotary and not users else ""
    n = min(sizes["N"], 3)
    x_BND = jax.ShapeDtypeStruct((2, n, sizes["D"]), jnp.float32)

    def trace_stages(key: jax.Array, x_BND: jax.Array) -> dict[str, Any]:
        params = blocks.init(key, **sizes, spec=spec.block, bias=m.bias, cross=cross)
        shapes.check(params)
        score, code = spec.block.attention.score, spec.position.init(key, N=sizes["N"], D=sizes["D"])
        (q, k), _ = variant.split_measures(score, score.apply(params["score"], x_BND, x_BND))
        return {"params": params, "queries": q, "keys": k, "position": spec.position.apply(code, x_BND, None)}

    def trace_block(params: dict, x_BND: jax.Array) -> tuple[jax.Array, dict]:
        memory = attentions.Memory(x_BND, None) if cross else None
        call = attentions.Call(mask=masks.causal, memory=memory)
        return spec.block.order.apply(params, x_BND, spec.block, call)

    with by_name.user_errors(label):
        arrays = jax.eval_shape(trace_stages, jax.random.key(0), x_BND)
    params = arrays.pop("params")
    sizes = sizes | {"G": m.G}
    if misfit := _find_misfit(arrays, shapes.check(params), sizes, n, rotary=rotary, from_keys=from_keys):
        raise errors.UserError(f"{label}: {misfit}")
    with by_name.user_errors(label):
        y_BND, aux = jax.eval_shape(trace_block, params, x_BND)
        weights = blocks.weigh_measures(spec.block)
    if y_BND.shape != x_BND.shape:
        raise errors.UserError(f"{label}: its block returns tokens of shape {y_BND.shape}, not {x_BND.shape}")
    _check_measures(label, aux.get("measures", {}), weights)


def _check_measures(label: str, measures: variant.Measures, weights: dict[str, float]) -> None:
    """Raise UserError if a block's measures are not two numbers for each declared name, or if a name is reserved."""
    if measures.keys() != weights.keys() or any(leaf.shape for leaf in jax.tree.leaves(measures)):
        raise errors.UserError(
            f"{label}: its block returns the measures {sorted(measures)}, and declares {sorted(weights)}. Return "
            "(array, {name: (sum, count)}), with two numbers for each name in `measures`"
        )
    if reserved := weights.keys() & checkpoint.BETTER.keys():
        raise errors.UserError(f"{label}: choose another name for the measure {min(reserved)}, which every run has")


def _find_misfit(arrays: dict, letters: dict, sizes: dict[str, int], n: int, *, rotary: bool, from_keys: bool) -> str:
    """Return a sentence on the first wrong size in parameters, queries, keys or position code; '' if all are right.

    letters: the sizes of the parameters. n: number of tokens.
    """
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
        return f"its queries have {K} features, but rotary positions need an even number"
    if from_keys and K != sizes["K"]:
        return f"its keys have {K} features, but values made of keys need model.K = {sizes['K']}"
    shape, tokens = arrays["position"].shape, (2, n, sizes["D"])
    return "" if shape == tokens else f"its position code returns the shape {shape}, not {tokens}"


def check_scales(m: configs.Settings, spec: blocks.Spec, params: dict, changed: set[str]) -> None:
    """Raise UserError if score_std, output_std or mup is set but does not scale the matrices of its variant.

    changed: which of the two are set by single runs of a study. A variant declares its matrices (Score.inner,
    Value.output, Variant.output).
    """
    if m.mup:
        with by_name.user_errors(f"model.mup = {m.mup}"):
            mup.check(params, depth=bool(m.mup_depth))
    score, value = spec.attention.score, spec.attention.value
    for setting, stage, field, names in (
        ("score_std", "score", "inner", score.inner),
        ("output_std", "value", "output", value.output),
        ("output_std", "mlp", "output", spec.mlp.output),
    ):
        paths = [path for path in shapes.flat(params) if stage in re.split("/|_cross/", path)[:-1]]
        matrices = [path.rpartition("/")[2] for path in paths if shapes.is_matrix(path)]
        unscaled, is_users = [name for name in matrices if not name.startswith(names)], ":" in getattr(m, stage)
        if stage == "score" and len(unscaled) == len(matrices):
            misses = True
        else:
            declares = names not in ((), attentions.score.Score._field_defaults["inner"])
            misses = is_users and bool(unscaled) and not declares
        scales = setting in changed or getattr(m, setting) != 1
        if setting == "output_std" and m.mup_depth:  # which multiplies the same matrices
            setting, scales = "mup_depth", True
        if misses and scales:
            matrix = unscaled[0] if unscaled else "any matrix"
            raise errors.UserError(
                f"model.{setting} does not scale {matrix} of model.{stage} = {getattr(m, stage)}. Declare the matrices "
                f"in the variant's field {field} = ({matrix!r},), or do not set model.{setting}"
            )
