"""The optimiser: AdamW on optax, with the decay, the clipping and the schedules a config can name."""

from typing import Any

import jax
import optax

from experiments.engine import config, errors
from tfm import shapes


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


def matrices(params: Any) -> Any:
    """Which leaves weight decay acts on: matrices, not biases, gains and shifts (read off the names)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: shapes.is_matrix(path), params)


def adamw(
    rate: optax.Schedule, *, beta1: float, beta2: float, eps: float, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019), decay on matrices only, after clipping by global norm (0: no clipping)."""
    step = optax.adamw(rate, b1=beta1, b2=beta2, eps=eps, weight_decay=weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(clip), step) if clip > 0 else step
