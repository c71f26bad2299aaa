"""The peer in Flax: GPT-2 and ViT of linen's own layers (its attention layer with its own cache), trained with optax.

The step is one compiled program, to which the old state is given away. Linen, because nnx takes modules apart and puts
them together again around every call.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks import participant, sizes

WORDS_START = 0.02  # deviation of GPT-2's initial embeddings


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to what comes in."""

    size: sizes.Workload
    decode: bool = False

    @nn.compact
    def __call__(self, x_BND: jax.Array, mask: jax.Array | None) -> jax.Array:
        D, H = self.size.D, self.size.H
        attention = nn.MultiHeadDotProductAttention(num_heads=H, decode=self.decode, deterministic=True)
        x_BND = x_BND + attention(nn.LayerNorm(epsilon=1e-5)(x_BND), mask=mask)
        h_BNF = nn.gelu(nn.Dense(4 * D)(nn.LayerNorm(epsilon=1e-5)(x_BND)), approximate=False)
        return x_BND + nn.Dense(D)(h_BNF)


class GPT2(nn.Module):
    """Words w_BN to the logits of the next ones: learned positions, biases, tied output. decode: one word at position n
    at a time, with the attention layers' cache."""

    size: sizes.Workload
    decode: bool = False

    @nn.compact
    def __call__(self, w_BN: jax.Array, n: jax.Array | int = 0) -> jax.Array:
        s = self.size
        normal = nn.initializers.normal(WORDS_START)
        embedding = nn.Embed(s.W, s.D, embedding_init=normal)
        position_ND = self.param("position", normal, (s.N, s.D))
        x_BND = embedding(w_BN) + jax.lax.dynamic_slice_in_dim(position_ND, n, w_BN.shape[1])
        mask = None if self.decode else nn.make_causal_mask(w_BN)
        for _ in range(s.M):
            x_BND = Block(s, self.decode)(x_BND, mask)
        return embedding.attend(nn.LayerNorm(epsilon=1e-5)(x_BND))


class ViT(nn.Module):
    """Images to the logits of their classes, read off the class token."""

    size: sizes.Workload

    @nn.compact
    def __call__(self, image_BYXZ: jax.Array) -> jax.Array:
        s, normal = self.size, nn.initializers.normal(WORDS_START)
        x_BYXD = nn.Conv(s.D, (s.patch, s.patch), strides=s.patch, padding="VALID")(image_BYXZ)
        x_BND = x_BYXD.reshape(len(x_BYXD), -1, s.D)
        class_1D = self.param("class", normal, (1, s.D))
        x_BND = jnp.concatenate([jnp.broadcast_to(class_1D, (len(x_BND), 1, s.D)), x_BND], axis=1)
        x_BND = x_BND + self.param("position", normal, x_BND.shape[1:])
        for _ in range(s.M):
            x_BND = Block(s)(x_BND, None)
        return nn.Dense(s.C)(nn.LayerNorm(epsilon=1e-5)(x_BND)[:, 0])


def training(model: nn.Module, batches: list[tuple[Any, Any]]) -> tuple[Callable[[int], float], Any]:
    """steps(n): n steps of mean cross-entropy, clipping and AdamW, with decay on all but biases and gains, each on the
    next batch; and the first parameters."""

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)

    o = sizes.OPTIMISER
    numbers = {"b1": o["betas"][0], "b2": o["betas"][1], "eps": o["eps"], "weight_decay": o["weight_decay"]}
    adamw = optax.adamw(o["learning_rate"], **numbers, mask=decays)
    adamw, waiting = optax.chain(optax.clip_by_global_norm(o["clip"]), adamw), itertools.cycle(batches)
    params = jax.jit(model.init)(jax.random.key(0), batches[0][0])["params"]
    shapes = jax.eval_shape(lambda: params)
    state = params, jax.jit(adamw.init)(params)

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
            state, loss = step(state, *next(waiting))
        jax.block_until_ready(state)
        return float(loss)

    return steps, shapes


def generation(size: sizes.Workload) -> tuple[Callable[[int], float], Any]:
    """steps(n): n times the prompts and their new words, one compiled loop; and the parameters."""
    model = GPT2(size, decode=True)
    whole_BN = jnp.zeros((size.B, size.N), jnp.int32)  # as long as the cache is to be
    variables = jax.jit(model.init)(jax.random.key(0), whole_BN)
    empty = jax.tree.map(jnp.zeros_like, variables["cache"])

    @jax.jit
    def generate(params: Any, cache: Any, prompt_B1: jax.Array, key: jax.Array) -> jax.Array:
        def one(carry: tuple[Any, jax.Array], n: jax.Array) -> tuple[Any, jax.Array]:
            cache, w_B = carry
            logits_B1W, new = model.apply({"params": params, "cache": cache}, w_B[:, None], n, mutable=["cache"])
            chosen_B = jax.random.categorical(jax.random.fold_in(key, n), logits_B1W[:, 0] / sizes.TEMPERATURE)
            return (new["cache"], chosen_B.astype(w_B.dtype)), chosen_B

        return jax.lax.scan(one, (cache, prompt_B1[:, 0]), jnp.arange(size.new))[1]

    prompt_B1 = jnp.asarray(sizes.prompt(size), jnp.int32)
    compiled = generate.lower(variables["params"], empty, prompt_B1, jax.random.key(0)).compile()

    def steps(n: int) -> float:
        for i in range(n):
            words_NB = jax.device_get(compiled(variables["params"], empty, prompt_B1, jax.random.key(i)))
            if words_NB.size != size.counted:
                raise RuntimeError(f"{words_NB.size} words instead of {size.counted}")
        return 0.0

    return steps, variables["params"]


def build(size: sizes.Workload) -> participant.Built:
    if size.kind == "generation":
        steps, params = generation(size)
    elif size.kind == "images":
        steps, params = training(ViT(size), sizes.images(size))
    else:
        batches = [(w_BN.astype("int32"), target_BN.astype("int32")) for w_BN, target_BN in sizes.words(size)]
        steps, params = training(GPT2(size), batches)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    return participant.Built(steps, parameters, {"versions": {"flax": flax.__version__, "optax": optax.__version__}})
