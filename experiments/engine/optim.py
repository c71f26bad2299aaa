"""Optimisers: AdamW, Muon and the user's, with weight decay, clipping, schedules and averages."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.engine import by_name, config, errors, freeze, orthogonal
from tfm import shapes

BETAS = ("beta1", "beta2")  # the two values of the setting betas
SETTINGS = ("muon_lr_multiplier", "momentum", *BETAS, "weight_decay", "clip")  # of an optimiser
ALIASES = {"b1": "beta1", "b2": "beta2"}  # optax's names of the betas
FINAL = 0.1  # fraction of the peak at the end, by default
BELOW_ONE = math.nextafter(1, 0)


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
    except ValueError:  # my_file:fall
        kind, fraction = name, FINAL
    if not 0 <= fraction < math.inf or (colon and kind == "constant"):
        raise errors.UserError(
            f"optim.schedule = {name}: write a final fraction of at least 0, as linear:0.1, and none after constant"
        )
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
    later = _bind_schedule(name, chosen, peak, rest) if ":" in kind else chosen()
    # Step 0 of a warm-up would have learning rate 0 and do nothing: it starts at peak / warmup_steps.
    first = peak / max(warmup_steps, 1)
    return optax.join_schedules([optax.linear_schedule(first, peak, max(warmup_steps - 1, 1)), later], [warmup_steps])


def _bind_schedule(name: str, fraction: Callable, peak: Any, steps: int) -> optax.Schedule:
    """Return peak * fraction(step, steps). Raises UserError if this is not a number."""
    with by_name.user_errors(f"optim.schedule = {name}, (step, steps) -> the fraction of the peak"):
        jax.eval_shape(lambda n: jnp.reshape(fraction(n, steps), ()), jax.ShapeDtypeStruct((), jnp.int32))
    return lambda n: peak * fraction(jnp.maximum(n, 0), steps)  # during the warm-up n < 0, and the value is not used


def find_settings(rule: Callable) -> dict[str, str]:
    """Return {argument: setting} of an optimiser's factory, for the settings that it has arguments for."""
    names = list(inspect.signature(rule).parameters)[1:]
    return {name: ALIASES.get(name, name) for name in names if ALIASES.get(name, name) in SETTINGS}


def call_factory(
    name: str, rule: Callable, rate: optax.Schedule, values: Mapping[str, Any], *, clip: float
) -> optax.GradientTransformation:
    """Return the optimiser of the user's factory(rate, **values), after clipping by global norm if it does not clip
    itself.

    An argument `mask`, of the weight decay, receives `matrices`. Steps are counted in addition, because not every rule
    of optax counts them. Raises UserError if the factory does not return an optimiser.
    """
    if "mask" in inspect.signature(rule).parameters:
        values = {**values, "mask": matrices}
    with by_name.user_errors(label := f"optim.name = {name}"):
        optimiser = rule(rate, **values)
    if not (hasattr(optimiser, "init") and hasattr(optimiser, "update")):
        raise errors.UserError(f"{label} must return an optax.GradientTransformation, not a {type(optimiser).__name__}")
    optimiser = optax.chain(optimiser, optax.scale_by_schedule(lambda _: 1.0))
    return optimiser if "clip" in values else _clip(optimiser, clip)


def check_updates(name: str, rule: optax.GradientTransformation, params: Any) -> None:
    """Raise UserError if the user's optimiser fails, or its updates differ in shape from the (abstract) parameters."""
    with by_name.user_errors(label := f"optim.name = {name}"):
        updates, _ = jax.eval_shape(rule.update, params, jax.eval_shape(rule.init, params), params)
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise errors.UserError(f"{label}: its updates must have the names and shapes of the parameters")


def matrices(params: Any) -> Any:
    """Return which leaves weight decay acts on: matrices, not biases, gains and shifts (by their names)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: shapes.is_matrix(path), params)


def adamw(
    rate: optax.Schedule, *, beta1: float, beta2: float, eps: float = 1e-8, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019), decay on matrices only, after clipping by global norm (0: no clipping)."""
    step = optax.adamw(rate, b1=beta1, b2=beta2, eps=eps, weight_decay=weight_decay, mask=matrices)
    return _clip(step, clip)


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
    """Muon (Jordan et al. 2024) for the matrices inside the blocks, with `muon_lr_multiplier` times the learning rate.

    A step is U V^T, where U S V^T is Nesterov's momentum: all directions move equally far. Embeddings, output matrices,
    gains and biases use AdamW (beta1, beta2, eps). Weight decay as in `adamw`. rows: NorMuon. ball:
    the hyperball variant (Wen et al. 2026), in which step and matrix have the norm R of the initial matrix, W <- R (W -
    rate R u / |u|) / |...|, so weight decay has no effect.
    """
    matrix_rule = optax.chain(
        optax.trace(momentum, nesterov=True),
        orthogonal.orthogonalise(ns_steps=ns_steps),
        *([orthogonal.normalise_rows(beta2)] if rows else []),
        optax.stateless(orthogonal.match_norms) if ball else optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(lambda step: muon_lr_multiplier * rate(step)),
        *([optax.stateless(orthogonal.keep_norms)] if ball else []),
    )
    other_rule = adamw(rate, weight_decay=weight_decay, clip=0, beta1=beta1, beta2=beta2, eps=eps)

    def label(path: Any, _: Any) -> str:
        return "muon" if shapes.STACKED in shapes.names(path)[:-1] and shapes.is_matrix(path) else "adamw"

    labels = functools.partial(jax.tree_util.tree_map_with_path, label)
    return _clip(optax.partition({"muon": matrix_rule, "adamw": other_rule}, labels), clip)


class Averaged(NamedTuple):
    """The state of an optimiser, and the trained parameters minus their average."""

    inner: Any
    ahead: Any


def average(optimiser: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimiser so that the parameters are an exponential moving average, a <- d a + (1 - d) w.

    w are the parameters that the optimiser trains (`training_params`). Evaluations and checkpoints use the average a.
    The state holds w - a, so that frozen leaves stay bit for bit: d a + (1 - d) a (optax.incremental_update) rounds.
    """
    inner = optax.with_extra_args_support(optimiser)

    def init(params: Any) -> Averaged:
        return Averaged(inner.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: Averaged, params: Any, **extra: Any) -> tuple[Any, Averaged]:
        updates, new = inner.update(grads, state.inner, training_params(params, state), **extra)
        ahead = jax.tree.map(jnp.add, state.ahead, updates)  # the next w - the old a
        return jax.tree.map(lambda x: (1 - decay) * x, ahead), Averaged(new, jax.tree.map(lambda x: decay * x, ahead))

    return optax.GradientTransformationExtraArgs(init, update)


def training_params(params: Any, opt_state: Any) -> Any:
    """Return the parameters at which the next gradient is taken: w, if the parameters are its average."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Averaged))
    ahead = next((node.ahead for node in nodes if isinstance(node, Averaged)), None)
    return params if ahead is None else jax.tree.map(jnp.add, params, ahead)


def _clip(step: optax.GradientTransformation, clip: float) -> optax.GradientTransformation:
    """Return the optimiser after clipping by global norm (0: no clipping)."""
    return optax.chain(optax.clip_by_global_norm(clip), step) if clip > 0 else step


OPTIMISERS = {"adamw": adamw, "muon": muon, "normuon": functools.partial(muon, rows=True)}
OPTIMISERS |= {"hyperball": functools.partial(muon, ball=True)}


def warmup_steps(settings: config.Settings) -> int:
    """Return optim.warmup_steps; if it is the default and not smaller than train.steps, a tenth of these."""
    key, steps, warmup = "optim.warmup_steps", settings.train.steps, settings.optim.warmup_steps
    is_default = warmup == settings.defaults()[key] and not settings.is_explicit(key)
    return max(steps, 0) // 10 if is_default and steps <= warmup else warmup


def make_optimiser(
    settings: config.Settings, frozen: Sequence[str] = (), **numbers: jax.Array
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """Return the learning rate of every step, and the optimiser of the parameters that are not frozen (Task.frozen).

    numbers: learning_rate and weight_decay of a single run of a study, in place of the config's.
    """
    o = settings.optim
    if o.name not in OPTIMISERS and callable(getattr(optax, o.name, None)):
        raise errors.UserError(f'unknown optimiser "{o.name}" (did you mean "optax:{o.name}"?)')
    rule = by_name.choose("optimiser", o.name, OPTIMISERS)
    arguments = find_settings(rule)
    names = ("learning_rate", "warmup_steps", "clip", "ema", *arguments.values())
    values = {name: getattr(o, name) for name in names if name not in BETAS}
    for name, value in values.items():
        config.at_least(0, {f"optim.{name}": value}, BELOW_ONE if name in ("momentum", "ema") else math.inf)
    betas = o.betas if {*names} & {*BETAS} else [0.0, 0.0]  # not read, so that a change counts as unused
    if len(betas) != 2 or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas):
        raise errors.UserError(f"optim.betas = {betas} must be two numbers from 0 to below 1")
    values |= {**dict(zip(BETAS, betas, strict=True)), **numbers}
    warmup = warmup_steps(settings)
    rate = schedule(o.schedule, peak=values["learning_rate"], steps=settings.train.steps, warmup_steps=warmup)
    options = {argument: values[name] for argument, name in arguments.items()}
    chosen = call_factory(o.name, rule, rate, options, clip=o.clip) if ":" in o.name else rule(rate, **options)
    chosen = optax.masked(chosen, functools.partial(freeze.select_trained, frozen=frozen)) if frozen else chosen
    return rate, average(chosen, o.ema) if o.ema else chosen
