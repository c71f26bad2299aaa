"""States of random numbers on any mesh, saved and resumed, for the tests of checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.engine import checkpoint, train_step as steps

LAYOUTS = {  # of the devices' axes, and of a matrix and a vector over them
    "1": ((1,), "a", PartitionSpec(), PartitionSpec()),
    "8": ((8,), "a", PartitionSpec("a"), PartitionSpec("a")),
    "8 whole": ((8,), "a", PartitionSpec(), PartitionSpec()),
    "2x2x2": ((2, 2, 2), "abc", PartitionSpec(("a", "c"), "b"), PartitionSpec("b")),
}


def state(layout="1", seed=0, D=16):
    """A training state of random numbers, no two of which are equal."""
    sizes, axes, matrix, vector = LAYOUTS[layout]
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple(axes))
    rng = np.random.default_rng(seed)

    def placed(x):
        spec = {2: matrix, 1: vector, 0: PartitionSpec()}[x.ndim]
        x = x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(rng.normal(size=x.shape), x.dtype)
        return jax.device_put(x, NamedSharding(mesh, spec))

    params = {"embed": {"E_WD": jnp.zeros((8, D)), "b_D": jnp.zeros(D, jnp.bfloat16)}}
    opt_state = optax.chain(optax.clip(1.0), optax.adam(0.1)).init(params)
    whole = steps.State(step=jnp.int32(0), params=params, opt_state=opt_state, key=jax.random.key(seed))
    return jax.tree.map(placed, whole)


def numbers(tree):
    """Every leaf's type and bytes; of random keys those of their numbers."""
    leaves = jax.tree.leaves(tree)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    plain = [jax.random.key_data(x) if key else x for key, x in zip(keys, leaves, strict=True)]
    return [(str(x.dtype), np.asarray(y).tobytes()) for x, y in zip(leaves, plain, strict=True)]


def saved(folder, steps=(3,), *, keep=9, best="", metrics=None, **which):
    """The folder with a checkpoint of each step, all of different numbers."""
    saves = checkpoint.Checkpoints(folder, keep=keep, best=best)
    for step in steps:
        saves.save(step, state(seed=step, **which), (metrics or {}).get(step))
    saves.close()
    return folder


def resumed(folder, like=None, step=None):
    saves = checkpoint.Checkpoints(folder, keep=9)
    try:
        return saves.resume(like or state(), step)
    finally:
        saves.close()


def there(folder):
    return {found.name for found in folder.iterdir()}


def flip(file):
    """Change a bit of the last byte of the file."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
