"""Optimisers: AdamW, Muon and the user's, with the decay, the clipping and the schedules that a config can name."""

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

BETAS = ("beta1", "beta2")  # the two values of the setting betas
SETTINGS = ("muon_lr_multiplier", "momentum", *BETAS, "weight_decay", "clip")  # of an optimiser
ALIASES = {"b1": "beta1", "b2": "beta2"}  # optax's names of two of them
FINAL = 0.1  # fraction of the peak at the end, by default
BELOW_ONE = math.nextafter(1, 0)
EPS = 1e-7  # of the norm that Newton-Schulz begins with: a gradient of zeros stays zeros


def schedule(name: str, *, peak: float, steps: int, warmup_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step: linear warm-up from 0 to `peak`, then by name.

    "constant"; "linear" and "cosine" fall to a tenth of the peak at `steps`, and "linear:0" to 0; "wsd" (warm-up,
    stable, decay) stays at the peak and falls linearly over the last fifth of all steps. "my_file:fall" is the user's:
    (step, steps) -> the fraction of the peak; both count from the end of the warm-up, step is an integer array.
    """
    if warmup_steps >= steps:
        raise errors.UserError(f"optim.warmup_steps = {warmup_steps} must be smaller than train.steps = {steps}")
    kind, colon, last = name.partition(":")
    try:
        fraction = float(last) if colon else FINAL
    except ValueError:  # the user's
        kind, fraction = name, FINAL
    if not 0 <= fraction < math.inf or (colon and kind == "constant"):
        raise errors.UserError(f"optim.schedule = {name}: write the final fraction, at least 0, as linear:0.1")
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
    """Return peak * fraction(step, steps). UserError if this is not a number."""
    with by_name.user_errors(f"optim.schedule = {name}, (step, steps) -> the fraction of the peak"):
        jax.eval_shape(lambda n: jnp.reshape(fraction(n, steps), ()), jax.ShapeDtypeStruct((), jnp.int32))
    return lambda n: peak * fraction(jnp.maximum(n, 0), steps)  # in the warm-up n is below 0, and the value unused


def takes(rule: Callable) -> dict[str, str]:
    """Return the settings that an optimiser's factory has arguments for, {argument: setting}, after the rate."""
    names = list(inspect.signature(rule).parameters)[1:]
    return {name: ALIASES.get(name, name) for name in names if ALIASES.get(name, name) in SETTINGS}


def own(
    name: str, rule: Callable, rate: optax.Schedule, values: Mapping[str, Any], *, clip: float
) -> optax.GradientTransformation:
    """Return what the user's factory makes of the rate and of the settings that it `takes`, after the clipping by
    global norm if it does not do that itself. For an argument `mask`, of the weight decay, it gets `matrices`.

    Steps are counted in addition: not every rule of optax does. UserError if it makes no optimiser.
    """
    more = {"mask": matrices} if "mask" in inspect.signature(rule).parameters else {}
    with by_name.user_errors(called := f"optim.name = {name}"):
        made = rule(rate, **values, **more)
    if not (hasattr(made, "init") and hasattr(made, "update")):
        raise errors.UserError(
            f"{called} must make an optax.GradientTransformation, and it makes {type(made).__name__}"
        )
    made = optax.chain(made, optax.scale_by_schedule(lambda _: 1.0))
    return made if "clip" in values else _clipped(made, clip)


def check(name: str, rule: optax.GradientTransformation, params: Any) -> None:
    """Raise UserError if the user's optimiser raises, or its updates differ in shape from the (abstract) parameters."""
    with by_name.user_errors(called := f"optim.name = {name}"):
        updates, _ = jax.eval_shape(rule.update, params, jax.eval_shape(rule.init, params), params)
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise errors.UserError(f"{called}: its updates must have the names and shapes of the parameters")


def matrices(params: Any) -> Any:
    """Return which leaves weight decay acts on: matrices, not biases, gains and shifts (by their names)."""
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
    matrices, gains and biases stay with AdamW (beta1, beta2, eps). Decay as in `adamw`, times the rate of each part.
    rows: NorMuon (`even_rows`). ball: the hyperball variant (Wen et al. 2026): step and matrix have the norm R with
    which the matrix began, W <- R (W - rate R u / |u|) / |...|, and decay would change nothing.
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
    """Make each matrix of the updates sqrt(max(1, outputs / inputs)) U V^T, approximated by Newton-Schulz steps.

    The momentum comes before it, by hand: optax.contrib.muon corrects the bias of the first steps, Jordan's does not.
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
    """Make updates o_rc / sqrt(v_r), with the norm of o: v_r is the moving average, with this decay, of the mean square
    of a row, of one output (Li et al. 2025, NorMuon, whose norm is 0.2 sqrt(rows columns))."""

    def moved(path: Any, v: jax.Array, step: jax.Array) -> jax.Array:
        return decay * v + (1 - decay) * jnp.mean(jnp.square(step), shapes.sides(path)[1], keepdims=True)

    def update(steps: Any, v: Any, params: Any = None) -> tuple[Any, Any]:
        v = jax.tree_util.tree_map_with_path(moved, v, steps)
        return _as_long(jax.tree.map(lambda step, v: step / (jnp.sqrt(v) + EPS), steps, v), steps), v

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def _as_long(steps: Any, like: Any) -> Any:
    """Scale each matrix to the Frobenius norm of the other; a matrix of zeros stays."""

    def norm(path: Any, x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x), sum(shapes.sides(path), ()), keepdims=True))

    def scaled(path: Any, step: jax.Array, other: jax.Array) -> jax.Array:
        return step * (norm(path, other) / (norm(path, step) + EPS**2))

    return jax.tree_util.tree_map_with_path(scaled, steps, like)


def _on_the_ball(steps: Any, params: Any) -> Any:
    """Return the steps that keep the norm of each matrix."""
    ends = _as_long(jax.tree.map(jnp.add, params, steps), params)
    return jax.tree.map(jnp.subtract, ends, params)


class Averaged(NamedTuple):
    """The state of an optimiser, and how far its trained parameters are ahead of their average."""

    inner: Any
    ahead: Any


def averaged(optimiser: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimiser so that the parameters are the exponential moving average a <- d a + (1 - d) w of those that it
    trains, w (`trained_at`). Evaluations and checkpoints get the average. The state holds w - a: frozen leaves then
    stay bit for bit, as d a + (1 - d) a (optax.incremental_update) does not."""
    inner = optax.with_extra_args_support(optimiser)

    def init(params: Any) -> Averaged:
        return Averaged(inner.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: Averaged, params: Any, **more: Any) -> tuple[Any, Averaged]:
        updates, new = inner.update(grads, state.inner, trained_at(params, state), **more)
        ahead = jax.tree.map(jnp.add, state.ahead, updates)  # the next w - the old a
        return jax.tree.map(lambda x: (1 - decay) * x, ahead), Averaged(new, jax.tree.map(lambda x: decay * x, ahead))

    return optax.GradientTransformationExtraArgs(init, update)


def trained_at(params: Any, opt_state: Any) -> Any:
    """Return the parameters at which the next gradient is taken: these, or those that they are the average of."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Averaged))
    ahead = next((node.ahead for node in nodes if isinstance(node, Averaged)), None)
    return params if ahead is None else jax.tree.map(jnp.add, params, ahead)


def trained(params: Any, frozen: Sequence[str]) -> Any:
    """Return which leaves are trained: True if no pattern of `frozen` matches. A pattern is the path of a parameter or
    of a part that contains it, with * for anything: "embed/E_WD", "blocks", "*/b?_*". The last matching pattern counts;
    with a "!" at its beginning it means trained: ["*", "!head"]."""

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
            hint = by_name.suggest(str(pattern), names)
            raise errors.UserError(f'optim.frozen: no parameter is called "{pattern}"{hint}; --dry_run lists them')
        earlier = [*before, *frozen[:i]]
        if trained(params, [*earlier, pattern]) == trained(params, earlier):
            raise errors.UserError(f'optim.frozen: "{pattern}" changes nothing. Leave it out')
    if not any(jax.tree.leaves(trained(params, [*before, *frozen]))):
        raise errors.UserError("optim.frozen leaves nothing to train")


def _clipped(step: optax.GradientTransformation, clip: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(clip), step) if clip > 0 else step


NAMED = {"adamw": adamw, "muon": muon, "normuon": functools.partial(muon, rows=True)}
NAMED |= {"hyperball": functools.partial(muon, ball=True)}


def warmup_steps(settings: config.Settings) -> int:
    """Return optim.warmup_steps; a tenth of train.steps if these are at most its default, which nobody changed."""
    key, steps, n = "optim.warmup_steps", settings.train.steps, settings.optim.warmup_steps
    return max(steps, 0) // 10 if steps <= n == settings.defaults()[key] and not settings.is_given(key) else n


def optimiser(
    settings: config.Settings, frozen: Sequence[str] = (), **numbers: jax.Array
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """Return the learning rate of every step, and the optimiser of the parameters that are not frozen (Task.frozen).

    numbers: learning_rate and weight_decay of one of several runs, in place of those of the config.
    """
    o = settings.optim
    if o.name not in NAMED and callable(getattr(optax, o.name, None)):
        raise errors.UserError(f'unknown optimiser "{o.name}" (did you mean "optax:{o.name}"?)')
    rule = by_name.choose("optimiser", o.name, NAMED)
    arguments = takes(rule)
    names = ("learning_rate", "warmup_steps", "clip", "ema", *arguments.values())
    values = {name: getattr(o, name) for name in names if name not in BETAS}
    for name, value in values.items():
        config.at_least(0, {f"optim.{name}": value}, BELOW_ONE if name in ("momentum", "ema") else math.inf)
    betas = o.betas if {*names} & {*BETAS} else [0.0, 0.0]  # else a change of them is unused
    if len(betas) != 2 or not all(type(one) in (int, float) and 0 <= one < 1 for one in betas):
        raise errors.UserError(f"optim.betas must be two numbers from 0 to below 1, and {betas} is not")
    values |= {**dict(zip(BETAS, betas, strict=True)), **numbers}
    warmup = warmup_steps(settings)
    rate = schedule(o.schedule, peak=values["learning_rate"], steps=settings.train.steps, warmup_steps=warmup)
    given = {argument: values[name] for argument, name in arguments.items()}
    made = own(o.name, rule, rate, given, clip=o.clip) if ":" in o.name else rule(rate, **given)
    made = optax.masked(made, functools.partial(trained, frozen=frozen)) if frozen else made
    return rate, averaged(made, o.ema) if o.ema else made
