"""Names carry shapes: letters, the check, the layout over devices, and what weight decay calls a matrix."""

import cases
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tfm import head, shapes


def tree(**settings) -> dict:
    """The shapes of a whole model."""
    return jax.eval_shape(cases.model(**settings).init, jax.random.key(0))


def state() -> tuple:
    """The state of AdamW for the model above: named tuples in a tuple, with two copies of the parameter tree."""
    return jax.eval_shape(optax.adamw(1e-3).init, tree())


def paths(of) -> dict[str, tuple]:
    return {"/".join(shapes.names(path)): path for path, _ in jax.tree_util.tree_leaves_with_path(of)}


@pytest.mark.parametrize(
    ("path", "letters"),
    [
        ("Uq_HKD", "HKD"),
        ("blocks/score/Uq_HKD", "MHKD"),
        ("blocks/norm1/gain_D", "MD"),
        ("norm/gain_D", "D"),
        ("head/G_WD", "WD"),
        ("0/mu/blocks/mlp/W1_FD", "MFD"),
        ("count", ""),
        ("blocks/count", ""),
        ("blocks", ""),
        ("blocks_WD", "WD"),
        ("x_Wd", ""),
        ("a_B/c", ""),
        ("W1", ""),
        ("", ""),
    ],
)
def test_letters_of_strings(path, letters):
    assert shapes.letters(path) == letters


def test_letters_of_key_paths_are_those_of_strings():
    for of in (tree(), state()):
        for name, path in paths(of).items():
            assert shapes.letters(path) == shapes.letters(name), name


def test_letters_through_every_kind_of_key():
    key = jax.tree_util
    path = (
        key.SequenceKey(0),
        key.GetAttrKey("mu"),
        key.DictKey("blocks"),
        key.FlattenedIndexKey(3),
        key.DictKey("b_HK"),
    )
    assert shapes.letters(path) == "MHK"
    assert shapes.names(path)[:3] == ("0", "mu", "blocks")
    assert shapes.letters(()) == ""


def test_letters_through_the_state_of_an_optimiser():
    found = {name: shapes.letters(path) for name, path in paths(state()).items()}
    assert found["0/mu/blocks/score/Uq_HKD"] == "MHKD"
    assert found["0/nu/blocks/mlp/b1_F"] == "MF"
    assert found["0/mu/embed/E_WD"] == "WD"
    assert found["0/count"] == ""


def test_size():
    assert shapes.size("Uq_HKD", {"H": 2, "K": 3, "D": 5, "W": 7}) == (2, 3, 5)
    with pytest.raises(KeyError):
        shapes.size("Uq_HKD", {"H": 2, "K": 3})


def test_check_finds_the_size_of_every_letter():
    sizes = {letter: getattr(cases, letter) for letter in "MHNKDFW"}
    assert shapes.check(tree(class_token=True)) == sizes
    assert shapes.check(state()) == sizes


def test_check_names_both_leaves_that_disagree():
    wrong = {"a": {"U_HK": jnp.zeros((2, 3))}, "b": {"W_KD": jnp.zeros((5, 7))}}
    with pytest.raises(shapes.ShapeError, match="^K is 5 in b/W_KD but 3 in a/U_HK$"):
        shapes.check(wrong)
    with pytest.raises(shapes.ShapeError, match="^K is 2 in b/W_KD but 3 in a/U_HK$"):
        shapes.check({"a": {"U_HK": jnp.zeros((2, 3))}, "b": {"W_KD": jnp.zeros((2, 7))}})
    with pytest.raises(shapes.ShapeError, match="^K is 5 in a/U_KK but 3 in a/U_KK$"):
        shapes.check({"a": {"U_KK": jnp.zeros((3, 5))}})


@pytest.mark.parametrize("shape", [(2,), (2, 3, 5), ()])
def test_check_refuses_a_wrong_rank(shape):
    with pytest.raises(shapes.ShapeError, match=r"^a/U_HK has shape \(.*\), but its name asks for the axes 'HK'$"):
        shapes.check({"a": {"U_HK": jnp.zeros(shape)}})


def test_check_wants_the_layers_of_blocks():
    with pytest.raises(shapes.ShapeError, match="blocks/b_HK has shape .* asks for the axes 'MHK'"):
        shapes.check({"blocks": {"b_HK": jnp.zeros((2, 3))}})
    with pytest.raises(shapes.ShapeError, match="M is 5"):
        shapes.check({"blocks": {"a_H": jnp.zeros((3, 2)), "b_H": jnp.zeros((5, 2))}})


def test_a_shape_error_is_a_value_error():
    assert issubclass(shapes.ShapeError, ValueError)


# ------------------------------------------------------------------------------------------------------------- layout

RULES = {"D": "fsdp", "H": "tensor", "F": "tensor", "W": "tensor"}


def test_specs_follow_the_rules():
    specs = shapes.specs(tree(), RULES)
    assert specs["blocks"]["score"]["Uq_HKD"] == P(None, "tensor", None, "fsdp")
    assert specs["blocks"]["value"]["Uo_HDK"] == P(None, "tensor", "fsdp")
    assert specs["blocks"]["mlp"]["W2_DF"] == P(None, "fsdp", "tensor")
    assert specs["blocks"]["norm1"]["gain_D"] == P(None, "fsdp")
    assert specs["blocks"]["score"]["bq_HK"] == P(None, "tensor")
    assert specs["head"]["G_WD"] == P("tensor", "fsdp")
    assert shapes.specs(tree(), {})["head"]["G_WD"] == P()
    assert jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(tree())


def test_a_mesh_axis_shards_one_dimension_of_a_leaf_at_most():
    """The first that asks for it gets it, wherever it stands."""
    everything = dict.fromkeys("MHNKDFWCP", "data") | {"K": "tensor"}
    for spec in jax.tree.leaves(shapes.specs(tree(class_token=True), everything), is_leaf=lambda x: isinstance(x, P)):
        used = [axis for axis in spec if axis is not None]
        assert len(used) == len(set(used)) and "data" in used
        assert spec[0] == "data"
    assert shapes.specs({"U_HKD": 0}, {"H": "x", "K": "x", "D": "y"}) == {"U_HKD": P("x", None, "y")}


def test_a_leaf_without_letters_is_replicated():
    assert shapes.specs({"count": jnp.zeros(()), "blocks": {"step": 0}}, RULES) == {
        "count": P(),
        "blocks": {"step": P()},
    }


def test_the_state_of_an_optimiser_lies_as_its_parameters_do():
    adam = shapes.specs(state(), RULES)[0]
    assert adam.mu == adam.nu == shapes.specs(tree(), RULES)
    assert adam.count == P()


# ------------------------------------------------------------------------------------------------- matrices and counts


def test_is_matrix_for_every_leaf_of_a_model():
    names = {**paths(tree(class_token=True)), **paths(tree(head=head.pooled, outputs={"C": cases.C}))}
    assert {name for name, path in names.items() if shapes.is_matrix(path)} == {
        "blocks/mlp/W1_FD",
        "blocks/mlp/W2_DF",
        "blocks/score/Uk_HKD",
        "blocks/score/Uq_HKD",
        "blocks/value/Uo_HDK",
        "blocks/value/Uv_HKD",
        "embed/E_WD",
        "head/G_CD",
        "head/G_WD",
        "position/P_ND",
    }
    assert {name for name, path in names.items() if not shapes.is_matrix(path)} == {
        "blocks/mlp/b1_F",
        "blocks/mlp/b2_D",
        "blocks/norm1/gain_D",
        "blocks/norm1/shift_D",
        "blocks/norm2/gain_D",
        "blocks/norm2/shift_D",
        "blocks/score/bk_HK",
        "blocks/score/bq_HK",
        "blocks/value/bo_D",
        "blocks/value/bv_HK",
        "class/c_D",
        "head/b_C",
        "norm/gain_D",
        "norm/shift_D",
    }


def test_is_matrix_of_strings_and_scalars():
    assert shapes.is_matrix("embed/W_DP") and not shapes.is_matrix("embed/b_D") and not shapes.is_matrix("0/count")


def test_total_counts_numbers():
    assert shapes.total({"a_H": jnp.zeros(3), "b": {"c_HK": jnp.zeros((3, 5)), "count": jnp.zeros(())}}) == 19
    assert shapes.total({}) == 0
