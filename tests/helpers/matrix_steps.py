"""Random parameters, steps of an optimiser, and Newton-Schulz in NumPy, for the tests of optimisers."""

import jax
import jax.numpy as jnp
import numpy as np

from tfm import shapes

ADAM = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3}
M, H, K, D, F = 2, 3, 5, 7, 11
SIZES = {"M": M, "H": H, "K": K, "D": D, "F": F, "N": 13}
HIDDEN = ["score/Uq_HKD", "score/P_HKK", "value/Uo_HDK", "value/V_HDD", "mlp/W1_FD", "mlp/W2_DF", "mlp/Wh_FF"]
OTHERS = ["blocks/norm1/gain_D", "blocks/value/bo_D", "embed/E_ND", "head/G_ND"]
ALL = [f"blocks/{name}" for name in HIDDEN] + OTHERS
RATE, MATRIX_RATE, MOMENTUM, DECAY, ROUNDS = 0.1, 3.0, 0.8, 0.5, 4


def drawn(seed, names=ALL):
    rng, tree = np.random.default_rng(seed), {}
    for name in names:
        *parents, last = name.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = jax.device_put(np.float32(rng.standard_normal([SIZES[letter] for letter in shapes.letters(name)])))
    return tree


def newton_schulz(x_RC):
    """Jordan et al. 2024, with the smaller product; float64."""
    x_RC = np.asarray(x_RC, np.float64)
    if x_RC.shape[0] > x_RC.shape[1]:
        return newton_schulz(x_RC.T).T
    x_RC = x_RC / np.sqrt(np.sum(x_RC * x_RC))
    for _ in range(ROUNDS):
        square_RR = x_RC @ x_RC.T
        x_RC = 3.4445 * x_RC - 4.7750 * square_RR @ x_RC + 2.0315 * square_RR @ square_RR @ x_RC
    return x_RC


def matrix_step(name, x):
    """One layer's step: each matrix written down with its rows and columns, by hand."""
    if name.endswith("Uq_HKD"):  # from D to the K features of all heads, one under the other
        return np.sqrt(H * K / D) * newton_schulz(x.reshape(H * K, D)).reshape(H, K, D)
    if name.endswith(("Uo_HDK", "V_HDD")):  # the matrices of all heads beside each other
        return np.stack(np.split(newton_schulz(np.concatenate(list(x), axis=1)), H, axis=1))
    if name.endswith("P_HKK"):  # a matrix in each head
        return np.stack([newton_schulz(P_KK) for P_KK in x])
    return newton_schulz(x) * np.sqrt(max(1, x.shape[0] / x.shape[1]))


FEW = ["blocks/score/Uq_HKD", "blocks/score/P_HKK", "blocks/mlp/W2_DF", "embed/E_ND"]


def taken(optimiser, params, gradients):
    """The parameters after a step for each gradient."""
    state = jax.jit(optimiser.init)(params)

    @jax.jit
    def step(gradient, state, params):
        updates, state = optimiser.update(gradient, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for gradient in gradients:
        params, state = step(gradient, state, params)
    return params


def near(found, wanted, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=rtol, atol=atol), found, wanted)
