"""The functions for the places of a model, by their names in the config; one from a user's own file is tried first.

It is tried on shapes alone, with nothing computed: what it gives must fit into the product that takes it, as its room
of tfm says. What it raises is told with its line.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.engine import by_name, config, errors
from tfm import block, mlp, norm, position, shapes
from tfm.attention import relative_position, rotary_scaling, score, value

ROOMS = dict(score=score, value=value, relative_position=relative_position, norm=norm, mlp=mlp, position=position)
ROTARY = ("rotary", "rotary_halves")
# The variants of a room behind whose names numbers may stand, and those that are meant where nothing does.
NUMBERED = {"relative_position": ROTARY, "norm": tuple(by_name.candidates(norm))}
USUAL = {"relative_position": "10000", "norm": "1e-5"}
NOSELF = "_noself"  # behind the name of a score: tokens attend to others, where they may
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)  # those that are no size of the model: an axis is known by its size


def choose(m: config.Settings, name: str) -> Any:
    """The variant of this room that the section `m` names. UserError for no such."""
    variant, numbers = split(name, getattr(m, name))
    others = name == "score" and variant.endswith(NOSELF) and ":" not in variant
    chosen = by_name.choose(name, variant.removesuffix(NOSELF * others), by_name.candidates(ROOMS[name]))
    chosen = chosen._replace(itself=False) if others else chosen
    return _rotary(m, variant, *numbers.split(":")) if variant in ROTARY else chosen


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


class Trial(NamedTuple):
    """A variant, and the sizes that it is tried with, by their letters."""

    called: str  # 'model.score = my_file:my_score'
    variant: Any
    size: dict[str, int]

    @property
    def shared(self) -> str:
        """The letter of the heads of keys and values."""
        return "G" if self.size["G"] < self.size["H"] else "H"

    def refusal(self, says: str) -> errors.UserError:
        """The error that says this of the variant."""
        return errors.UserError(f"{self.called}: {says}")

    def ask(self, function: Callable, *arrays: Any, **how: Any) -> Any:
        """The shapes of what the function gives for such arrays. UserError where it raises."""
        try:
            return jax.eval_shape(functools.partial(function, **how), *arrays)
        except errors.UserError:
            raise
        except Exception as error:  # somebody's own code may raise anything
            says = by_name.fault(error)
            if says.startswith("TypeError"):  # no line of theirs: it has not come to that
                given = [str(getattr(one, "shape", "params") or "key") for one in arrays]
                says += f"; it is called with ({', '.join([*given, *(f'{name}={x}' for name, x in how.items())])})"
            raise self.refusal(says) from error

    def init(self, letters: str, **settings: Any) -> Any:
        """The parameters for these sizes. UserError where one has not the shape that its name says."""
        sizes = {letter: self.size[letter] for letter in letters}
        params = self.ask(self.variant.init, jax.random.key(0), **sizes, **settings)
        try:
            answer = shapes.check(params)
        except shapes.ShapeError as error:
            raise self.refusal(f"of its parameters, {error}") from error
        for letter in "HGKDF":
            n = self.size[letter]
            if answer.get(letter, n) != n:
                raise self.refusal(f"model.{letter} is {n}, and {letter} in its parameters {answer[letter]}")
        return params

    def array(self, axes: str, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        """An abstract array with these axes."""
        return jax.ShapeDtypeStruct(tuple(self.size[letter] for letter in axes), dtype)

    def check(self, what: str, axes: str, answer: Any, *, free: str = "") -> None:
        """UserError where the answer has other axes: H or G may be 1, which all share, and `free` any number."""
        right = ["any" if letter in free else self.size[letter] for letter in axes]
        shape = getattr(answer, "shape", ())
        each = zip(axes, shape, right, strict=False)
        fits = (m in (n, "any") or (letter in "HG" and n == 1) for letter, n, m in each)
        if len(shape) != len(axes) or not all(fits):
            raise self.refusal(
                f"({', '.join(axes)}) is expected of its {what}, here ({', '.join(map(str, right))}), and it gives "
                + (f"{shape}" if hasattr(answer, "shape") else "no array")
            )

    def pair(self, what: str, answer: Any) -> tuple[Any, Any]:
        """The answer, where it is two things."""
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise self.refusal(f"a pair is expected, {what}, and it gives none")
        return answer[0], answer[1]


def checked(m: config.Settings, sizes: dict[str, int], *, cross: bool = False) -> dict[str, Any]:
    """The variants that the section `m` names, by their rooms. UserError where a user's own does not do what its room
    says. cross: tokens are also compared with those of another sequence. sizes: M, D, H, K, F. Of any score that
    rotary positions are to turn, UserError too where it does not declare that they may, or has no pairs of features;
    and where heads are to share keys, of one that does not declare that they may."""
    chosen = {name: choose(m, name) for name in ROOMS}
    for name in ("score", "value") if m.G < sizes["H"] else ():
        if getattr(chosen[name], "grouped", False):
            chosen[name] = chosen[name]._replace(init=functools.partial(chosen[name].init, G=m.G))
        elif name == "score":
            right = [arm for arm, of in by_name.candidates(score).items() if getattr(of, "grouped", False)]
            raise errors.UserError(
                f"model.G = {m.G} heads of keys for model.H = {sizes['H']} heads need a matrix of the keys "
                f"alone, and model.score = {m.score} declares none (grouped, score.py): those here that do are "
                f"{', '.join(right)}"
            )
    names = {name: split(name, getattr(m, name))[0] for name in ROOMS}
    own, turned = {name for name in ROOMS if ":" in names[name]}, names["relative_position"] in ROTARY
    B, N, S, *_ = [n for n in PRIMES if n not in {*sizes.values(), m.G, 2 * sizes["K"]}]
    size = {**sizes, "G": m.G, "B": B, "N": N, "S": S}
    trials = {name: Trial(f"model.{name} = {getattr(m, name)}", choice, size) for name, choice in chosen.items()}
    if turned:
        if not getattr(chosen["score"], "rotatable", False):
            raise errors.UserError(
                f"model.relative_position = {m.relative_position} turns queries and keys, and model.score = {m.score} "
                "does not declare that they may be turned: one that asks for nothing but products of their features "
                "does, as score.Score(init, apply, rotatable=True) (tfm/attention/score.py)"
            )
    of_keys = getattr(chosen["value"], "of_keys", False)
    if turned or of_keys or own & {"score", "relative_position", "value"}:
        q, k = _score(trials["score"], bias=block.biased("score", m.bias), cross=cross)
        if turned and q.shape[-1] % 2:
            raise errors.UserError(
                f"model.relative_position = {m.relative_position} turns pairs of features, and those of queries are "
                f"{q.shape[-1]} with model.score = {m.score}: model.K must be even, or model.D where a score has no "
                "matrix"
            )
        if of_keys and k.shape[-1] != sizes["K"]:
            raise errors.UserError(
                f"model.value = {m.value} takes keys of model.K = {sizes['K']} features, and those of model.score = "
                f"{m.score} have {k.shape[-1]}: choose another value or score"
            )
        if "relative_position" in own:
            _relative_position(trials["relative_position"], q, k)
        if "value" in own:
            _value(trials["value"], k, bias=block.biased("value", m.bias), heads=q.shape[1])
    rooms = {"norm": ("D", {}, {"eps": eps(m)}), "position": ("ND", {}, {})}
    rooms["mlp"] = "DFM", {"bias": block.biased("mlp", m.bias)}, {}
    for name in sorted(rooms.keys() & own):
        of, (letters, more, settings) = trials[name], rooms[name]
        of.check("tokens", "BND", of.ask(of.variant.apply, of.init(letters, **more), of.array("BND"), **settings))
    return chosen


def _score(of: Trial, *, bias: bool, cross: bool) -> tuple[Any, Any]:
    """Queries and keys in self-attention, where both arguments are the same array."""
    params, x_BND, expected = of.init("HKD", bias=bias), of.array("BND"), "queries and keys"
    G = of.shared
    q, k = of.pair(expected, of.ask(lambda params, x: of.variant.apply(params, x, x), params, x_BND))
    others = of.pair(expected, of.ask(of.variant.apply, params, x_BND, of.array("BSD"))) if cross else (q, k)
    for queries, keys, axes in ((q, k, f"B{G}NK"), (*others, f"B{G}SK" if cross else f"B{G}NK")):
        of.check("queries", "BHNK", queries, free="K")
        of.check("keys", axes, keys, free="K")
        if queries.shape[-1] != keys.shape[-1]:
            raise of.refusal(f"its queries have {queries.shape[-1]} features, and its keys {keys.shape[-1]}")
        if not queries.shape[-1]:
            raise of.refusal("its queries and keys have no features")
    if factors := getattr(of.variant, "factors", None):
        for matrix in of.pair("its factors", of.ask(factors, params, D=of.size["D"])):
            of.check("factors", "HKD", matrix, free="K")
    return q, k


def _relative_position(of: Trial, q: Any, k: Any) -> None:
    params, n_N = of.init("HKN"), of.array("N", jnp.int32)
    rotate, bias = (getattr(of.variant, name, None) for name in ("rotate", "bias"))
    answer = (q, k) if rotate is None else of.pair("queries and keys", of.ask(rotate, params, q, k, n_N))
    for what, one, given in zip(("queries", "keys"), answer, (q, k), strict=True):
        if getattr(one, "shape", None) != given.shape:
            raise of.refusal(f"it makes {what} of the shape {given.shape} into {getattr(one, 'shape', 'no array')}")
    if bias is not None:
        of.check("bias", "HNN", of.ask(bias, params, n_N, n_N, H=of.size["H"]))


def _value(of: Trial, k: Any, *, bias: bool, heads: int) -> None:
    """heads: of the queries, 1 where all share one map."""
    params = of.init("HKDM", bias=bias)
    v = of.ask(of.variant.apply, params, k if getattr(of.variant, "of_keys", False) else of.array("BND"))
    of._replace(size={**of.size, "V": 0}).check("values", f"B{of.shared}NV", v, free="V")
    y = jax.ShapeDtypeStruct((v.shape[0], max(heads, v.shape[1]), *v.shape[2:]), v.dtype)
    of.check("tokens", "BND", of.ask(of.variant.combine, params, y))


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
