"""Low-rank adapters: effective weights against loops, one matrix after the other, and on devices that share them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.engine import mesh
from tfm import lora, shapes

M, L, ALPHA = 2, 3, 5.0
SIZES = {"M": M, "H": 4, "G": 2, "K": 5, "D": 6, "F": 10, "W": 14}
# A matrix, and the letters of its outputs, its inputs and its copies
KINDS = {
    "embed/E_WD": "W D ",
    "blocks/score/Uq_HKD": "HK D ",
    "blocks/score/Uk_GKD": "GK D ",
    "blocks/score/P_HKK": "K K H",
    "blocks/value/Uo_HDK": "D HK ",
    "blocks/value/V_HDD": "D HD ",
    "blocks/mlp/W1_FD": "F D ",
    "blocks/mlp/W2_DF": "D F ",
}
OTHERS = ("blocks/mlp/b1_F", "blocks/mlp/Wg_FD")  # not chosen


def tree(names) -> dict:
    """Draw normal numbers at these paths."""
    rng, nodes = np.random.default_rng(0), {}
    for path in names:
        *rooms, name = path.split("/")
        node = functools.reduce(lambda node, room: node.setdefault(room, {}), rooms, nodes)
        node[name] = rng.standard_normal([SIZES[x] for x in shapes.letters(path)], np.float32)
    return nodes


def adapted() -> tuple[dict, dict]:
    """Return the tree of all kinds, and the tree with adapters, whose B are not zeros."""
    params = tree((*KINDS, *OTHERS))
    new = lora.init(jax.random.key(1), params, rank=L, chosen=KINDS.__contains__)
    rng = np.random.default_rng(2)
    drawn = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), new["lora"])
    return params, new | {"lora": drawn}


def by_hand(path: str, W: np.ndarray, A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Return W + (alpha / r) B A in float64, one copy of the matrix after the other, each as outputs x inputs."""
    outputs, inputs, copies = KINDS[path].split(" ")
    letters, result = shapes.letters(path).removeprefix("M"), np.array(W, np.float64)
    for at in np.ndindex(*[SIZES[x] for x in ("M" if path.startswith("blocks") else "") + copies]):
        own = W[at].astype(np.float64)
        rest = letters.removeprefix(copies)
        # V_HDD: the first D is of the outputs
        order = [rest.index(x) for x in outputs] + [len(rest) - 1 - rest[::-1].index(x) for x in inputs]
        matrix = own.transpose(order)
        rows = matrix.reshape(int(np.prod([SIZES[x] for x in outputs])), -1)
        change = B[at].reshape(-1, L).astype(np.float64) @ A[at].reshape(-1, L).astype(np.float64).T
        result[at] = (rows + ALPHA / L * change).reshape(matrix.shape).transpose(np.argsort(order))
    return result


def test_an_effective_weight_is_its_matrix_and_the_product_of_its_adapter():
    params, new = adapted()
    found, before = (shapes.flat(one) for one in (jax.jit(functools.partial(lora.merge, alpha=ALPHA))(new), params))
    assert found.keys() == before.keys()
    for path, W in before.items():
        sides = [leaf for name, leaf in sorted(shapes.flat(new["lora"]).items()) if name.startswith(path + "/")]
        wanted = by_hand(path, W, *sides) if path in KINDS else W
        np.testing.assert_allclose(found[path], wanted, rtol=1e-5, atol=1e-5, err_msg=path)


def test_new_adapters_change_nothing_and_begin_as_the_paper_says():
    params = tree(KINDS)
    new = jax.jit(lambda: lora.init(jax.random.key(1), params, rank=L, chosen=KINDS.__contains__))()
    shapes.check(new)
    jax.tree.map(np.testing.assert_array_equal, lora.merge(new, alpha=ALPHA), params)
    sides = shapes.flat(new["lora"])
    assert {name.split("/")[-1] for name in sides if "/W2" in name} == {"A_FL", "B_DL"}
    A_HKL = sides["blocks/value/Uo_HDK/A_HKL"]  # 20 inputs, 2 x 20 x 3 draws
    assert abs(np.std(A_HKL) * np.sqrt(20) - 1) < 0.2
    assert not np.allclose(A_HKL[:, :1], sides["blocks/score/P_HKK/A_HKL"][:, :1])


def test_devices_that_share_the_weights_make_the_same_effective_ones_and_gradients():
    """They share F of W1_FD and D of its A_DL: without a gather the shapes would not fit."""
    (_, new), devices = adapted(), mesh.make(fsdp=2, tensor=2)
    over = mesh.layout(devices)
    specs = shapes.specs(new, over.rules)
    merge = functools.partial(lora.merge, alpha=ALPHA)
    merged_specs = {name: node for name, node in specs.items() if name != "lora"}
    sharded = functools.partial(merge, layout=over)
    sharded = mesh.sharded(sharded, devices, in_specs=(specs,), out_specs=merged_specs)

    def total(merge, params):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(merge(params)))

    result, expected = (jax.jit(jax.value_and_grad(functools.partial(total, of)))(new) for of in (sharded, merge))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), result, expected)
