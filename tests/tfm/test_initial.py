"""Initial parameters: each with the key of its path, whatever else is in the model."""

import zlib

import cases
import jax
import numpy as np
import pytest
from cases import D, F, H, K, M, N, W

from tfm import initial, norm, position, shapes
from tfm.attention import score


def leaves(params) -> dict[str, np.ndarray]:
    pairs = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(shapes.names(path)): np.asarray(leaf) for path, leaf in pairs}


def initialised(seed: int = 0, **settings) -> dict[str, np.ndarray]:
    return leaves(cases.model(**settings).init(jax.random.key(seed)))


def test_all_layers_and_heads_differ_after_initialisation():
    for path, leaf in initialised().items():
        if path.startswith("blocks/") and shapes.is_matrix(path):
            assert leaf.shape[0] == M
            copies = leaf.reshape(M * H, -1) if "H" in shapes.letters(path) else leaf.reshape(M, -1)
            assert np.abs(np.corrcoef(copies)[~np.eye(len(copies), dtype=bool)]).max() < 0.35, path


def test_another_seed_changes_every_matrix():
    one, other = initialised(0), initialised(1)
    for path in one:
        assert (one[path] != other[path]).all() == (shapes.is_matrix(path)), path


def test_every_parameter_is_drawn_with_the_key_of_its_path():
    """Therefore no two parameters and no two layers start alike, and none depends on what else is in the model."""
    for path, leaf in initialised(5, class_token=True).items():
        if not shapes.is_matrix(path) and path != "class/c_D":
            continue
        *rooms, name = path.split("/")
        room_key = initial.key(jax.random.key(5), rooms[0])
        for m, layer in enumerate(leaf if rooms[0] == shapes.STACKED else [leaf]):
            key = jax.random.fold_in(room_key, m) if rooms[0] == shapes.STACKED else room_key
            for room in rooms[1:]:
                key = initial.key(key, room)
            draws = np.asarray(jax.random.normal(initial.key(key, name), layer.shape))
            np.testing.assert_allclose(layer, draws * (layer.ravel()[0] / draws.ravel()[0]), rtol=1e-5, err_msg=path)


@pytest.mark.parametrize(
    ("settings", "added", "removed"),
    [
        (dict(bias=False), 0, 6),
        (dict(position=position.none), 0, 1),
        (dict(final_norm=False), 0, 2),
        (dict(class_token=True), 1, 0),
        (dict(tied_output=True), 0, 1),
        (dict(norm=norm.token_plain), 0, 6),
        (dict(score=score.tied), 2, 4),
        (dict(score=score.none), 0, 4),
    ],
)
def test_adding_and_removing_weights_leaves_the_others_as_they_were(settings, added, removed):
    one, other = initialised(), initialised(**settings)
    assert (len(set(other) - set(one)), len(set(one) - set(other))) == (added, removed)
    for path in set(one) & set(other):
        np.testing.assert_array_equal(one[path], other[path], err_msg=path)


def test_a_deeper_model_begins_with_the_layers_of_a_shallower_one():
    """The two output projections are smaller by the square root of the depths' ratio; all else is equal."""
    shallow, deep = initialised(), initialised(sizes=dict(M=5))
    assert set(shallow) == set(deep)
    for path in shallow:
        ratio = (M / 5) ** 0.5 if path in ("blocks/value/Uo_HDK", "blocks/mlp/W2_DF") else 1.0
        deeper = deep[path][:M] if path.startswith("blocks/") else deep[path]
        np.testing.assert_allclose(deeper, ratio * shallow[path], rtol=1e-6, atol=0, err_msg=path)
        if ratio == 1:
            np.testing.assert_array_equal(deeper, shallow[path], err_msg=path)


def test_keys_follow_from_names_in_the_same_way_everywhere():
    """crc32 as a number, since Python's own hash of a string differs from run to run."""
    root = jax.random.key(7)
    assert zlib.crc32(b"Uq_HKD") == 2800230739
    expected = jax.random.fold_in(root, 2800230739)
    np.testing.assert_array_equal(jax.random.key_data(initial.key(root, "Uq_HKD")), jax.random.key_data(expected))
    np.testing.assert_array_equal(
        initial.normal(root, "Uq_HKD", 0.5, H=2, K=3, D=5)["Uq_HKD"], 0.5 * jax.random.normal(expected, (2, 3, 5))
    )


@pytest.mark.parametrize("heads", [1, 3, 12])
@pytest.mark.parametrize("bias", [True, False])
def test_the_parameter_count_of_a_layer_does_not_depend_on_the_number_of_heads(heads, bias):
    """With K = D/H: 4 D^2 for q, k, v and the output, 2 D F for the MLP, 4 D for the norms; biases 5 D + F."""
    d, f = 12, 31
    sizes = dict(D=d, H=heads, K=d // heads, F=f, M=2)
    model = jax.eval_shape(cases.model(bias=bias, sizes=sizes).init, jax.random.key(0))
    assert shapes.total(model["blocks"]) == 2 * (4 * d * d + 2 * d * f + 4 * d + (5 * d + f if bias else 0))


def test_the_whole_tree():
    tree = jax.eval_shape(cases.model(class_token=True).init, jax.random.key(0))
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    assert {"/".join(shapes.names(path)): leaf.shape for path, leaf in pairs} == {
        "embed/E_WD": (W, D),
        "position/P_ND": (N, D),
        "class/c_D": (D,),
        "norm/gain_D": (D,),
        "norm/shift_D": (D,),
        "head/G_WD": (W, D),
        "blocks/norm1/gain_D": (M, D),
        "blocks/norm1/shift_D": (M, D),
        "blocks/norm2/gain_D": (M, D),
        "blocks/norm2/shift_D": (M, D),
        "blocks/score/Uq_HKD": (M, H, K, D),
        "blocks/score/Uk_HKD": (M, H, K, D),
        "blocks/score/bq_HK": (M, H, K),
        "blocks/score/bk_HK": (M, H, K),
        "blocks/value/Uv_HKD": (M, H, K, D),
        "blocks/value/Uo_HDK": (M, H, D, K),
        "blocks/value/bv_HK": (M, H, K),
        "blocks/value/bo_D": (M, D),
        "blocks/mlp/W1_FD": (M, F, D),
        "blocks/mlp/W2_DF": (M, D, F),
        "blocks/mlp/b1_F": (M, F),
        "blocks/mlp/b2_D": (M, D),
    }
