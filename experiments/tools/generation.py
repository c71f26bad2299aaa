"""Generation in rounds of a few tokens, so that text can be printed while it is drawn: what sample.py compiles."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.build import model as models
from experiments.dry_run import topology as topologies
from experiments.engine import mesh as meshes
from tfm.attention import mask as masks
from tfm.decode import generate, kv_cache

ROUND = 8  # tokens between two looks at the text
GROWS = 2**14  # places of all caches: below, reading empty places costs less than compiling for another capacity


class Generator:
    """The compiled functions that draw tokens after prompts.

    mask(length_B) is the mask while prompts are read, mask() that of later tokens. mesh: one device. stop: the ids that
    end a text. chance: arguments of generate.begin and generate.extend, such as temperature. In a text longer than
    `context` (None: no limit) each token depends on the last `context` tokens alone (generate.window). Caches of at
    least `grows` places in total start with a quarter of them and grow when they are full.
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
        grows: int = GROWS,
        **chance: float,
    ):
        self.params, self.mesh, self.stop = params, mesh, frozenset(stop)
        self.context, self.grows = context, grows
        how = chance | {"stop": sorted(self.stop)}

        def read(params: Any, length_B: jax.Array | None, capacity: int) -> generate.Start:
            return functools.partial(model.start, params, capacity=capacity, mask=mask(length_B))

        def window(params: Any, capacity: int) -> tuple[generate.Start, generate.Step]:
            return generate.window(read(params, None, context), context=context, capacity=capacity)

        def begin(params: Any, prompt_BN: jax.Array, length_B: jax.Array, key: jax.Array, steps: int) -> generate.State:
            B, N = prompt_BN.shape
            start = read(params, length_B, self.capacities(B, N, steps)[0])
            if self.exceeds(N):
                start, _ = window(params, N + steps)
            return generate.begin(start, prompt_BN, length_B, key, steps=steps, **how)

        def more(layers: Any, state: generate.State) -> generate.State:
            return generate.extend(functools.partial(step, layers), state, steps=ROUND, **how)

        def move(params: Any, state: generate.State) -> generate.State:
            return generate.extend(window(params, state.w_BN.shape[1])[1], state, steps=ROUND, **how)

        step = functools.partial(model.step, mask=mask())
        self.begin = jax.jit(
            begin, static_argnames="steps"
        )  # (params, prompts, lengths, key, steps) -> state with one token
        self.more = jax.jit(more, donate_argnums=1)  # (by_layer(params), state) -> state ROUND tokens later
        self.move = jax.jit(move, donate_argnums=1)  # (params, state) -> the same, for texts beyond the context
        self.by_layer = jax.jit(model.by_layer)
        self.grow = jax.jit(kv_cache.grow, static_argnums=1)

    def exceeds(self, length: int) -> bool:
        """Return whether a text of this length is longer than the context."""
        return self.context is not None and length > self.context

    def capacities(self, B: int, N: int, steps: int) -> tuple[int, int, int]:
        """Return the places of a cache for B prompts of N tokens: the first, how many are added, and the last."""
        last = N + steps if self.context is None else min(N + steps, self.context)
        quarter = max(ROUND, -(-last // 4))
        return last if B * last < self.grows else max(N + ROUND, quarter), quarter, last


def padded(ids: list[list[int]], context: int | None) -> np.ndarray:
    """Return the prompts, padded with zeros to one of few lengths: a power of two, or the context."""
    longest = max(map(len, ids))
    N = generate.bucket(longest, context if context and longest <= context else None)
    return np.array([row + [0] * (N - len(row)) for row in ids], np.int32)


def rounds(of: Generator, ids: list[list[int]], key: jax.Array, *, steps: int) -> Iterator[list[list[int]]]:
    """Yield the new tokens of each text, round by round, until all texts are done. key: or key_B. steps: at most."""
    params = jax.device_put(of.params)
    layers, prompt_BN = of.by_layer(params), padded(ids, of.context)
    known_B = np.array([len(row) for row in ids])
    beyond, longest = of.exceeds(prompt_BN.shape[1]), known_B.max() + steps
    _, quarter, last = of.capacities(*prompt_BN.shape, steps)
    state = of.begin(params, prompt_BN, known_B, key, steps)
    while True:
        w_BN, length_B, done_B = jax.device_get((state.w_BN, state.length_B, state.done_B))
        new = [row[a:b].tolist() for row, a, b in zip(w_BN, known_B, length_B, strict=True)]
        yield [[token for token in row if token not in of.stop] for row in new]
        if done_B.all():
            return
        known_B = length_B.copy()  # the next call may reuse the memory of its donated state
        soon = min(int(known_B.max()) + ROUND, longest)
        if of.exceeds(soon) and not beyond:
            beyond, state = True, state._replace(cache=jnp.copy(state.w_BN))
        if beyond:
            state = of.move(params, state)
            continue
        if (places := kv_cache.count_positions(state.cache)) < min(soon, last):
            state = state._replace(cache=of.grow(state.cache, min(places + quarter, last)))
        state = of.more(layers, state)


def requests(of: Generator, ids: list[list[int]], *, steps: int) -> Iterator[topologies.Request]:
    """Yield the programs to compile for a topology: reading the prompts, and one round."""
    place = meshes.replicated(of.mesh)

    def abstract(function: Callable, *arguments: Any) -> Any:
        shape = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape)

    prompt_BN = padded(ids, of.context)[:, : of.context]
    B, N = prompt_BN.shape
    arguments = abstract(lambda *arrays: (*arrays, jax.random.key(0)), of.params, prompt_BN, np.zeros(B, np.int32))
    begin = jax.jit(functools.partial(of.begin, steps=steps))
    yield topologies.Request(f"reading {B} x {N} tokens and drawing the first", begin, arguments)
    layers, state = abstract(of.by_layer, of.params), abstract(begin, *arguments)
    yield topologies.Request(f"drawing the next {ROUND}, {B} at a time", of.more, (layers, state))
