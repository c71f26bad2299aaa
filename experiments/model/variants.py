"""Variants: the functions for the stages of a model, chosen by the names in the config's section `model`.

A name can contain numbers (rotary:500000, rms:1e-6), or name the user's code (my_file:my_score). `rehearse` traces a
block with the chosen variants before the training, so that an error in the user's code is reported with its line.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.config import by_name, errors, settings as configs
from experiments.folder import checkpoint
from tfm import block as blocks, mlp, mup, norm, position, shapes, transformer, variant
from tfm.attention import explicit, heads as attentions, mask as masks, relative_position, rotary_scaling, score, value

MODULES = dict(score=score, value=value, relative_position=relative_position, norm=norm, mlp=mlp, position=position)
ROTARY = ("rotary", "rotary_halves")
# The variants whose names may be followed by numbers, and the numbers that count if none follow.
NUMBERED = {"relative_position": ROTARY, "norm": tuple(by_name.candidates(norm)), "score": ("sym_plus_skew",)}
DEFAULTS = {"relative_position": "10000", "norm": "1e-5", "score": "2"}
NOSELF = "_noself"  # suffix of a score: tokens attend to themselves only if they may attend to no other
TAKE_LAYOUT = {"norm": "apply", "mlp": "apply", "value": "out_proj"}  # the function that may take `layout`


def choose(m: configs.Settings, setting: str) -> Any:
    """Return the variant that this setting of the section `m` names.

    Raises UserError for an unknown name, and for numbers after its colon that the variant cannot use.
    """
    text = getattr(m, setting)
    is_noself = setting == "score" and text.endswith(NOSELF) and not by_name.CODE.fullmatch(text)
    name, numbers = split(setting, text.removesuffix(NOSELF) if is_noself else text)
    chosen = by_name.choose(setting, name, by_name.candidates(MODULES[setting]))
    if setting == "score" and name in NUMBERED["score"]:
        chosen = _make_skew(m, numbers)
    if is_noself:
        return chosen._replace(attend_to_self=False)
    if name in ROTARY:
        return _make_rotary(m, name, *numbers.split(":"))
    if setting not in TAKE_LAYOUT or chosen.takes_layout:
        return chosen
    field = TAKE_LAYOUT[setting]
    return chosen._replace(**{field: _ignore_layout(getattr(chosen, field))})


def choose_weights(m: configs.Settings) -> Callable | None:
    """Return the user's function of model.weights, (l_BHNS, allowed) -> A_BHNS; None for the softmax.

    allowed: a mask of keys by query, True where attention is allowed (explicit.weights).
    """
    chosen = by_name.choose("weights", m.weights, {"softmax": explicit.weights})
    return chosen if is_users(m, "weights") else None


def _ignore_layout(function: Callable) -> Callable:
    """Return the function with an additional argument `layout`, which it ignores."""

    @functools.wraps(function, updated=())
    def call(*arrays: Any, layout: Any, **options: Any) -> Any:
        return function(*arrays, **options)

    return call


def split(setting: str, text: str) -> tuple[str, str]:
    """Return the name of a variant and its numbers: ('rotary', '10000') for both 'rotary' and 'rotary:10000'.

    setting: its field of `model`, such as relative_position. Another name, such as a user's my_file:my_norm, is
    returned whole, with the default numbers of the setting, or '' if the setting has none.
    """
    name, colon, numbers = text.partition(":")
    if name not in NUMBERED.get(setting, ()):
        return text, DEFAULTS.get(setting, "")
    return name, numbers if colon else DEFAULTS[setting]


def join(setting: str, name: str, numbers: str) -> str:
    """Return the name with its numbers, such as "rotary:500000", or the name alone if they are the defaults."""
    return name if numbers == DEFAULTS[setting] else f"{name}:{numbers}"


def format_number(number: float) -> str:
    """Return a number as it is written in a name, with all its digits: 10000, 1e-6."""
    return repr(number).removesuffix(".0").replace("e-0", "e-")


def read_eps(m: configs.Settings) -> float:
    """Return eps, the number inside the root of the norms, from model.norm (rms:1e-6).

    Raises UserError unless it is a finite number >= 0.
    """
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(split("norm", m.norm)[1])) < np.inf:
            return number
    raise errors.UserError(f"model.norm = {m.norm}: write a number >= 0 after the colon, as in rms:1e-6")


def _make_rotary(
    m: configs.Settings, name: str, base: str, kind: str = "none", *numbers: str
) -> relative_position.RelativePosition:
    """Return rotary positions with this base and scaling, given as texts: '10000', or '10000', 'linear', '2'.

    name: 'rotary', which pairs neighbouring features, or 'rotary_halves', which pairs those of the two halves.

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
    rotary = relative_position.rotary_of(
        base, halves=name == "rotary_halves", scaling=lambda n, K, base: scale(n, K, base, *values)
    )
    return rotary._replace(is_dynamic=kind == "dynamic")


def _make_skew(m: configs.Settings, rank: str) -> score.Score:
    """Return the score sym_plus_skew with this rank, given as text. Raises UserError unless it is even, 0 to D."""
    if not re.fullmatch("[0-9]{1,6}", rank) or int(rank) % 2 or int(rank) > m.D:
        end = f"an even rank from 0 to model.D = {m.D}, as in sym_plus_skew:2"
        raise errors.UserError(f"model.score = {m.score}: after the colon, write {end}")
    return score.sym_plus_skew_of(int(rank))


def choose_all(m: configs.Settings) -> dict[str, Any]:
    """Return {setting: variant} for each key of MODULES, with G heads of keys and values if a variant allows this.

    Raises UserError if a setting has an unknown name.
    """
    chosen = {setting: choose(m, setting) for setting in MODULES}
    for setting in ("score", "value"):
        variant = chosen[setting]
        if m.G < m.H and variant.supports_gqa:
            chosen[setting] = variant._replace(init=functools.partial(variant.init, G=m.G))
    return chosen


def is_users(m: configs.Settings, setting: str) -> bool:
    """Return True if the value of this setting in the section m names the user's code ("my_file:my_variant")."""
    return by_name.CODE.fullmatch(getattr(m, setting)) is not None


def rehearse(m: configs.Settings, spec: transformer.Spec, sizes: dict[str, int], *, cross: bool = False) -> None:
    """Trace a block with abstract arrays, if it has variants of the user's, rotary positions, or values made of keys.

    Raises UserError if a variant of the user's fails, returns arrays of the wrong shape or other measures than it
    declares, or declares a measure that every run has; and if the features of keys do not suit the positions or the
    values. m: the section `model`. cross: True for a block with cross-attention.
    """
    users = [f"model.{name} = {getattr(m, name)}" for name in (*MODULES, "weights") if is_users(m, name)]
    rotary = spec.block.attention.relative_position.is_rotary
    from_keys = spec.block.attention.value.from_keys and not is_users(m, "value")  # the user's takes keys of any width
    if not (users or rotary or from_keys):
        return
    label = " and ".join(users) or f"model.score = {m.score} with model.value = {m.value}"
    label += f" and model.relative_position = {m.relative_position}" if rotary and not users else ""
    n = min(sizes["N"], 3)

    def trace(key: jax.Array, x_BND: jax.Array) -> tuple[jax.Array, dict]:
        params = blocks.init(key, **sizes, spec=spec.block, bias=m.bias, cross=cross)
        score, code = spec.block.attention.score, spec.position.init(key, N=sizes["N"], D=sizes["D"])
        q, k = variant.take_measures(score, score.apply(params["score"], x_BND, x_BND), {})
        arrays = {"queries": q, "keys": k, "position": spec.position.apply(code, x_BND, None)}
        array_shapes = {name: jnp.shape(x) for name, x in arrays.items()}
        faults = _find_misfits(
            array_shapes, shapes.check(params), sizes | {"G": m.G}, n, rotary=rotary, from_keys=from_keys
        )
        errors.refuse(*((fault, f"{label}: {sentence}") for fault, sentence in faults))
        call = attentions.Call(mask=masks.causal, memory=attentions.Memory(x_BND, None) if cross else None)
        return spec.block.order.apply(params, x_BND, spec.block, call)

    with by_name.user_errors(label):
        x_BND = jax.ShapeDtypeStruct((2, n, sizes["D"]), jnp.float32)
        y_BND, aux = jax.eval_shape(trace, jax.random.key(0), x_BND)
        weights = blocks.weigh_measures(spec.block)
    measures = aux.get("measures", {})
    unlike = measures.keys() != weights.keys() or any(leaf.shape for leaf in jax.tree.leaves(measures))
    reserved = sorted(weights.keys() & checkpoint.BETTER.keys())
    errors.refuse(
        (y_BND.shape != x_BND.shape, f"{label}: its block returns tokens of shape {y_BND.shape}, not {x_BND.shape}"),
        (
            unlike,
            f"{label}: its block returns the measures {sorted(measures)}, and declares {sorted(weights)}. Return "
            "(array, {name: (sum, count)}), with two numbers for each name in `measures`",
        ),
        (reserved, f"{label}: choose other names for the measures {', '.join(reserved)}, which every run has"),
    )


def _find_misfits(
    arrays: dict[str, tuple], letters: dict, sizes: dict[str, int], n: int, *, rotary: bool, from_keys: bool
) -> Iterator[tuple[bool, str]]:
    """Check the sizes of parameters, queries, keys and position code. Yield (whether a check fails, the sentence).

    arrays: the shapes of queries, keys and position code. letters: the sizes of the parameters. sizes: the right ones.
    n: number of tokens. rotary: positions rotate queries and keys. from_keys: values are made of keys.
    """
    for letter in "HKDF":
        size = letters.get(letter, sizes[letter])
        yield size != sizes[letter], f"{letter} is {size} in its parameters, not {sizes[letter]}"
    K = (arrays["queries"] or (0,))[-1]
    for name in ("queries", "keys"):
        shape = arrays[name]
        fits = len(shape) == 4 and shape[:1] + shape[2:] == (2, n, K) and shape[1] in (1, sizes["G"], sizes["H"])
        yield not fits, f"its {name} have the shape {shape}, not {(2, sizes['H'], n, K)}"
    yield not K, "its queries have 0 features"
    yield rotary and K % 2, f"its queries have {K} features, but rotary positions need an even number"
    wrong_keys = from_keys and K != sizes["K"]
    yield wrong_keys, f"its keys have {K} features, but values made of keys need model.K = {sizes['K']}"
    shape, tokens = arrays["position"], (2, n, sizes["D"])
    yield shape != tokens, f"its position code returns the shape {shape}, not {tokens}"


def check_scales(m: configs.Settings, spec: blocks.Spec, params: dict, changed: set[str]) -> None:
    """Raise UserError if score_std, output_std or mup is set but does not scale the matrices of its variant.

    changed: the settings among score_std and output_std that single runs of a study set. A variant declares its
    matrices in a field: Score.inner, Value.output or Variant.output.
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
        unscaled = [name for name in matrices if not name.startswith(names)]
        declares = names not in ((), attentions.score.Score._field_defaults["inner"])
        misses = is_users(m, stage) and unscaled and not declares
        if stage == "score" and unscaled == matrices:
            misses = True
        scales = setting in changed or getattr(m, setting) != 1
        if setting == "output_std" and m.mup_depth:  # which multiplies the same matrices
            setting, scales = "mup_depth", True
        if misses and scales:
            matrix = unscaled[0] if unscaled else "any matrix"
            raise errors.UserError(
                f"model.{setting} does not scale {matrix} of model.{stage} = {getattr(m, stage)}. Declare the matrices "
                f"in the variant's field {field} = ({matrix!r},), or do not set model.{setting}"
            )
