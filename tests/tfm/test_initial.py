"""Initial parameters: each with the key of its path, whatever else is in the model."""

import functools
import zlib

import cases
import jax
import numpy as np
import pytest
from cases import M

from tfm import initial, norm, shapes
from tfm.attention import score


@functools.cache
def initialised(depth: int = M, **settings) -> dict[str, np.ndarray]:
    """The leaves of a model, by their paths."""
    init = cases.model(sizes=dict(M=depth), **settings).init
    return jax.device_get(shapes.flat(init(jax.random.key(5))))


OTHERS = dict(class_token=True, tied_output=True, norm=norm.token_plain, score=score.tied)


@pytest.mark.parametrize("settings", [{}, OTHERS])
def test_every_parameter_is_drawn_with_the_key_of_its_path(settings):
    """Therefore no two parameters and no two layers start alike, and none depends on what else is in the model."""
    for path, leaf in initialised(**settings).items():
        if not shapes.is_matrix(path) and path != "class/c_D":
            assert len(np.unique(leaf)) == 1
            continue
        *rooms, name = path.split("/")
        room_key = initial.key(jax.random.key(5), rooms[0])
        for m, layer in enumerate(leaf if rooms[0] == shapes.STACKED else [leaf]):
            key = jax.random.fold_in(room_key, m) if rooms[0] == shapes.STACKED else room_key
            for room in rooms[1:]:
                key = initial.key(key, room)
            draws = np.asarray(jax.random.normal(initial.key(key, name), layer.shape))
            np.testing.assert_allclose(layer, draws * (layer.ravel()[0] / draws.ravel()[0]), rtol=1e-5, err_msg=path)


def test_a_deeper_model_begins_with_the_layers_of_a_shallower_one():
    """The two output projections are smaller by the square root of the depths' ratio; all else is equal."""
    shallow, deep = initialised(), initialised(5)
    assert set(shallow) == set(deep)
    for path in shallow:
        ratio = (M / 5) ** 0.5 if path in ("blocks/value/Uo_HDK", "blocks/mlp/W2_DF") else 1.0
        deeper = deep[path][:M] if path.startswith("blocks/") else deep[path]
        tolerance = 1e-6 if ratio < 1 else 0
        np.testing.assert_allclose(deeper, ratio * shallow[path], rtol=tolerance, atol=0, err_msg=path)


def test_keys_follow_from_names_in_the_same_way_everywhere():
    """crc32 as a number, since Python's own hash of a string differs from run to run."""
    root = jax.random.key(7)
    assert zlib.crc32(b"Uq_HKD") == 2800230739
    expected = jax.random.fold_in(root, 2800230739)
    np.testing.assert_array_equal(jax.random.key_data(initial.key(root, "Uq_HKD")), jax.random.key_data(expected))
    drawn = initial.normal(root, "Uq_HKD", 0.5, H=2, K=3, D=5)["Uq_HKD"]
    np.testing.assert_array_equal(drawn, 0.5 * jax.random.normal(expected, (2, 3, 5)))
