"""The optimiser: AdamW or Muon on optax, with the decay, the clipping and the schedules a config can name."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.engine import batches, config, errors
from tfm import shapes

BATCH_RULES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}  # exponent of (batch size / first batch size)
# x -> a x + b x^3 + c x^5 on all singular values, a few times, brings what is at most 1 near to 1: Jordan's numbers,
# which rise steeply at 0 and leave values between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7  # of the norm that it begins with: a gradient of zeros stays zeros


def schedule(
    name: str, *, peak: float, steps: int, warmup_steps: int, final_fraction: float, decay_fraction: float
) -> optax.Schedule:
    """Learning rate against step: linear warm-up from 0 to `peak`, then by name.

    'constant'; 'linear' and 'cosine' fall to peak * final_fraction at `steps`; 'wsd' (warm-up, stable, decay) stays at
    the peak and falls linearly over the last `decay_fraction` of all steps.
    """
    if warmup_steps >= steps:
        raise errors.UserError(f"optim.warmup_steps = {warmup_steps} must be smaller than train.steps = {steps}")
    if final_fraction < 0 or not 0 <= decay_fraction <= 1:
        raise errors.UserError("optim.final_fraction must be at least 0, and optim.decay_fraction between 0 and 1")
    if ":" in name:
        raise errors.UserError(f'unknown schedule "{name}": a schedule is named, and cannot be imported')
    rest, final = steps - warmup_steps, peak * final_fraction
    fall = min(max(1, round(steps * decay_fraction)), rest)
    after = config.choose(
        "schedule",
        name,
        {
            "constant": lambda: optax.constant_schedule(peak),
            "linear": lambda: optax.linear_schedule(peak, final, rest),
            "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=final_fraction),
            "wsd": lambda: optax.join_schedules(
                [optax.constant_schedule(peak), optax.linear_schedule(peak, final, fall)], [rest - fall]
            ),
        },
    )()
    # Step 0 of a warm-up would have learning rate 0 and do nothing: it starts at peak / warmup_steps.
    first = peak / max(warmup_steps, 1)
    return optax.join_schedules([optax.linear_schedule(first, peak, max(warmup_steps - 1, 1)), after], [warmup_steps])


def grown(rate: optax.Schedule, growth: batches.Growth, rule: str) -> optax.Schedule:
    """The schedule where batches grow (E30): times (size / first size)^a from the step on that has this size.

    'none', a = 0: a larger batch at the same rate, in place of a falling rate (Smith et al. 2018, "Don't decay the
    learning rate, increase the batch size"). 'linear', a = 1: as many steps as there would be with small batches are
    taken at once, the rule for SGD (Goyal et al. 2017). 'sqrt', a = 1/2: the rule for Adam's, which divide by the
    noise (Malladi et al. 2022; theirs changes the betas and eps too, which stay as they are here).

    A schedule counts updates, and the batch size follows the step: where steps were skipped, the factor, as all of the
    schedule, comes by as many steps later than the larger batch.
    """
    if ":" in rule:
        raise errors.UserError(f'unknown batch_rule "{rule}": a rule is named, and cannot be imported')
    exponent = config.choose("batch_rule", rule, BATCH_RULES)
    factors = [(size / growth.sizes[0]) ** exponent for size in growth.sizes]
    if set(factors) == {1.0}:
        return rate

    def scaled(step: jax.Array) -> jax.Array:
        phase = jnp.searchsorted(jnp.array(growth.firsts), step, side="right") - 1
        return rate(step) * jnp.array(factors, jnp.float32)[phase]

    return scaled


def matrices(params: Any) -> Any:
    """Which leaves weight decay acts on: matrices, not biases, gains and shifts (read off the names)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: shapes.is_matrix(path), params)


def adamw(
    rate: optax.Schedule, *, beta1: float, beta2: float, eps: float, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019), decay on matrices only, after clipping by global norm (0: no clipping)."""
    step = optax.adamw(rate, b1=beta1, b2=beta2, eps=eps, weight_decay=weight_decay, mask=matrices)
    return _clipped(step, clip)


def muon(
    rate: optax.Schedule,
    *,
    muon_lr_multiplier: float,
    momentum: float,
    ns_steps: int,
    weight_decay: float,
    clip: float,
    **adam: float,
) -> optax.GradientTransformation:
    """Muon (muon.py) for the matrices inside the blocks, at `muon_lr_multiplier` times the rate; AdamW for the rest.

    momentum: of those matrices, Nesterov's. ns_steps: Newton-Schulz. adam: beta1, beta2 and eps of the rest. Decay as
    in `adamw`, in units of each one's own rate.
    """
    of_matrices = optax.chain(
        optax.trace(momentum, nesterov=True),
        orthogonalised(ns_steps=ns_steps),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(lambda step: muon_lr_multiplier * rate(step)),
    )
    rest = adamw(rate, weight_decay=weight_decay, clip=0, **adam)
    return _clipped(optax.partition({"muon": of_matrices, "adamw": rest}, _optimisers), clip)


def _optimisers(params: Any) -> Any:
    """Which of the two each leaf has."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if hidden(path) else "adamw", params)


def _clipped(step: optax.GradientTransformation, clip: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(clip), step) if clip > 0 else step


class Sides(NamedTuple):
    """The dimensions of a parameter that are copies of a matrix, its rows (outputs) and its columns (inputs)."""

    copies: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def hidden(path: Any) -> bool:
    """Whether a leaf is a matrix inside the blocks (read off the names): what Muon is for."""
    return shapes.STACKED in shapes.names(path)[:-1] and shapes.is_matrix(path)


def sides(path: Any) -> Sides:
    """How a leaf's dimensions make matrices. The heads' features side by side are one side, so H goes with them.

    Uq_HKD maps D to all (H, K), Uo_HDK adds up what it maps from all (H, K) to D, V_HDD likewise: one matrix each in
    every layer. A map of K to K belongs to one head, so that P_HKK is a matrix in every head.
    """
    letters = shapes.letters(path)
    out, into = len(letters) - 2, len(letters) - 1
    rest = tuple(range(out))
    if "H" not in letters or letters[out] == letters[into] != "D":
        return Sides(rest, (out,), (into,))
    h = letters.index("H")
    copies = tuple(i for i in rest if i != h)
    return Sides(copies, (out,), (h, into)) if letters[out] == "D" else Sides(copies, (h, out), (into,))


def orthogonal(x_LRC: jax.Array, *, ns_steps: int) -> jax.Array:
    """Near to U V^T for every matrix U S V^T of L, by steps of Newton-Schulz: X -> a X + (b X X^T + c (X X^T)^2) X."""
    if x_LRC.shape[-2] > x_LRC.shape[-1]:  # products of the shorter side
        return orthogonal(x_LRC.mT, ns_steps=ns_steps).mT
    x_LRC = x_LRC / (jnp.linalg.norm(x_LRC, axis=(-2, -1), keepdims=True) + EPS)
    for _ in range(ns_steps):
        square_LRR = x_LRC @ x_LRC.mT
        x_LRC = A * x_LRC + (B * square_LRR + C * square_LRR @ square_LRR) @ x_LRC
    return x_LRC


def orthogonal_step(path: Any, momentum: jax.Array, *, ns_steps: int) -> jax.Array:
    """sqrt(max(1, rows / columns)) U V^T for every matrix of a leaf, in the leaf's shape.

    With the factor, a step of a wide output moves each of its numbers as far as that of a square matrix.
    """
    made = sides(path)
    order = [i for side in made for i in side]
    R, S = (math.prod(momentum.shape[i] for i in side) for side in (made.rows, made.columns))
    moved = momentum.transpose(order)
    flat = orthogonal(moved.reshape(-1, R, S), ns_steps=ns_steps) * math.sqrt(max(1, R / S))
    return flat.reshape(moved.shape).transpose([order.index(i) for i in range(len(order))])


def orthogonalised(*, ns_steps: int) -> optax.GradientTransformation:
    """Updates become their orthogonal `step`; nothing is remembered."""

    def update(updates: Any, params: Any = None) -> Any:
        with jax.named_scope("muon"):
            return jax.tree_util.tree_map_with_path(functools.partial(orthogonal_step, ns_steps=ns_steps), updates)

    return optax.stateless(update)
