"""Shapes in names: letters, the check, PartitionSpecs, and which parameters are matrices for weight decay."""

import functools

import cases
import jax
import numpy as np
import optax
import pytest
from errors import raises
from jax.sharding import PartitionSpec as P

from tfm import shapes


@functools.cache
def tree(**settings) -> dict:
    """Return the shapes of all parameters of a model."""
    return jax.eval_shape(cases.model(**settings).init, jax.random.key(0))


def state() -> tuple:
    """Return AdamW's state for the model above: named tuples in a tuple, with two copies of the parameter tree."""
    return jax.eval_shape(optax.adamw(1e-3).init, tree())


def test_letters_of_paths():
    letters = {"Uq_HKD": "HKD", "blocks/score/Uq_HKD": "MHKD", "norm/gain_D": "D", "0/mu/blocks/mlp/W1_FD": "MFD"}
    letters |= {"blocks_WD": "WD"} | dict.fromkeys(["blocks", "x_Wd", "a_B/c", "W1", "", ()], "")
    letters |= {"blocks/norm1/alpha": "M"}  # a number for each layer
    assert {path: shapes.letters(path) for path in letters} == letters


def test_letters_of_key_paths_equal_those_of_strings():
    for leaves in (tree(), state()):
        for path, _ in jax.tree_util.tree_leaves_with_path(leaves):
            assert shapes.letters(path) == shapes.letters("/".join(shapes.names(path))), path
    key = jax.tree_util
    parents = key.SequenceKey(0), key.GetAttrKey("mu"), key.DictKey("blocks"), key.FlattenedIndexKey(3)
    path = (*parents, key.DictKey("b_HK"))
    assert shapes.letters(path) == "MHK" and shapes.names(path)[:3] == ("0", "mu", "blocks")
    assert {"0/mu/blocks/score/Uq_HKD", "0/nu/embed/E_WD", "0/count"} < shapes.flat(state()).keys()


def test_sizes_give_shapes_and_shapes_give_the_size_of_every_letter():
    assert shapes.shape("Uq_HKD", {"H": 2, "K": 3, "D": 5, "W": 7}) == (2, 3, 5)
    with pytest.raises(KeyError):
        shapes.shape("Uq_HKD", {"H": 2, "K": 3})
    sizes = {letter: getattr(cases, letter) for letter in "MHNKDFW"}
    assert shapes.check(tree(class_token=True)) == sizes == shapes.check(state())


@pytest.mark.parametrize(
    ("leaves", "parts"),
    [
        ({"a/U_HK": (2, 3), "b/W_KD": (5, 7)}, ["K is 5", "b/W_KD", 3, "a/U_HK"]),
        ({"a/U_HK": (2, 3), "b/W_KD": (2, 7)}, ["K is 2", "b/W_KD", 3, "a/U_HK"]),
        ({"a/U_KK": (3, 5)}, ["K is 5", "a/U_KK", 3]),
        ({"a/U_HK": (2,)}, ["a/U_HK", "(2,)", "'HK'"]),
        ({"a/U_HK": (2, 3, 5)}, ["a/U_HK", "(2, 3, 5)"]),
        ({"a/U_HK": ()}, ["a/U_HK", "()"]),
        ({"a/U": (2, 3)}, ["a/U", "(2, 3)", "Uq_HKD"]),
        ({"blocks/b_HK": (2, 3)}, ["blocks/b_HK", "(2, 3)", "'MHK'"]),
        ({"blocks/a_H": (3, 2), "blocks/b_H": (5, 2)}, ["M is 5"]),
        ({"a/x_B1": (3, 2)}, ["a/x_B1", "(3, 2)", "an axis of size 1"]),
    ],
)
def test_check_names_the_leaves_that_contradict(leaves, parts):
    tree = {}
    for path, shape in leaves.items():
        node, name = path.split("/")
        tree.setdefault(node, {})[name] = jax.ShapeDtypeStruct(shape, float)
    with raises(shapes.ShapeError, *parts) as caught:
        shapes.check(tree)
    assert isinstance(caught.value, ValueError)


# Layouts

RULES = {"D": "fsdp", "H": "tensor", "F": "tensor", "W": "tensor"}


def test_specs_follow_the_rules():
    specs = shapes.specs(tree(), RULES)
    expected = {"blocks/score/Uq_HKD": P(None, "tensor", None, "fsdp"), "blocks/score/bq_HK": P(None, "tensor")}
    expected |= {"blocks/value/Uo_HDK": P(None, "tensor", "fsdp"), "blocks/mlp/W2_DF": P(None, "fsdp", "tensor")}
    expected |= {"head/G_WD": P("tensor", "fsdp")}
    assert expected.items() <= shapes.flat(specs).items()
    assert shapes.specs(tree(), {})["head"]["G_WD"] == P()
    assert jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(tree())
    adam = shapes.specs(state(), RULES)[0]
    assert adam.mu == adam.nu == specs and adam.count == P()
    counts = {"count": np.zeros(()), "blocks": {"step": 0}}
    assert shapes.specs(counts, RULES) == {"count": P(), "blocks": {"step": P()}}


def test_a_mesh_axis_shards_one_dimension_of_a_leaf_at_most():
    """The first letter with a rule gets the axis. If a rule has several axes, a letter gets the first free one."""
    rules = dict.fromkeys("MHNKDFWCP", "data") | {"K": "tensor"}
    for spec in jax.tree.leaves(shapes.specs(tree(class_token=True), rules), is_leaf=lambda x: isinstance(x, P)):
        axes = [axis for axis in spec if axis is not None]
        assert len(axes) == len(set(axes)) and spec[0] == "data"
    assert shapes.specs({"U_HKD": 0}, {"H": "x", "K": "x", "D": "y"}) == {"U_HKD": P("x", None, "y")}
    specs = shapes.specs({"W_FD": 0, "b_F": 0}, {"F": ("x", "y"), "D": ("x", "y")})
    assert specs == {"W_FD": P("x", "y"), "b_F": P("x")}


# Matrices and counts


def test_is_matrix_for_every_leaf_of_a_model():
    leaves = {*shapes.flat(tree(class_token=True)), "head/G_CD", "head/b_C", "embed/W_DP", "embed/b_D", "0/count"}
    matrices = "blocks/mlp/W1_FD blocks/mlp/W2_DF blocks/score/Uk_HKD blocks/score/Uq_HKD blocks/value/Uo_HDK"
    matrices += " blocks/value/Uv_HKD embed/E_WD embed/W_DP head/G_CD head/G_WD position/P_ND"
    assert {name for name in leaves if shapes.is_matrix(name)} == set(matrices.split()) and len(leaves) > 20


def test_total_counts_numbers():
    assert shapes.total({"a_H": np.zeros(3), "b": {"c_HK": np.zeros((3, 5)), "count": np.zeros(())}}) == 19
    assert shapes.total({}) == 0
