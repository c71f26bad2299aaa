"""Low-rank adapters: effective weights against loops over the matrices, and on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.devices import mesh as meshes
from tfm import lora, shapes

M, L, ALPHA = 2, 3, 5.0
SIZES = {"M": M, "H": 4, "G": 2, "K": 5, "D": 6, "F": 10, "W": 14}
MATRICES = {  # path of a matrix: the product of A and B
    "embed/E_WD": "DL,WL->WD",
    "blocks/score/Uq_HKD": "MDL,MHKL->MHKD",
    "blocks/score/Uk_GKD": "MDL,MGKL->MGKD",
    "blocks/score/P_HKK": "MHjL,MHkL->MHkj",
    "blocks/value/Uo_HDK": "MHKL,MDL->MHDK",
    "blocks/value/V_HDD": "MHeL,MdL->MHde",
    "blocks/mlp/W1_FD": "MDL,MFL->MFD",
    "blocks/mlp/W2_DF": "MFL,MDL->MDF",
}
OTHER_PATHS = ("blocks/mlp/b1_F", "blocks/mlp/Wg_FD")  # without adapters


def draw_tree(names) -> dict:
    """Draw normal numbers at these paths."""
    rng, nodes = np.random.default_rng(0), {}
    for path in names:
        *parents, name = path.split("/")
        node = functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, nodes)
        node[name] = rng.standard_normal([SIZES[x] for x in shapes.letters(path)], np.float32)
    return nodes


INIT = functools.partial(lora.init, rank=L, select=MATRICES.__contains__)


def make_adapters() -> tuple[dict, dict]:
    """Return (parameters, parameters with adapters). The matrices B of the adapters are not zero."""
    params, rng = draw_tree((*MATRICES, *OTHER_PATHS)), np.random.default_rng(2)
    new = jax.eval_shape(INIT, jax.random.key(1), params)
    return params, params | {"lora": jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), new["lora"])}


def test_an_effective_weight_is_its_matrix_plus_the_product_of_its_adapter():
    params, new = make_adapters()
    result, originals = (shapes.flat(one) for one in (jax.jit(functools.partial(lora.merge, alpha=ALPHA))(new), params))
    assert result.keys() == originals.keys()
    for path, W in originals.items():
        A_and_B = [leaf for name, leaf in sorted(shapes.flat(new["lora"]).items()) if name.startswith(path + "/")]
        change = np.einsum(MATRICES[path], *A_and_B) if path in MATRICES else 0
        np.testing.assert_allclose(result[path], W + ALPHA / L * change, rtol=1e-5, atol=1e-5, err_msg=path)


def test_new_adapters_change_nothing_and_have_the_initial_values_of_the_paper():
    params = draw_tree(["blocks/score/P_HKK", "blocks/value/Uo_HDK", "blocks/mlp/W2_DF"])

    @jax.jit
    def compute(params):
        new = INIT(jax.random.key(1), params)
        return new, lora.merge(new, alpha=ALPHA)

    new, merged = jax.device_get(compute(params))
    shapes.check(new)
    jax.tree.map(np.testing.assert_array_equal, merged, params)
    sides = shapes.flat(new["lora"])
    assert {name.split("/")[-1] for name in sides if "/W2" in name} == {"A_FL", "B_DL"}
    A_HKL = sides["blocks/value/Uo_HDK/A_HKL"]  # 20 inputs, 2 x 20 x 3 draws
    assert abs(np.std(A_HKL) * np.sqrt(20) - 1) < 0.2
    assert not np.allclose(A_HKL[:, :1], sides["blocks/score/P_HKK/A_HKL"][:, :1])


def test_sharded_adapters_have_the_effective_weights_and_gradients_of_one_device():
    """F of W1_FD and D of its A_DL are sharded, so their shapes would not fit without a gather."""
    (_, new), devices = make_adapters(), meshes.make(fsdp=2, tensor=2)
    layout = meshes.layout(devices)
    specs = shapes.specs(new, layout.rules)
    merge = functools.partial(lora.merge, alpha=ALPHA)
    merged_specs = {name: node for name, node in specs.items() if name != "lora"}
    sharded = functools.partial(merge, layout=layout)
    sharded = meshes.sharded(sharded, devices, in_specs=(specs,), out_specs=merged_specs)

    def total(merge, params):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(merge(params)))

    totals = [jax.value_and_grad(functools.partial(total, function)) for function in (sharded, merge)]
    result, expected = jax.device_get(jax.jit(lambda params: [compute(params) for compute in totals])(new))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), result, expected)
