"""The optimiser: AdamW or Muon on optax, with the decay, the clipping and the schedules a config can name."""

import fnmatch
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from experiments.engine import by_name, config, errors
from tfm import shapes

BETAS = ("beta1", "beta2")  # the two of the setting betas
SETTINGS = ("muon_lr_multiplier", "momentum", *BETAS, "weight_decay", "clip")  # of an optimiser
ALSO = {"b1": "beta1", "b2": "beta2"}  # what optax calls two of them
FINAL = 0.1  # of the peak, where a schedule that falls says nothing else
EPS = 1e-7  # of the norm that Newton-Schulz begins with: a gradient of zeros stays zeros


def schedule(name: str, *, peak: float, steps: int, warmup_steps: int) -> optax.Schedule:
    """Learning rate against step: linear warm-up from 0 to `peak`, then by name.

    'constant'; 'linear' and 'cosine' fall to a tenth of the peak at `steps`, and 'linear:0' to 0; 'wsd' (warm-up,
    stable, decay) stays at the peak and falls linearly over the last fifth of all steps. 'my_file:fall' is one's own:
    (step, steps) -> the fraction of the peak at this step, an integer array, of those `steps` behind the warm-up.
    """
    if warmup_steps >= steps:
        raise errors.UserError(f"optim.warmup_steps = {warmup_steps} must be smaller than train.steps = {steps}")
    kind, colon, last = name.partition(":")
    try:
        fraction = float(last) if colon else FINAL
    except ValueError:  # one's own
        kind, fraction = name, FINAL
    if not 0 <= fraction < math.inf or (colon and kind == "constant"):
        raise errors.UserError(f"optim.schedule = {name}: behind cosine, linear or wsd a fraction from 0 may stand")
    rest, final = steps - warmup_steps, peak * fraction
    fall = min(max(1, round(steps / 5)), rest)
    chosen = by_name.choose(
        "schedule",
        kind,
        {
            "constant": lambda: optax.constant_schedule(peak),
            "linear": lambda: optax.linear_schedule(peak, final, rest),
            "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=fraction),
            "wsd": lambda: optax.join_schedules(
                [optax.constant_schedule(peak), optax.linear_schedule(peak, final, fall)], [rest - fall]
            ),
        },
    )
    after = _own_schedule(name, chosen, peak, rest) if ":" in kind else chosen()
    # Step 0 of a warm-up would have learning rate 0 and do nothing: it starts at peak / warmup_steps.
    first = peak / max(warmup_steps, 1)
    return optax.join_schedules([optax.linear_schedule(first, peak, max(warmup_steps - 1, 1)), after], [warmup_steps])


def _own_schedule(name: str, fraction: Callable, peak: Any, steps: int) -> optax.Schedule:
    """peak * fraction(step, steps). UserError where that is not one number."""
    with by_name.told(called := f"optim.schedule = {name}"):
        shape = getattr(
            jax.eval_shape(lambda n: fraction(n, steps), jax.ShapeDtypeStruct((), jnp.int32)), "shape", None
        )
    if shape != ():
        raise errors.UserError(f"{called}: (step, steps) -> a number is expected, and it gives {shape or 'none'}")
    return lambda n: peak * fraction(jnp.maximum(n, 0), steps)  # below 0 in the warm-up, where nobody asks


def takes(rule: Callable) -> dict[str, str]:
    """The settings that an optimiser's factory has arguments for, {argument: setting}, beside the rate, its first."""
    names = list(inspect.signature(rule).parameters)[1:]
    return {name: ALSO.get(name, name) for name in names if ALSO.get(name, name) in SETTINGS}


def own(
    name: str, rule: Callable, rate: optax.Schedule, values: Mapping[str, Any], *, clip: float
) -> optax.GradientTransformation:
    """What the factory of one's own makes of the rate and of the settings that it `takes`, behind the clipping by
    global norm where it does not do that itself. Of an argument `mask`, for decay, it gets `matrices`.

    UserError where it makes none. Steps are counted beside it: not every rule of optax does.
    """
    more = {"mask": matrices} if "mask" in inspect.signature(rule).parameters else {}
    with by_name.told(called := f"optim.name = {name}"):
        made = rule(rate, **values, **more)
    if not (hasattr(made, "init") and hasattr(made, "update")):
        raise errors.UserError(
            f"{called}: (learning rate of a step, settings of optim) -> an optax"
            f".GradientTransformation is expected, and it gives {type(made).__name__}"
        )
    made = optax.chain(made, optax.scale_by_schedule(lambda _: 1.0))
    return made if "clip" in values else _clipped(made, clip)


def check(name: str, rule: optax.GradientTransformation, params: Any) -> None:
    """UserError where an optimiser of one's own raises, or its updates are not alike these (abstract) parameters."""
    with by_name.told(called := f"optim.name = {name}"):
        updates, _ = jax.eval_shape(rule.update, params, jax.eval_shape(rule.init, params), params)
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise errors.UserError(f"{called}: its updates have not the names and shapes of the parameters")


def matrices(params: Any) -> Any:
    """Which leaves weight decay acts on: matrices, not biases, gains and shifts (read off the names)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: shapes.is_matrix(path), params)


def adamw(
    rate: optax.Schedule, *, beta1: float, beta2: float, eps: float = 1e-8, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019), decay on matrices only, after clipping by global norm (0: no clipping)."""
    step = optax.adamw(rate, b1=beta1, b2=beta2, eps=eps, weight_decay=weight_decay, mask=matrices)
    return _clipped(step, clip)


def muon(
    rate: optax.Schedule,
    *,
    muon_lr_multiplier: float,
    momentum: float,
    ns_steps: int = 5,
    weight_decay: float,
    clip: float,
    beta1: float,
    beta2: float,
    eps: float = 1e-8,
    rows: bool = False,
    ball: bool = False,
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices inside the blocks, at `muon_lr_multiplier` times the rate.

    A step U V^T, where U S V^T is Nesterov's momentum, moves all directions of a map equally far. Embeddings, output
    matrices, gains and biases stay with AdamW, whose are beta1, beta2 and eps. Decay as in `adamw`, in units of each
    one's own rate. rows: NorMuon (`even_rows`). ball: the hyperball variant (Wen et al. 2026): step and matrix have the
    norm R with which the matrix began, W <- R (W - rate R u / |u|) / |...|, and its decay would change nothing.
    """
    of_matrices = optax.chain(
        optax.trace(momentum, nesterov=True),
        orthogonal(ns_steps=ns_steps),
        *([even_rows(beta2)] if rows else []),
        optax.stateless(_as_long) if ball else optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(lambda step: muon_lr_multiplier * rate(step)),
        *([optax.stateless(_on_the_ball)] if ball else []),
    )
    rest = adamw(rate, weight_decay=weight_decay, clip=0, beta1=beta1, beta2=beta2, eps=eps)

    def label(path: Any, _: Any) -> str:
        return "muon" if shapes.STACKED in shapes.names(path)[:-1] and shapes.is_matrix(path) else "adamw"

    labels = functools.partial(jax.tree_util.tree_map_with_path, label)
    return _clipped(optax.partition({"muon": of_matrices, "adamw": rest}, labels), clip)


def orthogonal(*, ns_steps: int) -> optax.GradientTransformation:
    """Updates become sqrt(max(1, outputs / inputs)) U V^T, matrix by matrix, near to it by steps of Newton-Schulz.

    The momentum before it is by hand, as optax's own (`optax.contrib.muon`) corrects the bias of the first steps, and
    Jordan's does not: nothing is remembered here.
    """

    rows_and_columns = optax.contrib.MuonDimensionNumbers  # it calls rows `reduction_axis`, as it writes x W for W x

    def scaled(path: Any, step: jax.Array) -> jax.Array:
        outputs, inputs = (math.prod(step.shape[i] for i in axes) for axes in shapes.sides(path))
        return math.sqrt(max(1, outputs / inputs)) * step

    def update(updates: Any, params: Any = None) -> Any:
        numbers = jax.tree_util.tree_map_with_path(lambda path, _: rows_and_columns(*shapes.sides(path)), updates)
        newton_schulz = optax.contrib.scale_by_muon(
            ns_steps=ns_steps, beta=0.0, eps=EPS, nesterov=False, weight_dimension_numbers=numbers
        )
        with jax.named_scope("muon"):
            steps, _ = newton_schulz.update(updates, newton_schulz.init(updates))
            return jax.tree_util.tree_map_with_path(scaled, steps)

    return optax.stateless(update)


def even_rows(decay: float) -> optax.GradientTransformation:
    """Updates o become o_rc / sqrt(v_r), with the norm that o had: v_r is the moving average, with this decay, of the
    mean square of a row, of one output (Li et al. 2025, NorMuon, whose norm is 0.2 sqrt(rows columns))."""

    def moved(path: Any, v: jax.Array, step: jax.Array) -> jax.Array:
        return decay * v + (1 - decay) * jnp.mean(jnp.square(step), shapes.sides(path)[1], keepdims=True)

    def update(steps: Any, v: Any, params: Any = None) -> tuple[Any, Any]:
        v = jax.tree_util.tree_map_with_path(moved, v, steps)
        return _as_long(jax.tree.map(lambda step, v: step / (jnp.sqrt(v) + EPS), steps, v), steps), v

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def _as_long(steps: Any, like: Any) -> Any:
    """Each matrix with the Frobenius norm of the other; one of zeros stays."""

    def norm(path: Any, x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x), sum(shapes.sides(path), ()), keepdims=True))

    def scaled(path: Any, step: jax.Array, other: jax.Array) -> jax.Array:
        return step * (norm(path, other) / (norm(path, step) + EPS**2))

    return jax.tree_util.tree_map_with_path(scaled, steps, like)


def _on_the_ball(steps: Any, params: Any) -> Any:
    """The steps after which each matrix has the norm that it has."""
    ends = _as_long(jax.tree.map(jnp.add, params, steps), params)
    return jax.tree.map(jnp.subtract, ends, params)


class Averaged(NamedTuple):
    """The state of an optimiser, and by how much what it trains lies ahead of the average of it."""

    inner: Any
    ahead: Any


def averaged(optimiser: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """The optimiser, whose parameters are the exponential moving average a <- d a + (1 - d) w of those that it trains,
    w (`trained_at`), from the same beginning. What is evaluated, saved and opened is the average."""
    inner = optax.with_extra_args_support(optimiser)

    def init(params: Any) -> Averaged:
        return Averaged(inner.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: Averaged, params: Any, **more: Any) -> tuple[Any, Averaged]:
        updates, new = inner.update(grads, state.inner, trained_at(params, state), **more)
        ahead = jax.tree.map(jnp.add, state.ahead, updates)  # of a, that w which comes
        return jax.tree.map(lambda x: (1 - decay) * x, ahead), Averaged(new, jax.tree.map(lambda x: decay * x, ahead))

    return optax.GradientTransformationExtraArgs(init, update)


def trained_at(params: Any, opt_state: Any) -> Any:
    """The parameters of which the next gradient is: these, or those of which they are the average."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Averaged))
    ahead = next((node.ahead for node in nodes if isinstance(node, Averaged)), None)
    return params if ahead is None else jax.tree.map(jnp.add, params, ahead)


def trained(params: Any, frozen: Sequence[str]) -> Any:
    """Which leaves are trained: True where no pattern of `frozen` means them. A pattern is the path of a parameter or
    of the part it lies in, where * stands for anything: 'embed/E_WD', 'blocks', '*/b?_*'. The last one that means a
    leaf counts, and what it means is trained after all where it begins with '!': ['*', '!head']."""

    def is_trained(path: Any, _: Any) -> bool:
        name = "/".join(shapes.names(path))
        last = next((pattern for pattern in reversed(frozen) if _means(pattern, name)), "!")
        return last.startswith("!")

    return jax.tree_util.tree_map_with_path(is_trained, params)


def _means(pattern: str, name: str) -> bool:
    pattern = pattern.removeprefix("!")
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}/*")


def check_frozen(frozen: Sequence[str], params: Any, before: Sequence[str] = ()) -> None:
    """Raise UserError if a pattern names no parameter or, after the patterns before it, changes nothing, and if none
    is left to train."""
    names = shapes.flat(params)
    for i, pattern in enumerate(frozen):
        if not any(_means(str(pattern), name) for name in names):
            hint = by_name.nearest(str(pattern), names)
            raise errors.UserError(f'optim.frozen: no parameter is called "{pattern}"{hint}; --dry_run lists them')
        earlier = [*before, *frozen[:i]]
        if trained(params, [*earlier, pattern]) == trained(params, earlier):
            state = "trained" if pattern.startswith("!") else "frozen"
            raise errors.UserError(f'optim.frozen: "{pattern}" changes nothing: all that it names is {state} already')
    if not any(jax.tree.leaves(trained(params, [*before, *frozen]))):
        raise errors.UserError("optim.frozen leaves nothing to train")


def _clipped(step: optax.GradientTransformation, clip: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(clip), step) if clip > 0 else step


NAMED = {"adamw": adamw, "muon": muon, "normuon": functools.partial(muon, rows=True)}
NAMED |= {"hyperball": functools.partial(muon, ball=True)}


def warmup_steps(settings: config.Settings) -> int:
    """Return optim.warmup_steps; a tenth of train.steps if these are no more than its default, which nobody changed."""
    key, steps, n = "optim.warmup_steps", settings.train.steps, settings.optim.warmup_steps
    return max(steps, 0) // 10 if steps <= n == settings.defaults()[key] and not settings.given(key) else n


def optimiser(
    settings: config.Settings, frozen: Sequence[str] = (), **numbers: jax.Array
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """The learning rate of every step, and the optimiser with it, of what is not frozen (step.Task).

    numbers: learning_rate and weight_decay, where they are not the config's but those of one of several runs.
    """
    o = settings.optim
    if o.name not in NAMED and callable(getattr(optax, o.name, None)):
        raise errors.UserError(f'unknown optimiser "{o.name}" (did you mean "optax:{o.name}"?)')
    rule = by_name.choose("optimiser", o.name, NAMED)
    arguments = takes(rule)
    names = ("learning_rate", "warmup_steps", "clip", "ema", *arguments.values())
    values = {name: getattr(o, name) for name in names if name not in BETAS}
    config.at_least(0, {f"optim.{name}": value for name, value in values.items()})
    for name in ("momentum", "ema"):
        if values.get(name, 0) >= 1:
            raise errors.UserError(f"optim.{name} must be less than 1, and {values[name]} is not")
    betas = o.betas if {*names} & {*BETAS} else [0.0, 0.0]  # else a change of them is unused
    if len(betas) != 2 or not all(type(one) in (int, float) and 0 <= one < 1 for one in betas):
        raise errors.UserError(f"optim.betas must be two numbers from 0 to below 1, and {betas} is not")
    values |= {**dict(zip(BETAS, betas, strict=True)), **numbers}
    how = {"steps": settings.train.steps, "warmup_steps": warmup_steps(settings)}
    rate = schedule(o.schedule, peak=values["learning_rate"], **how)
    given = {argument: values[name] for argument, name in arguments.items()}
    made = own(o.name, rule, rate, given, clip=o.clip) if ":" in o.name else rule(rate, **given)
    made = optax.masked(made, functools.partial(trained, frozen=frozen)) if frozen else made
    return rate, averaged(made, o.ema) if o.ema else made
