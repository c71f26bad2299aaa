"""Numbers that go wrong: a step that is not finite, or that jumps out of the last ones, changes nothing."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.engine import config, errors
from tfm import shapes

PAST = 128  # accepted steps by which a new one is judged
ENOUGH = 32  # of them before there is a judgement at all: the spread of fewer says little
ROUNDING = 1e-6  # of the mean: what float32 sums alone may differ by, where all of the past is the same number
PATIENCE = 128  # steps skipped in a row, after which nothing more is expected of a run


class History(NamedTuple):
    """Loss and gradient norm of the last accepted steps, in a ring; T: the PAST places of it."""

    loss_T: jax.Array
    norm_T: jax.Array
    count: jax.Array  # of all steps ever accepted


class Remembered(NamedTuple):
    """An optimiser's state, with the history beside it: what is saved, resumed and left alone with it."""

    inner: Any
    history: History


def check(nan: str, spike: float) -> None:
    """UserError for a setting train.nan or train.spike that there is not."""
    if nan not in ("abort", "skip"):
        raise errors.UserError(f'unknown train.nan "{nan}"; the right ones are: abort, skip')
    config.at_least(0, {"train.spike": spike})


def remembering(optimiser: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimiser, which also remembers the loss (`value`) and gradient norm (`norm`) that `update` is told."""
    inner = optax.with_extra_args_support(optimiser)

    def init(params: Any) -> Remembered:
        return Remembered(inner.init(params), History(jnp.zeros(PAST), jnp.zeros(PAST), jnp.int32(0)))

    def update(grads: Any, state: Remembered, params: Any = None, *, value, norm, **more) -> tuple[Any, Remembered]:
        updates, new = inner.update(grads, state.inner, params, value=value, norm=norm, **more)
        return updates, Remembered(new, remember(state.history, value, norm))

    return optax.GradientTransformationExtraArgs(init, update)


def remember(history: History, loss: jax.Array, norm: jax.Array) -> History:
    """The history with one more step in the place of the oldest."""
    place = history.count % PAST
    return History(history.loss_T.at[place].set(loss), history.norm_T.at[place].set(norm), history.count + 1)


def is_spike(history: History, loss: jax.Array, norm: jax.Array, sigmas: float) -> jax.Array:
    """Whether loss or norm lies more than `sigmas` standard deviations above the mean of the history.

    What is small is never a spike, and no step is one before the history holds ENOUGH.
    """
    n = jnp.minimum(history.count, PAST)
    known_T = jnp.arange(PAST) < n

    def jumps(new: jax.Array, past_T: jax.Array) -> jax.Array:
        mean = jnp.sum(past_T, where=known_T) / n
        spread = jnp.sqrt(jnp.sum(jnp.square(past_T - mean), where=known_T) / n)
        return new - mean > sigmas * spread + ROUNDING * jnp.abs(mean)

    return (n >= ENOUGH) & (jumps(loss, history.loss_T) | jumps(norm, history.norm_T))


def finite(tree: Any) -> jax.Array:
    """Whether every number of the tree is finite, as one bool on the device."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def either(accepted: jax.Array, new: Any, old: Any) -> Any:
    """The new tree where the step is accepted, else the old one."""
    return jax.tree.map(lambda a, b: jnp.where(accepted, a, b), new, old)


def updates_made(opt_state: Any) -> jax.Array:
    """How many steps have changed the parameters: the count of the learning rate's schedule."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    return next(node.count for node in nodes if isinstance(node, optax.ScaleByScheduleState))


class Patience:
    """Raises RunError where steps are skipped again and again: their loss will not come back by itself."""

    def __init__(self) -> None:
        self._before, self._row = None, 0

    def __call__(self, step: int, skipped: int) -> None:
        """skipped: how many steps there have been in all that changed nothing."""
        self._row = self._row + 1 if self._before is not None and skipped > self._before else 0
        self._before = skipped
        if self._row >= PATIENCE:
            raise errors.RunError(
                f"step {step:,}: {PATIENCE} steps in a row have been skipped, so nothing is learnt any more: go back to"
                " an earlier checkpoint with a smaller optim.learning_rate, or a larger train.spike"
            )


def culprits(trees: dict[str, Any]) -> dict[str, int]:
    """How many numbers are not finite in each leaf that has any, by its path, in the order of the trees."""
    found = {}
    for part, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            count = int(np.sum(~np.isfinite(np.asarray(leaf, np.float32))))
            if count:
                found["/".join((part, *shapes.names(path)))] = count
    return found
