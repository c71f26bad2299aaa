"""The block in four styles of docs/why.md: with equal weights, the four compute the same numbers."""

import pathlib
import re

import jax
import numpy as np
from flax import nnx
from transformers_models import torch

import tfm
from experiments.pretrained import open_model

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "why.md").read_text(encoding="utf-8")
W_BN = np.random.default_rng(0).integers(0, 65, (3, 17))


def run(name: str) -> dict:
    """Execute the block of this file on the page, and return its names."""
    names: dict = {}
    (block,) = re.findall(rf"^```python\n(# {name}\.py\n.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    exec(block, names)
    return names


def flatten(array: np.ndarray, *shape: int) -> "torch.Tensor":
    return torch.tensor(np.ascontiguousarray(array).reshape(*shape))


def test_the_four_styles_compute_the_same_numbers(tmp_path: pathlib.Path) -> None:
    theirs = run("in_transformers")["model"].eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
        expected_BNW = theirs(torch.tensor(W_BN)).logits.numpy()
    theirs.save_pretrained(tmp_path)
    params = open_model.open(tmp_path).params

    (call,) = re.findall(r"`(tfm\.language_model\(.*?)\)`", PAGE)
    _, apply = eval(f"{call}, tied_output=True)", {"tfm": tfm} | run("my_cosine"))
    logits_BNW, activations = apply(params, W_BN, look=("hidden",))
    np.testing.assert_allclose(logits_BNW, expected_BNW, atol=1e-5)
    unchanged_BNW = tfm.language_model(W=65, M=1, D=32, H=4, N=64, tied_output=True)[1](params, W_BN)
    assert np.abs(unchanged_BNW - expected_BNW).max() > 1

    x_BND = np.asarray(params["embed"]["E_WD"][W_BN] + params["position"]["P_ND"][: W_BN.shape[1]])
    y_BND = np.asarray(activations["hidden"][0])
    layer = jax.tree.map(lambda array: np.asarray(array[0]), params["blocks"])
    score, value, mlp = layer["score"], layer["value"], layer["mlp"]

    block = run("in_pytorch")["Block"](32, 4)
    states = {"out": (flatten(value["Uo_HDK"].transpose(1, 0, 2), 32, 32), value["bo_D"])}
    states["qkv"] = (
        torch.cat([flatten(array, 32, 32) for array in (score["Uq_HKD"], score["Uk_HKD"], value["Uv_HKD"])]),
        np.concatenate([array.ravel() for array in (score["bq_HK"], score["bk_HK"], value["bv_HK"])]),
    )
    states |= {"up": (mlp["W1_FD"], mlp["b1_F"]), "down": (mlp["W2_DF"], mlp["b2_D"])}
    states |= {name: (layer[name]["gain_D"], layer[name]["shift_D"]) for name in ("norm1", "norm2")}
    pairs = {f"{name}.{kind}": pair[i] for name, pair in states.items() for i, kind in enumerate(("weight", "bias"))}
    block.load_state_dict({name: torch.as_tensor(array) for name, array in pairs.items()})
    with torch.no_grad():
        np.testing.assert_allclose(block(torch.tensor(x_BND)).numpy(), y_BND, atol=1e-5)

    module = run("in_flax")["Block"](32, 4, rngs=nnx.Rngs(0))
    attention = module.attention
    kernels = [(attention.query, score["Uq_HKD"].transpose(2, 0, 1), score["bq_HK"])]
    kernels.append((attention.key, score["Uk_HKD"].transpose(2, 0, 1), score["bk_HK"]))
    kernels.append((attention.value, value["Uv_HKD"].transpose(2, 0, 1), value["bv_HK"]))
    kernels.append((attention.out, value["Uo_HDK"].transpose(0, 2, 1), value["bo_D"]))
    kernels += [(module.up, mlp["W1_FD"].T, mlp["b1_F"]), (module.down, mlp["W2_DF"].T, mlp["b2_D"])]
    for linear, kernel, bias in kernels:
        assert linear.kernel.shape == kernel.shape and linear.bias.shape == bias.shape
        linear.kernel[...], linear.bias[...] = kernel, bias
    for name in ("norm1", "norm2"):
        norm = getattr(module, name)
        norm.scale[...], norm.bias[...] = layer[name]["gain_D"], layer[name]["shift_D"]
    np.testing.assert_allclose(module(x_BND), y_BND, atol=1e-5)
