"""The functions for the places of a model, by their names in the config; one from a user's own file is tried first.

`rehearse` traces a block of the chosen variants on shapes alone. An error of a user's variant names its line.
"""

import contextlib
import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.engine import by_name, config, errors
from tfm import block, mlp, norm, position, shapes, transformer
from tfm.attention import mask as masks, relative_position, rotary_scaling, score, spec as attentions, value

ROOMS = dict(score=score, value=value, relative_position=relative_position, norm=norm, mlp=mlp, position=position)
ROTARY = ("rotary", "rotary_halves")
# The variants of a room behind whose names numbers may stand, and those that are meant where nothing does.
NUMBERED = {"relative_position": ROTARY, "norm": tuple(by_name.candidates(norm))}
USUAL = {"relative_position": "10000", "norm": "1e-5"}
NOSELF = "_noself"  # behind the name of a score: tokens attend to others, where they may


def choose(m: config.Settings, name: str) -> Any:
    """The variant of this room that the section `m` names. UserError for no such."""
    variant, numbers = split(name, getattr(m, name))
    others = name == "score" and variant.endswith(NOSELF) and ":" not in variant
    chosen = by_name.choose(name, variant.removesuffix(NOSELF * others), by_name.candidates(ROOMS[name]))
    if others:
        chosen = chosen._replace(attend_to_self=False)
    if variant in ROTARY:
        return _rotary(m, variant, *numbers.split(":"))
    return _ignore_layout(name, chosen)


def _ignore_layout(name: str, chosen: Any) -> Any:
    """Return the variant with a function that takes `layout` in its room's place for it, if it has none."""
    field = {"norm": "apply", "mlp": "apply", "value": "out_proj"}.get(name)
    if field is None or chosen.takes_layout:
        return chosen
    function = getattr(chosen, field)
    return chosen._replace(**{field: lambda *arrays, layout, **options: function(*arrays, **options)})


def split(room: str, text: str) -> tuple[str, str]:
    """The variant that a text names, and the numbers behind it: ('rotary', '10000') of 'rotary' and 'rotary:10000'. One
    of the user's own has a colon in its name, and numbers that are usual."""
    variant, colon, numbers = text.partition(":")
    known = variant in NUMBERED.get(room, ())
    return variant if known else text, numbers if known and colon else USUAL.get(room, "")


def joined(room: str, variant: str, numbers: str) -> str:
    """The inverse of `split`, without what is usual."""
    return variant if numbers == USUAL[room] else f"{variant}:{numbers}"


def written(number: float) -> str:
    """As it stands there, to its last bit: 10000, 1e-6."""
    return repr(number).removesuffix(".0").replace("e-0", "e-")


def eps(m: config.Settings) -> float:
    """What stands inside the root of the norms. UserError for no such number."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(split("norm", m.norm)[1])) < np.inf:
            return number
    raise errors.UserError(f"model.norm = {m.norm}: behind the colon a number from 0 must stand, as in rms:1e-6")


def _rotary(m: config.Settings, name: str, base: str, *scaled: str) -> relative_position.RelativePosition:
    """Rotary positions of this base and scaling: '10000', or '10000', 'linear', '2'."""
    of = by_name.choose("rotary scaling", (scaled or ["none"])[0], rotary_scaling.KINDS)
    right = ":".join([name, "base", *scaled[:1], *[*inspect.signature(of).parameters][3:]])
    try:
        base, *numbers = [float(text) for text in (base, *scaled[1:])]
        with np.errstate(all="ignore"), jax.ensure_compile_time_eval():
            angles, length = of(np.arange(3), m.K, base, *numbers)
        fits = np.isfinite(angles).all() and length > 0 and min([1, *numbers]) >= 0 and 1 <= base < np.inf
    except (TypeError, ValueError, ZeroDivisionError):
        fits = False
    if not fits:
        wrong = f"model.relative_position = {m.relative_position} gives no angles"
        raise errors.UserError(f"{wrong}: it must be {right}, in numbers, and base at least 1")
    how = {"halves": name == "rotary_halves", "scaling": lambda n, K, base: of(n, K, base, *numbers)}
    return relative_position.rotary_of(base, **how)


def checked(m: config.Settings, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the variants that the section `m` names, by room. Raises UserError if they do not fit together: shared
    keys, rotary positions and values made of keys need a score that supports them."""
    chosen = {name: choose(m, name) for name in ROOMS}
    if m.G < sizes["H"]:
        if not chosen["score"].supports_gqa:
            right = [name for name, one in by_name.candidates(score).items() if one.supports_gqa]
            raise errors.UserError(
                f"model.G = {m.G} with model.H = {sizes['H']}: model.score = {m.score} does not support shared keys "
                f"(supports_gqa); these do: {', '.join(right)}"
            )
        for name in ("score", "value"):
            if chosen[name].supports_gqa:
                chosen[name] = chosen[name]._replace(init=functools.partial(chosen[name].init, G=m.G))
    if split("relative_position", m.relative_position)[0] in ROTARY and not chosen["score"].supports_rope:
        raise errors.UserError(
            f"model.relative_position = {m.relative_position} turns queries and keys, and model.score = {m.score} does "
            "not declare that they may be turned, as score.Score(init, apply, supports_rope=True) does"
        )
    return chosen


def rehearse(m: config.Settings, spec: transformer.Spec, sizes: dict[str, int], *, N: int, cross: bool = False) -> None:
    """Trace the shapes of a block, with nothing computed. Raises UserError if a variant of the user's own fails or
    makes other shapes than its room's, or if features do not fit together."""
    own = [f"model.{name} = {getattr(m, name)}" for name in ROOMS if ":" in split(name, getattr(m, name))[0]]
    rotary, from_keys = (
        split("relative_position", m.relative_position)[0] in ROTARY,
        spec.block.attention.value.from_keys,
    )
    if not (own or rotary or from_keys):
        return
    called = " and ".join(own) or f"model.score = {m.score} with model.value = {m.value}"
    called += f" and model.relative_position = {m.relative_position}" if rotary and not own else ""
    n, x_BND = min(N, 3), jax.ShapeDtypeStruct((2, min(N, 3), sizes["D"]), jnp.float32)

    def trace_parts(key: jax.Array, x_BND: jax.Array) -> dict[str, Any]:
        params, of = block.init(key, **sizes, N=N, spec=spec.block, bias=m.bias, cross=cross), spec.block.attention
        shapes.check(params)
        q, k = of.score.apply(params["score"], x_BND, x_BND)
        position = spec.position.apply(spec.position.init(key, N=N, D=sizes["D"]), x_BND, None)
        return {"params": params, "queries": q, "keys": k, "position": position}

    def trace_block(params: dict, x_BND: jax.Array) -> jax.Array:
        call = attentions.Call(mask=masks.causal, memory=attentions.Memory(x_BND, None) if cross else None)
        return block.apply(params, x_BND, spec.block, call)[0]

    with by_name.told(called):
        made = jax.eval_shape(trace_parts, jax.random.key(0), x_BND)
    params = made.pop("params")
    if wrong := _misfit(made, shapes.check(params), sizes | {"G": m.G}, n, rotary=rotary, from_keys=from_keys):
        raise errors.UserError(f"{called}: {wrong}")
    with by_name.told(called):
        y_BND = jax.eval_shape(trace_block, params, x_BND)
    if y_BND.shape != x_BND.shape:
        raise errors.UserError(f"{called}: its block makes tokens of the shape {y_BND.shape}, not {x_BND.shape}")


def _misfit(made: dict, letters: dict, sizes: dict[str, int], n: int, *, rotary: bool, from_keys: bool) -> str:
    """Return what does not fit of queries, keys, a position code and the sizes of parameters; '' if all fits."""
    for letter in "HKDF":
        if letters.get(letter, sizes[letter]) != sizes[letter]:
            return f"{letter} is {letters[letter]} in its parameters, not {sizes[letter]}"
    K = (made["queries"].shape or (0,))[-1]
    for name in ("queries", "keys"):
        shape = made[name].shape
        if len(shape) != 4 or shape[:1] + shape[2:] != (2, n, K) or shape[1] not in (1, sizes["G"], sizes["H"]):
            return f"its {name} have the shape {shape}, not {(2, sizes['H'], n, K)}"
    if not K or (rotary and K % 2):
        return f"its queries have {K} features" + (", and rotary positions turn pairs" if K else "")
    if from_keys and K != sizes["K"]:
        return f"values made of keys need keys of model.K = {sizes['K']} features, not {K}"
    shape = made["position"].shape
    return "" if shape == (2, n, sizes["D"]) else f"its position code makes the shape {shape}, not {(2, n, sizes['D'])}"


def check_scales(m: config.Settings, changed: set[str], params: dict, outputs: tuple[str, ...]) -> None:
    """Raise UserError if one of the changed settings leaves the matrices of its variant as they are: score_std scales
    the leaves of a score whose names begin with U, output_std those of a value or an MLP that `outputs` names."""
    for setting, room, names in (
        ("score_std", "score", "U"),
        *(("output_std", one, outputs) for one in ("value", "mlp")),
    ):
        matrices = [path for path in shapes.flat(params) if room in re.split("/|_cross/", path)[:-1]]
        matrices = [path.rpartition("/")[2] for path in matrices if shapes.is_matrix(path)]
        missed, own = [name for name in matrices if not name.startswith(names)], ":" in getattr(m, room)
        all_missed = len(missed) == len(matrices)
        if setting in changed and (
            own and missed and room == "score" or all_missed and (room == "score" or missed and own)
        ):
            what = f"model.{setting} scales no {missed[0] if missed else 'matrix'} of model.{room} = {getattr(m, room)}"
            right = f"begin the names of such matrices with {' or '.join([*names])}, or set model.{setting} = 1"
            raise errors.UserError(f"{what}: {right}")
