"""Positions in the token (E21) against the slow reference."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_positions as slow
import translate
from cases import ANY_BN, ANY_N, B, D, N
from errors import raises

from experiments.config import by_name
from tfm import position

POSITIONS = by_name.candidates(position)


@cases.float64()
def test_sinusoids_equal_the_reference():
    sizes, positions = (D, 16, 2, 1), (np.arange(101), ANY_BN)
    compute_all = jax.jit(lambda: [[position.sinusoids(n, d) for n in positions] for d in sizes])
    for d, (p_ND, p_BND) in zip(sizes, jax.device_get(compute_all()), strict=True):
        cases.assert_close(p_ND, reference.sinusoids(d, 101).T, 1e-12)
        cases.assert_close(p_BND[1], slow.sinusoid_columns(d, ANY_BN[1]).T, 1e-12)


def table(name: str, params: dict, positions) -> np.ndarray:
    """Return the paper's P, D x N, at these positions."""
    if "P_ND" in params:
        return translate.columns(params["P_ND"])[:, positions]
    return np.zeros((D, N)) if name == "none" else slow.sinusoid_columns(D, positions)


@cases.float64()
def test_added_and_concatenated_positions_equal_the_reference():
    inits = {name: functools.partial(code.init, N=37, D=D) for name, code in POSITIONS.items()}
    all_params = {name: jax.device_get(cases.draw_params(init)) for name, init in inits.items()}
    x_BND, position_arrays = np.asarray(cases.normal(1, B, N, D)), (None, ANY_N, ANY_BN)
    calls = [*itertools.product(POSITIONS, position_arrays)]
    apply_all = jax.jit(lambda p, x_BND: [POSITIONS[name].apply(p[name], x_BND, n) for name, n in calls])
    for (name, n), y_BND in zip(calls, jax.device_get(apply_all(all_params, x_BND)), strict=True):
        params = all_params[name]
        for b, positions in enumerate(np.broadcast_to(np.arange(N) if n is None else n, (B, N))):
            X, P = translate.columns(x_BND[b]), table(name, params, positions)
            if name.endswith("concatenated"):
                W = np.concatenate([params["Wx_DD"], params["Wp_DD"]], axis=1)
                cases.assert_close(y_BND[b], slow.concatenated_positions(X, P, W).T)
            else:
                cases.assert_close(y_BND[b], reference.added_positions(X, P).T)


@pytest.mark.parametrize("name", ["learned", "learned_concatenated"])
def test_more_tokens_than_learned_positions_are_refused_and_one_past_the_end_is_nan(name):
    params = cases.draw_params(lambda key: POSITIONS[name].init(key, N=N, D=D))
    for n in (None, np.arange(N + 1)):
        with raises(ValueError, f"{N + 1} tokens", f"of {N}"):
            POSITIONS[name].apply(params, cases.normal(1, B, N + 1, D), n)
    y_BND = jax.jit(POSITIONS[name].apply)(params, cases.normal(1, B, 2, D), np.array([[0, N], [N - 1, 1]]))
    np.testing.assert_array_equal(np.isnan(y_BND).all(-1), [[False, True], [False, False]])
    assert np.isnan(y_BND).sum() == D


def test_positions_keep_the_dtype_and_do_not_round_the_angle():
    """In bfloat16, 1001 is rounded to 1000, which changes its sine by 0.3. Only the result may be rounded, to 2^-8."""
    inits = {name: functools.partial(code.init, N=1002, D=D) for name, code in POSITIONS.items()}
    arrays = {name: cases.draw_params(init) for name, init in inits.items()}, np.zeros((1, 1, D), np.float32)

    @jax.jit
    def apply_all(all_params, x_BND):
        return {name: code.apply(all_params[name], x_BND, np.array([1001])) for name, code in POSITIONS.items()}

    narrow = apply_all(*jax.tree.map(lambda leaf: np.asarray(leaf, jnp.bfloat16), arrays))
    assert {leaf.dtype for leaf in narrow.values()} == {jnp.dtype("bfloat16")}
    cases.assert_trees_close(jax.tree.map(np.float32, narrow), apply_all(*arrays), 0.02)
