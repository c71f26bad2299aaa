"""Training states with random numbers on several meshes, for tests that save and resume them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.engine import train_step
from experiments.folder import checkpoint

LAYOUTS = {  # mesh sizes, axis names, PartitionSpec of matrices, PartitionSpec of vectors
    "1": ((1,), "a", PartitionSpec(), PartitionSpec()),
    "8": ((8,), "a", PartitionSpec("a"), PartitionSpec("a")),
    "8 whole": ((8,), "a", PartitionSpec(), PartitionSpec()),
    "2x2x2": ((2, 2, 2), "abc", PartitionSpec(("a", "c"), "b"), PartitionSpec("b")),
}


def make_state(layout="1", seed=0, D=16):
    """Return a training state of random numbers."""
    sizes, axes, matrix, vector = LAYOUTS[layout]
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple(axes))
    rng = np.random.default_rng(seed)

    def place(x):
        spec = {2: matrix, 1: vector, 0: PartitionSpec()}[x.ndim]
        x = x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(rng.normal(size=x.shape), x.dtype)
        return jax.device_put(x, NamedSharding(mesh, spec))

    params = {"embed": {"E_WD": jnp.zeros((8, D)), "b_D": jnp.zeros(D, jnp.bfloat16)}}
    opt_state = optax.chain(optax.clip(1.0), optax.adam(0.1)).init(params)
    state = train_step.State(step=jnp.int32(0), params=params, opt_state=opt_state, key=jax.random.key(seed))
    return jax.tree.map(place, state)


def to_bytes(tree):
    """Return (dtype, bytes) of every leaf. A PRNG key is converted to its key data."""
    leaves = jax.tree.leaves(tree)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    arrays = [jax.random.key_data(x) if key else x for key, x in zip(keys, leaves, strict=True)]
    return [(str(x.dtype), np.asarray(y).tobytes()) for x, y in zip(leaves, arrays, strict=True)]


def save_steps(folder, steps=(3,), *, keep=9, best="", metrics=None, **state_options):
    """Save a checkpoint with different numbers for each step, and return the folder."""
    saves = checkpoint.Checkpoints(folder, keep=keep, best=checkpoint.choose_best(best, {}))
    for step in steps:
        saves.save(step, make_state(seed=step, **state_options), (metrics or {}).get(step))
    saves.close()
    return folder


def resume(folder, target=None, step=None):
    saves = checkpoint.Checkpoints(folder, keep=9)
    try:
        return saves.resume(target or make_state(), step)
    finally:
        saves.close()


def list_names(folder):
    return {path.name for path in folder.iterdir()}


def flip(file):
    """Change a bit of the last byte of the file."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
