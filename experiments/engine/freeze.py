"""Frozen parameters, selected by the patterns of optim.frozen, of an experiment, or of an adapter."""

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax

from experiments.config import by_name, errors
from tfm import shapes


def select_trained(params: Any, frozen: Sequence[str]) -> Any:
    """Return a tree of bools: True for each parameter that is trained, False for each frozen one.

    A pattern is the path of a parameter or of a node above it, with * for anything: "embed/E_WD", "blocks", "*/b?_*".
    If several patterns match, the last one decides. A leading "!" unfreezes: ["*", "!head"] trains only the head.
    """
    paths = find_frozen(params, frozen)
    return jax.tree.unflatten(jax.tree.structure(params), [path not in paths for path in shapes.flat(params)])


def find_frozen(params: Any, frozen: Sequence[str]) -> set[str]:
    """Return the paths of the frozen parameters: the last pattern that matches each has no "!" (`select_trained`)."""
    last_pattern = {path: pattern for pattern in frozen for path in shapes.flat(params) if _matches(pattern, path)}
    return {path for path, pattern in last_pattern.items() if not pattern.startswith("!")}


def stop_gradients(params: Any, paths: set[str]) -> Any:
    """Return the parameters, with stop_gradient applied to the leaves at these paths ('blocks/score/Uq_HKD')."""
    leaves = shapes.flat(params).items()
    stopped = [jax.lax.stop_gradient(leaf) if path in paths else leaf for path, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), stopped)


def _matches(pattern: str, name: str) -> bool:
    """Return True if the pattern, without a leading "!", matches the path of a parameter or of a node above it."""
    pattern = pattern.removeprefix("!")
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}/*")


def check_frozen(frozen: Sequence[str], params: Any, before: Sequence[str] = ()) -> None:
    """Raise UserError if a pattern matches no parameter or has no effect, or if all parameters are frozen.

    before: patterns that apply before those of `frozen`.
    """
    names = shapes.flat(params)
    for i, pattern in enumerate(frozen):
        if not any(_matches(str(pattern), name) for name in names):
            hint = by_name.suggest(str(pattern), names)
            raise errors.UserError(f'optim.frozen: "{pattern}" matches no parameter{hint}. --dry_run lists all of them')
        earlier = [*before, *frozen[:i]]
        if find_frozen(params, [*earlier, pattern]) == find_frozen(params, earlier):
            raise errors.UserError(f'optim.frozen: "{pattern}" changes nothing after the patterns before it. Remove it')
    if find_frozen(params, [*before, *frozen]) == {*names}:
        raise errors.UserError(f"optim.frozen = {[*frozen]} leaves no parameter to train. Unfreeze at least one")
