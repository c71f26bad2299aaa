"""The Flax peer: GPT-2 built from linen's layers, trained with optax in one compiled program that donates the state.

It covers only training on text. It uses linen, because nnx is slower: it splits and merges modules in every call.
"""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import optax

from benchmarks import participant, sizes

NORMAL = nn.initializers.normal(0.02)  # GPT-2's embeddings


class Block(nn.Module):
    """Pre-norm attention and MLP with residual connections."""

    size: sizes.Workload

    @nn.compact
    def __call__(self, x_BND: jax.Array, mask: jax.Array | None) -> jax.Array:
        D, H = self.size.D, self.size.H
        attention = nn.MultiHeadDotProductAttention(num_heads=H, deterministic=True)
        x_BND = x_BND + attention(nn.LayerNorm(epsilon=1e-5)(x_BND), mask=mask)
        h_BNF = nn.gelu(nn.Dense(4 * D)(nn.LayerNorm(epsilon=1e-5)(x_BND)), approximate=False)
        return x_BND + nn.Dense(D)(h_BNF)


class GPT2(nn.Module):
    """Map token ids w_BN to next-token logits: learned positions, biases, tied output."""

    size: sizes.Workload

    @nn.compact
    def __call__(self, w_BN: jax.Array) -> jax.Array:
        size = self.size
        embedding = nn.Embed(size.W, size.D, embedding_init=NORMAL)
        x_BND = embedding(w_BN) + self.param("position", NORMAL, (size.N, size.D))
        for _ in range(size.M):
            x_BND = Block(size)(x_BND, nn.make_causal_mask(w_BN))
        return embedding.attend(nn.LayerNorm(epsilon=1e-5)(x_BND))


def build(size: sizes.Workload) -> participant.Built:
    """Build training steps: mean cross-entropy, clipping, AdamW with decay on all but biases and gains.

    Raises Unavailable if the workload is not training on text.
    """
    if size.kind != "text":
        raise participant.Unavailable("the Flax peer covers only training on text")
    model, batches, o = GPT2(size), itertools.cycle(sizes.make_batches(size)), sizes.OPTIMISER

    def decay_mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)

    adamw = optax.adamw(o["learning_rate"], *o["betas"], o["eps"], weight_decay=o["weight_decay"], mask=decay_mask)
    adamw = optax.chain(optax.clip_by_global_norm(o["clip"]), adamw)
    params = jax.jit(model.init)(jax.random.key(0), next(batches)[0])["params"]
    parameters, state = sum(leaf.size for leaf in jax.tree.leaves(params)), (params, jax.jit(adamw.init)(params))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, example: jax.Array, target: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, example)
            return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = adamw.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    def steps(n: int) -> float:
        nonlocal state
        for _ in range(n):
            state, loss = step(state, *next(batches))
        jax.block_until_ready(state)
        return float(loss)

    return participant.Built(steps, parameters)
