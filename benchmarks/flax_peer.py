"""The peer in Flax: GPT-2 of linen's own layers, trained with optax in one compiled program that donates the state.

Images and generation are not compared. Linen, because nnx splits and merges modules around every call.
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
    """Attention and MLP, each after a norm and added to its input."""

    size: sizes.Workload

    @nn.compact
    def __call__(self, x_BND: jax.Array, mask: jax.Array | None) -> jax.Array:
        D, H = self.size.D, self.size.H
        attention = nn.MultiHeadDotProductAttention(num_heads=H, deterministic=True)
        x_BND = x_BND + attention(nn.LayerNorm(epsilon=1e-5)(x_BND), mask=mask)
        h_BNF = nn.gelu(nn.Dense(4 * D)(nn.LayerNorm(epsilon=1e-5)(x_BND)), approximate=False)
        return x_BND + nn.Dense(D)(h_BNF)


class GPT2(nn.Module):
    """Token ids w_BN to next-token logits: learned positions, biases, tied output."""

    size: sizes.Workload

    @nn.compact
    def __call__(self, w_BN: jax.Array) -> jax.Array:
        s = self.size
        embedding = nn.Embed(s.W, s.D, embedding_init=NORMAL)
        x_BND = embedding(w_BN) + self.param("position", NORMAL, (s.N, s.D))
        for _ in range(s.M):
            x_BND = Block(s)(x_BND, nn.make_causal_mask(w_BN))
        return embedding.attend(nn.LayerNorm(epsilon=1e-5)(x_BND))


def build(size: sizes.Workload) -> participant.Built:
    """Build steps of mean cross-entropy, clipping and AdamW, with decay on all but biases and gains."""
    if size.kind != "words":
        raise participant.Unavailable("Flax is compared in training on text")
    model, batches = GPT2(size), itertools.cycle(sizes.words(size))

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)

    o = sizes.OPTIMISER
    numbers = {"b1": o["betas"][0], "b2": o["betas"][1], "eps": o["eps"], "weight_decay": o["weight_decay"]}
    adamw = optax.adamw(o["learning_rate"], **numbers, mask=decays)
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
