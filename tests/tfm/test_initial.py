"""Initial parameters: each is drawn with the key of its path, independent of other parameters, at its scale."""

import functools

import cases
import jax
import numpy as np
import pytest
from cases import M

from tfm import embed as embeds, head as heads, initial, mlp, position, shapes
from tfm.attention import score, value

TOKENS, IMAGES, MLP = dict(W=101, D=97), dict(P=53, D=97), dict(D=97, F=211, M=7, bias=True)
VALUE, SCORE, PLACES = dict(H=3, K=41, D=97, M=7, bias=True), dict(H=2, K=3, D=5, bias=True), dict(N=101, D=97)
HIDDEN = {"W1_FD": 97**-0.5, "W2_DF": (2 * 7 * 211) ** -0.5}  # 2 M residual terms add up to unit variance
QUERY_KEY_STD = {"Uq_HKD": 5**-0.5, "Uk_HKD": 5**-0.5}
SUM = {"Wx_DD": 97**-0.5, "Wp_DD": 97**-0.5}
STD = [  # init, sizes, the standard deviation of each matrix
    (embeds.words.init, TOKENS, {"E_WD": 97**-0.5}),
    (embeds.patches.init, IMAGES, {"W_DP": (53 * 97) ** -0.5}),
    (embeds.masked_patches.init, IMAGES, {"W_DP": (53 * 97) ** -0.5, "h_D": 97**-0.5}),
    (embeds.class_token_init, {"D": 97}, {"c_D": 97**-0.5}),
    (heads.next_word.init, TOKENS, {"G_WD": 0.02}),
    (heads.pooled.init, dict(C=53, D=97), {"G_CD": 0.02}),
    (heads.pixels.init, IMAGES, {"W_PD": 0.02}),
    (position.learned.init, PLACES, {"P_ND": 97**-0.5}),
    (position.learned_concatenated.init, PLACES, {"P_ND": 97**-0.5} | SUM),
    (position.sinusoidal_concatenated.init, PLACES, SUM),
    (position.sinusoidal.init, PLACES, {}),
    (mlp.relu.init, MLP, HIDDEN),
    (mlp.two_hidden_gelu.init, MLP, HIDDEN | {"Wh_FF": 211**-0.5}),
    (mlp.swiglu.init, MLP, HIDDEN | {"Wg_FD": 97**-0.5}),
    (value.low_rank.init, VALUE, {"Uv_HKD": 97**-0.5, "Uo_HDK": (2 * 7 * 3 * 41) ** -0.5}),
    (value.full_rank.init, VALUE, {"V_HDD": (2 * 7 * 3 * 97) ** -0.5}),
    (value.identity.init, VALUE, {}),
    # For logits of variance 1, with K = 3 and D = 5, for which every term of a formula counts
    (score.tied.init, SCORE, {"U_HKD": (5 * (5 + 3 + 1)) ** -0.25}),
    (score.tied_keynorm.init, SCORE, {"U_HKD": (5 + 3 - 1) ** -0.5}),
    (score.tied_wide.init, SCORE, {"U_HQD": (5 * (5 + 6 + 1)) ** -0.25}),
    (score.l2_tied.init, SCORE, {"U_HKD": ((3 + 4) / (3 * 5 * (6 * 5 + 4 * 3 + 2))) ** 0.25}),
    (score.pairwise.init, SCORE, {"U_HKD": 5**-0.5, "P_HKK": 3**-0.5}),
    (score.pairwise_sym.init, SCORE, {"U_HKD": 5**-0.5, "P_HKK": (2 / (3 + 1)) ** 0.5}),
    (score.asymmetric.init, SCORE, QUERY_KEY_STD),
    (score.asymmetric_std.init, SCORE, {name: 3**-0.5 * std for name, std in QUERY_KEY_STD.items()}),
]


def draw(key: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
    """Draw normal numbers with NumPy instead of jax.random.normal, which would compile a program for each shape."""
    return np.random.default_rng(jax.device_get(jax.random.key_data(key))).standard_normal(shape)


@pytest.mark.parametrize(("init", "sizes", "stds"), STD)
def test_a_matrix_has_its_standard_deviation_and_the_key_of_its_name_and_biases_are_zero(
    init, sizes, stds, monkeypatch
):
    """Hence parameters of one name have equal draws in all variants, and other names have other draws."""
    monkeypatch.setattr(jax.random, "normal", draw)
    root = jax.random.key(0)
    params = init(root, **sizes)
    shapes.check(params)
    for name, array in params.items():
        expected = stds.get(name, 0.0) * draw(initial.key(root, name), array.shape)
        np.testing.assert_allclose(array, expected, rtol=1e-6)
    matrices = init(root, **sizes | {"bias": False}) if "bias" in sizes else {name: params[name] for name in stds}
    assert matrices.keys() == stds.keys()
    jax.tree.map(np.testing.assert_array_equal, matrices, {name: params[name] for name in stds})


@functools.cache
def initialise(depth: int = M) -> dict[str, np.ndarray]:
    """Return the leaves of a model, by their paths."""
    init = cases.model(sizes=dict(M=depth), class_token=True).init
    return jax.device_get(shapes.flat(jax.jit(init)(jax.random.key(5))))


def test_every_parameter_is_drawn_with_the_key_of_its_path():
    """Hence parameters and layers have different draws, which do not depend on other parts of the model."""
    for path, leaf in initialise().items():
        if not shapes.is_matrix(path) and path != "class/c_D":
            assert len(np.unique(leaf)) == 1
            continue
        *parents, name = path.split("/")
        parent_key = initial.key(jax.random.key(5), parents[0])
        for m, layer in enumerate(leaf if parents[0] == shapes.STACKED else [leaf]):
            key = jax.random.fold_in(parent_key, m) if parents[0] == shapes.STACKED else parent_key
            for parent in parents[1:]:
                key = initial.key(key, parent)
            draws = np.asarray(jax.random.normal(initial.key(key, name), layer.shape))
            np.testing.assert_allclose(layer, draws * (layer.ravel()[0] / draws.ravel()[0]), rtol=1e-5, err_msg=path)


def test_a_deeper_model_begins_with_the_layers_of_a_shallower_one():
    """Only the two output projections differ: they are smaller by the square root of the ratio of depths."""
    shallow, deep = initialise(), initialise(5)
    assert set(shallow) == set(deep)
    for path in shallow:
        ratio = (M / 5) ** 0.5 if path in ("blocks/value/Uo_HDK", "blocks/mlp/W2_DF") else 1.0
        deeper = deep[path][:M] if path.startswith("blocks/") else deep[path]
        tolerance = 1e-6 if ratio < 1 else 0
        np.testing.assert_allclose(deeper, ratio * shallow[path], rtol=tolerance, atol=0, err_msg=path)


def test_keys_follow_from_crc32_of_the_names():
    """Python's hash of a string differs from run to run, so keys use crc32."""
    root = jax.random.key(7)
    expected = 0.5 * np.asarray(jax.random.normal(jax.random.fold_in(root, 2800230739), (2, 3, 5)))
    np.testing.assert_array_equal(initial.normal(root, "Uq_HKD", 0.5, H=2, K=3, D=5)["Uq_HKD"], expected)
