"""The Flax peer: GPT-2 and a ViT of linen's layers, trained with optax in one compiled program that donates the state.

It covers only training. It uses linen, because nnx is slower: it splits and merges modules in every call.
"""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

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


class ViT(nn.Module):
    """Map images to class logits: a class token, learned positions, biases."""

    size: sizes.Workload

    @nn.compact
    def __call__(self, image_BYXZ: jax.Array) -> jax.Array:
        size = self.size
        patch_BYXD = nn.Conv(size.D, (size.patch, size.patch), strides=size.patch, padding="VALID")(image_BYXZ)
        patch_BND = patch_BYXD.reshape(len(patch_BYXD), -1, size.D)
        class_B1D = jnp.broadcast_to(self.param("class", NORMAL, (1, size.D)), (len(patch_BND), 1, size.D))
        x_BND = jnp.concatenate([class_B1D, patch_BND], axis=1)
        x_BND = x_BND + self.param("position", NORMAL, x_BND.shape[1:])
        for _ in range(size.M):
            x_BND = Block(size)(x_BND, None)
        return nn.Dense(size.C)(nn.LayerNorm(epsilon=1e-5)(x_BND[:, 0]))


MODELS = {"text": GPT2, "images": ViT}


def build(size: sizes.Workload) -> participant.Built:
    """Build training steps: mean cross-entropy, clipping, AdamW with decay on all but biases and gains.

    Devices share the examples of a batch. Raises Unavailable if the workload is not training.
    """
    if size.kind not in MODELS:
        raise participant.Unavailable("the Flax peer covers only training")
    model, batches, o = MODELS[size.kind](size), itertools.cycle(sizes.make_batches(size)), sizes.OPTIMISER

    def decay_mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)

    adamw = optax.adamw(o["learning_rate"], *o["betas"], o["eps"], weight_decay=o["weight_decay"], mask=decay_mask)
    adamw = optax.chain(optax.clip_by_global_norm(o["clip"]), adamw)
    mesh = jax.make_mesh((min(size.devices, jax.device_count()),), ("data",), axis_types=(AxisType.Auto,))
    whole, shared = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def init(example: jax.Array) -> Any:
        params = model.init(jax.random.key(0), example)["params"]
        return params, adamw.init(params)

    def step(state: Any, example: jax.Array, target: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, example)
            return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = adamw.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    state = jax.jit(init, out_shardings=whole)(next(batches)[0])
    step = jax.jit(step, donate_argnums=0, in_shardings=(whole, shared, shared), out_shardings=whole)

    def steps(n: int) -> float:
        nonlocal state
        for _ in range(n):
            state, loss = step(state, *next(batches))
        jax.block_until_ready(state)
        return float(loss)

    return participant.Built(steps, sum(leaf.size for leaf in jax.tree.leaves(state[0])))
