"""Text generation in rounds of a few tokens, so that sample.py can print text while it is drawn."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.devices import mesh as meshes
from experiments.dry_run import topology as topologies
from tfm import models
from tfm.attention import mask as masks
from tfm.decode import generate, kv_cache

ROUND = 8  # new tokens of each text in a round, after which they are transferred to the host
# Positions in all caches. Smaller caches have their full size from the start, because reading empty positions costs
# less than another compilation; larger ones start with a quarter of it and grow.
GROWS = 2**14


class Generator:
    """The compiled functions that draw tokens after prompts, on a mesh of one device.

    mask(length_B) is the mask of the prompts, mask() that of new tokens. stop: the ids that end a text. context: tokens
    that the model reads at once, None for no limit; in longer texts the window moves (generate.window). options:
    arguments of generate.begin and generate.extend, such as temperature.
    """

    def __init__(
        self,
        model: models.Model,
        params: Any,
        *,
        mask: Callable[..., masks.Mask],
        mesh: Mesh,
        stop: Sequence[int],
        context: int | None = None,
        **options: float,
    ):
        self.model, self.params, self.mask, self.mesh = model, params, mask, mesh
        self.stop, self.context = frozenset(stop), context
        self.options = options | {"stop": sorted(self.stop)}
        self.begin = jax.jit(self._begin, static_argnames="steps")
        self.extend = jax.jit(self._extend, donate_argnums=1, static_argnames="is_window")
        self.by_layer = jax.jit(model.by_layer)
        self.grow = jax.jit(kv_cache.grow, static_argnums=1)

    def _begin(self, params: Any, prompt_BN: jax.Array, length_B: jax.Array, key: jax.Array, steps: int) -> Any:
        """Return the state after reading the prompts and drawing one token."""
        B, N = prompt_BN.shape
        first = self.capacities(B, N, steps)[0]
        start = self._window(params, N + steps)[0] if self.exceeds(N) else self._start(params, length_B, first)
        return generate.begin(start, prompt_BN, length_B, key, steps=steps, **self.options)

    def _extend(self, params: Any, state: generate.State, is_window: bool = False) -> generate.State:
        """Return the state ROUND tokens later. params: by_layer(params); for a moving window, params themselves."""
        window = self._window(params, state.w_BN.shape[1])[1] if is_window else None
        step = window or functools.partial(self.model.step, params, mask=self.mask())
        return generate.extend(step, state, steps=ROUND, **self.options)

    def _start(self, params: Any, length_B: jax.Array | None, capacity: int) -> generate.Start:
        return functools.partial(self.model.start, params, capacity=capacity, mask=self.mask(length_B))

    def _window(self, params: Any, capacity: int) -> tuple[generate.Start, generate.Step]:
        return generate.window(self._start(params, None, self.context), context=self.context, capacity=capacity)

    def exceeds(self, length: int) -> bool:
        """Return whether a text of `length` tokens is longer than the context; False if the context has no limit."""
        return self.context is not None and length > self.context

    def capacities(self, B: int, N: int, steps: int) -> tuple[int, int, int]:
        """Return the cache's (first capacity, increment, last capacity) in tokens, for B prompts of N tokens."""
        last = N + steps if self.context is None else min(N + steps, self.context)
        quarter = max(ROUND, -(-last // 4))
        return last if B * last < GROWS else max(N + ROUND, quarter), quarter, last


def pad(ids: list[list[int]], context: int | None) -> np.ndarray:
    """Return the prompts as rows of one length, filled with zeros at the end, so that few lengths are compiled.

    The length is the next power of two from the longest prompt on, at most `context` if the longest prompt fits in it.
    """
    longest = max(map(len, ids))
    N = generate.bucket(longest, context if context and longest <= context else None)
    return np.array([row + [0] * (N - len(row)) for row in ids], np.int32)


def rounds(generator: Generator, ids: list[list[int]], key: jax.Array, *, steps: int) -> Iterator[list[list[int]]]:
    """Yield, for each round, a list of the new token ids of each text, without ids in generator.stop.

    The first round draws one token of each text, others up to ROUND; a text gets at most `steps` in all. ids: the token
    ids of the prompts. key: one key, or key_B.
    """
    params = jax.device_put(generator.params)
    layers, prompt_BN = generator.by_layer(params), pad(ids, generator.context)
    start_B = np.array([len(row) for row in ids])  # the first tokens that are not yielded yet
    is_window, longest = generator.exceeds(prompt_BN.shape[1]), start_B.max() + steps
    _, quarter, last = generator.capacities(*prompt_BN.shape, steps)
    state = generator.begin(params, prompt_BN, start_B, key, steps)
    while True:
        w_BN, length_B, done_B = jax.device_get((state.w_BN, state.length_B, state.done_B))
        new = [row[a:b].tolist() for row, a, b in zip(w_BN, start_B, length_B, strict=True)]
        yield [[token for token in row if token not in generator.stop] for row in new]
        if done_B.all():
            return
        start_B = length_B.copy()  # a copy, because the next call may reuse the memory of its donated state
        next_length = min(int(start_B.max()) + ROUND, longest)
        if generator.exceeds(next_length) and not is_window:
            is_window, state = True, state._replace(cache=jnp.copy(state.w_BN))
        elif not is_window and (capacity := kv_cache.count_positions(state.cache)) < min(next_length, last):
            state = state._replace(cache=generator.grow(state.cache, min(capacity + quarter, last)))
        state = generator.extend(params if is_window else layers, state, is_window=is_window)


def requests(generator: Generator, ids: list[list[int]], *, steps: int) -> Iterator[topologies.Request]:
    """Yield the programs to compile for a topology: to read the prompts and draw a token, and to draw the next ROUND.

    ids: the token ids of the prompts. steps: the most tokens to draw for each prompt.
    """
    sharding = meshes.replicated(generator.mesh)

    def abstract(function: Callable, *arguments: Any) -> Any:
        shapes = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)

    prompt_BN = pad(ids, generator.context)[:, : generator.context]
    B, N = prompt_BN.shape
    length_B = np.zeros(B, np.int32)
    arguments = abstract(lambda *arrays: (*arrays, jax.random.key(0)), generator.params, prompt_BN, length_B)
    begin = jax.jit(functools.partial(generator.begin, steps=steps))
    yield topologies.Request(f"reading {B} x {N} tokens and drawing the first", begin, arguments)
    layers, state = abstract(generator.by_layer, generator.params), abstract(begin, *arguments)
    yield topologies.Request(f"drawing the next {ROUND}, {B} at a time", generator.extend, (layers, state))
