"""Switches for looking into a run that does something strange; all of them cost time, none changes a number."""

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from experiments.engine import config, errors
from tfm import shapes

TRANSFER_GUARDS = ("", "log", "disallow")


@dataclasses.dataclass(frozen=True)
class Switches:
    """The fields of config.debug."""

    check_shapes: bool
    nans: bool
    no_jit: bool
    transfer_guard: str

    @property
    def compiles_ahead(self) -> bool:
        """Whether the step is compiled before the first batch; a search for the operation needs it uncompiled."""
        return not (self.nans or self.no_jit)


def switches(settings: config.Settings) -> Switches:
    """The section config.debug. Raises UserError for a transfer guard that there is not."""
    made = Switches(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(Switches)})
    if made.transfer_guard not in TRANSFER_GUARDS:
        right = ", ".join(repr(name) for name in TRANSFER_GUARDS)
        raise errors.UserError(f'unknown debug.transfer_guard "{made.transfer_guard}"; the right ones are: {right}')
    return made


@contextlib.contextmanager
def on(made: Switches) -> Iterator[None]:
    """Within this, JAX does as the switches say. A NaN that debug.nans finds is a RunError, which says where."""
    with contextlib.ExitStack() as stack:
        if made.nans:
            stack.enter_context(jax.debug_nans(True))
        if made.no_jit:
            stack.enter_context(jax.disable_jit())
        if made.transfer_guard:
            stack.enter_context(jax.transfer_guard(made.transfer_guard))
        try:
            yield
        except FloatingPointError as error:
            raise errors.RunError(f"debug.nans: {_first_line(error)}, in {_place(error)}") from error


def checked_batches(batches: Iterator[dict]) -> Iterator[dict]:
    """The batches, which must have the shapes that the letters of their names ask for."""
    for batch in batches:
        check(batch, "a batch")
        yield batch


def checked_step(step: Callable) -> Callable:
    """The step, whose new state must have the shapes that the letters of its names ask for."""

    def with_check(state: Any, *rest: Any) -> tuple[Any, dict]:
        state, metrics = step(state, *rest)
        check(state, "the state")
        return state, metrics

    return with_check


def check(tree: Any, what: str) -> None:
    """RunError where a shape contradicts its name, or two of the tree disagree about a letter."""
    try:
        shapes.check(tree)
    except shapes.ShapeError as error:
        raise errors.RunError(f"debug.check_shapes: in {what}, {error}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _place(error: BaseException) -> str:
    """The line of this project, or of the user's file, that is nearest to where it happened."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    return f"{frames[-1].filename}, line {frames[-1].lineno} ({frames[-1].name})" if frames else "a library"
