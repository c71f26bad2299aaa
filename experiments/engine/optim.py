"""Optimisers: AdamW, Muon and the user's, with weight decay, clipping, schedules and averaged parameters."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from experiments.config import by_name, errors, settings as configs
from experiments.engine import freeze
from tfm import mup, shapes

BETAS = ("beta1", "beta2")  # the two values of the setting betas
SETTINGS = ("muon_lr_multiplier", "momentum", *BETAS, "weight_decay", "clip")  # settings that an optimiser may use
ALIASES = {"b1": "beta1", "b2": "beta2"}  # optax's names of the betas
FINAL = 0.1  # default of the final learning rate as a fraction of the peak
NEWTON_SCHULZ_EPS = 1e-7  # added to the norm, so that a zero gradient stays zero


def schedule(name: str, *, peak: float, steps: int, warmup_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step: a linear warm-up to `peak`, then the named schedule.

    "constant" stays at the peak. "linear" and "cosine" fall to a tenth of the peak at `steps`, "linear:0" to 0. "wsd"
    (warm-up, stable, decay) stays at the peak, and falls linearly to a tenth over the last fifth of all steps.
    "my_file:fall" is the user's: (step, steps) -> the fraction of the peak. step (an int array) and steps do not count
    the warm-up. Raises UserError if the name is invalid, or if the warm-up is not shorter than `steps`.
    """
    if warmup_steps >= steps:
        raise errors.UserError(f"optim.warmup_steps = {warmup_steps} must be smaller than train.steps = {steps}")
    kind, colon, suffix = name.partition(":")
    try:
        fraction = float(suffix) if colon else FINAL
    except ValueError:  # my_file:fall
        kind, fraction = name, FINAL
    if not 0 <= fraction < math.inf or (colon and kind == "constant"):
        raise errors.UserError(
            f"optim.schedule = {name}: the final fraction must be at least 0, as in linear:0.1, and constant has none"
        )
    rest, final = steps - warmup_steps, peak * fraction
    decay_steps = min(max(1, round(steps / 5)), rest)
    make_schedule = by_name.choose(
        "schedule",
        kind,
        {
            "constant": lambda: optax.constant_schedule(peak),
            "linear": lambda: optax.linear_schedule(peak, final, rest),
            "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=fraction),
            "wsd": lambda: optax.join_schedules(
                [optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay_steps)], [rest - decay_steps]
            ),
        },
    )
    later = _bind_schedule(name, make_schedule, peak, rest) if ":" in kind else make_schedule()
    # The warm-up starts at peak / warmup_steps, because a step with learning rate 0 would do nothing.
    first = peak / max(warmup_steps, 1)
    return optax.join_schedules([optax.linear_schedule(first, peak, max(warmup_steps - 1, 1)), later], [warmup_steps])


def _bind_schedule(name: str, fraction: Callable, peak: Any, steps: int) -> optax.Schedule:
    """Return the schedule peak * fraction(step, steps). Raises UserError if the user's fraction is no number."""
    with by_name.user_errors(f"optim.schedule = {name}, (step, steps) -> the fraction of the peak"):
        jax.eval_shape(lambda n: jnp.reshape(fraction(n, steps), ()), jax.ShapeDtypeStruct((), jnp.int32))
    return lambda n: peak * fraction(jnp.maximum(n, 0), steps)  # in the warm-up n < 0, and the result is unused


def find_settings(rule: Callable) -> dict[str, str]:
    """Return {argument: setting}, such as {"b1": "beta1"}, for the arguments of `rule` that are in SETTINGS.

    rule: an optimiser's factory, (rate, arguments) -> optimiser.
    """
    names = list(inspect.signature(rule).parameters)[1:]
    return {name: ALIASES.get(name, name) for name in names if ALIASES.get(name, name) in SETTINGS}


def call_factory(
    name: str, rule: Callable, rate: optax.Schedule, values: Mapping[str, Any], *, clip: float
) -> optax.GradientTransformation:
    """Return the optimiser that the user's factory, rule(rate, **values), makes, with a counter of its steps added.

    If the factory has no argument `clip`, gradients are first clipped by global norm. The function `matrices` is passed
    as its argument `mask`, if it has one. Raises UserError if the factory does not return an optimiser.
    """
    if "mask" in inspect.signature(rule).parameters:
        values = {**values, "mask": matrices}
    with by_name.user_errors(label := f"optim.name = {name}"):
        optimiser = rule(rate, **values)
    if not (hasattr(optimiser, "init") and hasattr(optimiser, "update")):
        raise errors.UserError(f"{label} must return an optax.GradientTransformation, not a {type(optimiser).__name__}")
    optimiser = optax.chain(evaluate_average(optimiser), optax.scale_by_schedule(lambda _: 1.0))
    return optimiser if "clip" in values else _clip(optimiser, clip)


def check_updates(name: str, rule: optax.GradientTransformation, params: Any) -> None:
    """Raise UserError if the user's optimiser fails, or its updates lack the names or shapes of `params` (abstract)."""
    with by_name.user_errors(label := f"optim.name = {name}"):
        updates, _ = jax.eval_shape(rule.update, params, jax.eval_shape(rule.init, params), params)
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise errors.UserError(f"{label}: the updates must have the names and shapes of the parameters")


def matrices(params: Any) -> Any:
    """Return the mask for weight decay: True for matrices; False for biases, gains and shifts (by their names)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: shapes.is_matrix(path), params)


def adamw(
    rate: optax.Schedule,
    *,
    beta1: float,
    beta2: float,
    eps: float = 1e-8,
    weight_decay: float,
    clip: float,
    growth: mup.Growth = mup.BASE,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) with decay of matrices only.

    clip: the largest global norm of the gradients; 0: no clipping. growth: the size of the model relative to the base
    of maximal update parametrisation (tfm/mup.py). It scales learning rates, not weight decay.
    """
    step = optax.chain(
        optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps),
        *scale_rates(growth),
        optax.add_decayed_weights(weight_decay, mask=matrices),
        optax.scale_by_learning_rate(rate),
    )
    return _clip(step, clip)


def muon(
    rate: optax.Schedule,
    *,
    muon_lr_multiplier: float,
    momentum: float,
    weight_decay: float,
    clip: float,
    beta1: float,
    beta2: float,
    eps: float = 1e-8,
    growth: mup.Growth = mup.BASE,
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices inside the blocks, with `muon_lr_multiplier` times the learning rate.

    The step of a matrix is proportional to U V^T (`orthogonalise`), where U S V^T is its Nesterov momentum, so all
    directions move equally far. Embeddings, output matrices, gains and biases use AdamW (beta1, beta2, eps). Weight
    decay, `clip` and `growth` act as in `adamw`, but `growth` does not scale Muon's steps by the width.
    """
    matrix_rule = optax.chain(
        optax.trace(momentum, nesterov=True),
        orthogonalise(),
        *scale_rates(growth._replace(width=1.0)),  # a step of Muon has the right size at every width
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(lambda step: muon_lr_multiplier * rate(step)),
    )
    adam_options = dict(beta1=beta1, beta2=beta2, eps=eps, growth=growth)
    other_rule = adamw(rate, weight_decay=weight_decay, clip=0, **adam_options)

    def label(path: Any, _: Any) -> str:
        return "muon" if shapes.STACKED in shapes.names(path)[:-1] and shapes.is_matrix(path) else "adamw"

    labels = functools.partial(jax.tree_util.tree_map_with_path, label)
    return _clip(optax.partition({"muon": matrix_rule, "adamw": other_rule}, labels), clip)


def orthogonalise(ns_steps: int = 5) -> optax.GradientTransformation:
    """Return the transformation of matrices U S V^T -> sqrt(max(1, outputs / inputs)) U V^T.

    ns_steps: number of Newton-Schulz iterations. The caller applies the momentum first, because the momentum of
    optax.contrib.muon corrects the bias of the first steps, and that of Jordan's Muon does not.
    """

    # optax writes x W where we write W x, so its `reduction_axis` is the axes of our outputs.
    dimensions = optax.contrib.MuonDimensionNumbers

    def scale(path: Any, step: jax.Array) -> jax.Array:
        outputs, inputs = (math.prod(step.shape[i] for i in axes) for axes in shapes.sides(path))
        return math.sqrt(max(1, outputs / inputs)) * step

    def update(updates: Any, params: Any = None) -> Any:
        matrix_axes = jax.tree_util.tree_map_with_path(lambda path, _: dimensions(*shapes.sides(path)), updates)
        newton_schulz = optax.contrib.scale_by_muon(
            ns_steps=ns_steps, beta=0.0, eps=NEWTON_SCHULZ_EPS, nesterov=False, weight_dimension_numbers=matrix_axes
        )
        with jax.named_scope("muon"):
            steps, _ = newton_schulz.update(updates, newton_schulz.init(updates))
            return jax.tree_util.tree_map_with_path(scale, steps)

    return optax.stateless(update)


class AverageState(NamedTuple):
    """The state of an optimiser that `average` wraps."""

    inner: Any  # state of the wrapped optimiser
    ahead: Any  # trained parameters minus their average


def average(optimiser: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimiser so that the parameters are an exponential moving average, a <- d a + (1 - d) w.

    w are the parameters that the optimiser trains (`training_params`). Evaluations and checkpoints use the average a.
    The state holds w - a, which is 0 for a frozen leaf, so that its average equals it exactly. With
    optax.incremental_update, d a + (1 - d) a would be rounded.
    """
    inner = optax.with_extra_args_support(optimiser)

    def init(params: Any) -> AverageState:
        return AverageState(inner.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: AverageState, params: Any, **extra: Any) -> tuple[Any, AverageState]:
        updates, new = inner.update(grads, state.inner, _add(params, state.ahead), **extra)
        ahead = jax.tree.map(jnp.add, state.ahead, updates)  # the next w - the old a
        steps = jax.tree.map(lambda x: (1 - decay) * x, ahead)
        return steps, AverageState(new, jax.tree.map(lambda x: decay * x, ahead))

    return optax.GradientTransformationExtraArgs(init, update)


def evaluate_average(optimiser: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimiser that averages the parameters itself, so that evaluations and checkpoints use this average.

    These are optax.contrib's schedule-free rules, and rules of the user's with a method `evaluation_params(params)` in
    a part of their state, which returns the average from the trained parameters. Other optimisers are not changed.
    """
    inner = optax.with_extra_args_support(optimiser)

    def init(params: Any) -> Any:
        state = inner.init(params)
        return state if _find_average(state) is None else AverageState(state, jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        if not isinstance(state, AverageState):
            return inner.update(grads, state, params, **extra)
        trained = _add(params, state.ahead)
        updates, new = inner.update(grads, state.inner, trained, **extra)
        trained = optax.apply_updates(trained, updates)
        mean = _find_average(new)(trained)
        steps, ahead = (jax.tree.map(jnp.subtract, a, b) for a, b in ((mean, params), (trained, mean)))
        return steps, AverageState(new, ahead)

    return optax.GradientTransformationExtraArgs(init, update)


def _find_average(state: Any) -> Callable[[Any], Any] | None:
    """Return the function (trained parameters) -> their average, of an optimiser's state; None if it has no average."""

    def find(node: Any) -> Callable | None:
        if isinstance(node, optax.contrib.ScheduleFreeState):
            return functools.partial(optax.contrib.schedule_free_eval_params, node)
        return getattr(node, "evaluation_params", None)

    nodes = jax.tree.leaves(state, is_leaf=lambda node: find(node) is not None)
    return next(filter(None, map(find, nodes)), None)


def training_params(params: Any, opt_state: Any) -> Any:
    """Return the parameters at which the next gradient is computed: `params`, or w if `params` is the average of w."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, AverageState))
    average = next((node for node in nodes if isinstance(node, AverageState)), None)
    return params if average is None else training_params(_add(params, average.ahead), average.inner)


def _add(params: Any, ahead: Any) -> Any:
    """Return the tree params + ahead. A parameter that is masked in `ahead`, because it is frozen, is not changed."""

    def add(step: Any, leaf: Any) -> Any:
        return leaf if isinstance(step, optax.MaskedNode) else leaf + step

    return jax.tree.map(add, ahead, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


def _clip(step: optax.GradientTransformation, clip: float) -> optax.GradientTransformation:
    """Return the optimiser, preceded by clipping by global norm (0: no clipping)."""
    return optax.chain(optax.clip_by_global_norm(clip), step) if clip > 0 else step


OPTIMISERS = {"adamw": adamw, "muon": muon}


def scale_rates(growth: mup.Growth) -> list[optax.GradientTransformation]:
    """Return [transformation], which scales updates for maximal update parametrisation; [] for a model of base size."""
    return [] if growth == mup.BASE else [optax.stateless(lambda updates, _: mup.scale_rates(updates, growth))]


def measure_growth(m: configs.Settings) -> mup.Growth:
    """Return the size of the model relative to the base of model.mup and model.mup_depth.

    Raises UserError if model.mup_depth is invalid, or is set while model.mup is 0 or model.block is not pre_norm.
    """
    if not m.mup_depth:
        return mup.Growth(width=m.D / m.mup) if m.mup else mup.BASE
    method, _, base = m.mup_depth.partition(":")
    errors.refuse(
        (
            method not in mup.DEPTH or not base.isdecimal() or not int(base),
            f"model.mup_depth = {m.mup_depth} must name a method and the base number of layers, such as "
            f"{' or '.join(f'{name}:2' for name in mup.DEPTH)}",
        ),
        (not m.mup, f"model.mup_depth = {m.mup_depth} needs model.mup. Set it to the base width, such as {m.D}"),
        (m.block != "pre_norm", f"model.mup_depth = {m.mup_depth} needs model.block = pre_norm, not {m.block}"),
    )
    return mup.Growth(m.D / m.mup, m.M / int(base), mup.DEPTH[method])


def make_optimiser(
    settings: configs.Settings, frozen: Sequence[str] = (), **numbers: jax.Array
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """Return the schedule of the learning rate, and the optimiser. Raises UserError if a setting is invalid.

    frozen: patterns of parameters that the optimiser does not change (Task.frozen). numbers: learning_rate and
    weight_decay of one run of a study, which replace the config's.
    """
    o = settings.optim
    known = o.name in OPTIMISERS or by_name.translate(o.name)
    if not known and callable(getattr(optax, o.name.lower(), None)):
        raise errors.UserError(f'unknown optimiser "{o.name}" (did you mean "optax:{o.name.lower()}"?)')
    rule = by_name.choose("optimiser", o.name, OPTIMISERS)
    arguments = find_settings(rule)
    names = ("learning_rate", "warmup_steps", "clip", "ema", *arguments.values())
    values = {name: getattr(o, name) for name in names if name not in BETAS}
    betas = o.betas if {*names} & {*BETAS} else [0.0, 0.0]  # unread otherwise, so that a change counts as unused
    if len(betas) != 2 or not all(type(beta) in (int, float) for beta in betas):
        raise errors.UserError(f"optim.betas = {betas} must be two numbers from 0 to below 1")
    values |= {**dict(zip(BETAS, betas, strict=True)), **numbers}
    warmup = configs.warmup_steps(settings)
    rate = schedule(o.schedule, peak=values["learning_rate"], steps=settings.train.steps, warmup_steps=warmup)
    options = {argument: values[name] for argument, name in arguments.items()}
    if settings.model.mup and o.name not in OPTIMISERS:
        raise errors.UserError(f"model.mup = {settings.model.mup} needs optim.name = {' or '.join(OPTIMISERS)}")
    if settings.model.mup:
        options["growth"] = measure_growth(settings.model)
    optimiser = call_factory(o.name, rule, rate, options, clip=o.clip) if ":" in o.name else rule(rate, **options)
    if frozen:
        optimiser = optax.masked(optimiser, functools.partial(freeze.select_trained, frozen=frozen))
    return rate, average(optimiser, o.ema) if o.ema else optimiser
