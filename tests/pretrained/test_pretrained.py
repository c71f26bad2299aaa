"""Published models: every tensor is read into our tree and written back; tensors that do not fit are errors."""

import dataclasses
import json
import re

import jax
import numpy as np
import published
import pytest
from errors import raises
from published import D, F, H, K, M, N, W

from experiments.config import errors
from experiments.pretrained import hub, open_model, safetensors, trained, warm_start
from tfm import embed as embeds


def write_again(folder, model: trained.Trained, family: str) -> dict[str, np.ndarray]:
    hub.write(folder, model, family)
    return safetensors.read(folder / "model.safetensors")


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit", "llama"])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_reading_and_writing_back_is_bitwise(tmp_path, family, has_prefix):
    arrays = published.tensors(family, prefix=None if has_prefix else "")
    read = hub.read(published.save(tmp_path / "theirs", family, arrays))
    actual, expected = write_again(tmp_path / "ours", read, family), published.tensors(family)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)
    second = hub.read(tmp_path / "ours")
    assert second.model == read.model
    jax.tree.map(np.testing.assert_array_equal, second.params, read.params)


def test_every_number_of_gpt2_is_at_its_index_in_our_tree(tmp_path):
    arrays = published.tensors("gpt2", prefix="")
    read = hub.read(published.save(tmp_path, "gpt2"))
    score, value, mlp = (read.params["blocks"][stage] for stage in ("score", "value", "mlp"))
    rng = np.random.default_rng(0)
    for m, h, k, d, f in zip(*(rng.integers(0, n, 40) for n in (M, H, K, D, F)), strict=True):
        fused, fused_bias = (arrays[f"h.{m}.attn.c_attn.{name}"] for name in ("weight", "bias"))
        for part, leaf in enumerate((score["Uq_HKD"], score["Uk_HKD"], value["Uv_HKD"])):
            assert leaf[m, h, k, d] == fused[d, part * H * K + h * K + k]
        for part, leaf in enumerate((score["bq_HK"], score["bk_HK"], value["bv_HK"])):
            assert leaf[m, h, k] == fused_bias[part * H * K + h * K + k]
        assert value["Uo_HDK"][m, h, d, k] == arrays[f"h.{m}.attn.c_proj.weight"][h * K + k, d]
        assert mlp["W1_FD"][m, f, d] == arrays[f"h.{m}.mlp.c_fc.weight"][d, f]
        assert mlp["W2_DF"][m, d, f] == arrays[f"h.{m}.mlp.c_proj.weight"][f, d]
    assert read.model["scale"] == "1/sqrt(K)" and read.model["mlp"] == "gelu_tanh"
    unscaled = published.save(tmp_path, "gpt2", scale_attn_weights=False, activation_function="gelu")
    assert {"scale": "1", "mlp": "gelu"}.items() <= hub.read(unscaled).model.items()
    assert read.params["head"] == {} and read.facts["tied_output"] and not read.facts["headless"]
    assert (read.facts["W"], read.facts["N"], read.kind) == (W, N, "causal")
    three = "blocks/score/Uq_HKD, blocks/score/Uk_HKD, blocks/value/Uv_HKD"
    assert ["h.*.attn.c_attn.weight", three] in [re.split("  +", line) for line in read.table.splitlines()]


def test_a_patch_is_read_in_the_order_in_which_we_cut_it(tmp_path):
    kernel_DZYX = published.tensors("vit", prefix="")["embeddings.patch_embeddings.projection.weight"]
    read = hub.read(published.save(tmp_path, "vit"))
    image_BYXZ = np.random.default_rng(1).standard_normal((1, 15, 10, 2)).astype(np.float32)
    patch_BND = np.asarray(embeds.cut(image_BYXZ, size=5)) @ read.params["embed"]["W_DP"].T
    for n in range(6):  # a convolution with a stride as large as its kernel
        piece_YXZ = image_BYXZ[0, 5 * (n // 2) : 5 * (n // 2) + 5, 5 * (n % 2) : 5 * (n % 2) + 5]
        np.testing.assert_allclose(patch_BND[0, n], np.einsum("dzyx,yxz->d", kernel_DZYX, piece_YXZ), atol=1e-5)
    assert read.facts["class_names"] == ["cat", "dog", "owl"] and read.facts["image"] == (15, 10)


def test_buffers_are_skipped_and_copies_are_checked(tmp_path):
    arrays = published.tensors("gpt2")
    for m in range(M):
        arrays[f"transformer.h.{m}.attn.bias"] = np.tri(N, dtype=bool)[None, None]
    arrays["lm_head.weight"] = arrays["transformer.wte.weight"]
    read = hub.read(published.save(tmp_path / "a", "gpt2", arrays))
    assert "lm_head.weight" in read.table and "a copy of wte.weight" in read.table and "a buffer" in read.table
    arrays["lm_head.weight"] = arrays["lm_head.weight"] + 1
    with raises(errors.UserError, "lm_head.weight", "wte.weight"):
        hub.read(published.save(tmp_path / "b", "gpt2", arrays))
    read = hub.read(published.save(tmp_path / "c", "gpt2", arrays, tie_word_embeddings=False))
    np.testing.assert_array_equal(read.params["head"]["G_WD"], arrays["lm_head.weight"])
    assert "lm_head.weight" in write_again(tmp_path / "d", read, "gpt2")

    arrays = published.tensors("bert") | {"bert.embeddings.position_ids": np.arange(N)[None]}
    arrays["cls.predictions.decoder.weight"] = arrays["bert.embeddings.word_embeddings.weight"]
    arrays["cls.predictions.decoder.bias"] = arrays["cls.predictions.bias"]
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): array for name, array in arrays.items()}
    assert "G_WD" not in hub.read(published.save(tmp_path / "e", "bert", old)).params["head"]
    llama = published.tensors("llama")
    llama |= {f"model.layers.{m}.self_attn.rotary_emb.inv_freq": np.float32([1, 500000**-0.5]) for m in range(M)}
    assert hub.read(published.save(tmp_path / "g", "llama", llama)).model["relative_position"] == "rotary_halves:500000"


def test_a_poolers_weights_and_the_settings_of_a_missing_head_are_kept(tmp_path):
    for number, (family, fields, name, value) in enumerate(
        (
            ("vit", {}, "pooler_act", "tanh"),
            ("vit", {"pooler_act": "relu"}, "pooler_act", "relu"),
            ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings", False),
            ("bert", {"tie_word_embeddings": True}, "tie_word_embeddings", True),
        )
    ):
        arrays = {key: x for key, x in published.tensors(family).items() if not key.startswith(("classifier", "cls."))}
        if family == "vit":
            arrays["vit.pooler.dense.weight"] = np.random.default_rng(3).standard_normal((D, D), np.float32)
        folder = tmp_path / str(number)
        read = hub.read(published.save(folder / "a", family, arrays, **fields))
        actual = write_again(folder / "b", read, family)
        assert json.loads((folder / "b" / "config.json").read_text())[name] == value
        assert actual.keys() == arrays.keys()
        for key in arrays:
            np.testing.assert_array_equal(actual[key], arrays[key])


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    arrays = published.tensors("gpt2")
    del arrays["transformer.h.1.ln_2.bias"]
    arrays["transformer.wpe.weight"] = arrays["transformer.wpe.weight"][1:]
    arrays["score.weight"] = np.zeros((2, D), np.float32)
    shape = f"wpe.weight has shape ({N - 1}, {D}) and not ({N}, {D})"
    with raises(errors.UserError, f"h.1.ln_2.bias ({D},) is missing", f"score.weight (2, {D}) is left over", shape):
        hub.read(published.save(tmp_path / "a", "gpt2", arrays))
    for dtype in (np.int8, np.uint8, np.int32, bool):
        arrays = published.tensors("gpt2")
        arrays["transformer.wpe.weight"] = arrays["transformer.wpe.weight"].astype(dtype)
        with raises(errors.UserError, "wpe.weight has the type", np.dtype(dtype), "Quantised"):
            hub.read(published.save(tmp_path / "d", "gpt2", arrays))
    with raises(errors.UserError, "h.2.attn.c_attn.weight", "missing"):
        hub.read(published.save(tmp_path / "b", "gpt2", n_layer=3))
    with raises(errors.UserError, "h.1.", "left over"):
        hub.read(published.save(tmp_path / "c", "gpt2", n_layer=1))


@pytest.mark.parametrize(
    ("family", "fields", "parts"),
    [
        ("gpt2", {"model_type": "opt"}, ["model_type", "opt", "gpt2"]),
        ("gpt2", {"activation_function": "mish"}, ["activation_function", "mish"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx", "True"]),
        ("gpt2", {"n_head": 4}, ["D = 21", "H = 4"]),
        ("gpt2", {"n_layer": "2"}, ["n_layer", "'2'"]),
        ("gpt2", {"n_layer": 10**12}, ["1000000000000 layers"]),
        ("gpt2", {"layer_norm_epsilon": -1}, ["layer_norm_epsilon", "-1"]),
        ("bert", {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ("llama", {"text_config": {"quantization_config": {"quant_method": "fp8"}}}, ["quantization_config", "fp8"]),
        ("bert", {"position_embedding_type": "relative_key"}, ["position_embedding_type", "relative_key"]),
        ("bert", {"is_decoder": True}, ["is_decoder", "True"]),
        ("bert", {"model_type": "roberta", "max_position_embeddings": 2}, ["max_position_embeddings", "2"]),
        ("vit", {"patch_size": [5, 3]}, ["patch_size", "[5, 3]"]),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, ["rope_scaling", "longrope"]),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0}}, ["mscale", "1.0"]),
        ("llama", {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1}, ["sliding window"]),
        ("llama", {"sliding_window": 7}, ["sliding_window", "7"]),
        ("llama", {"attention_bias": "yes"}, ["attention_bias", "'yes'"]),
        ("llama", {"hidden_act": "tanh"}, ["hidden_act", "'tanh'"]),
        ("llama", {"num_key_value_heads": 4}, ["H = 6", "G = 4"]),
        ("llama", {"tie_word_embeddings": True}, ["lm_head.weight is not a copy of embed_tokens.weight"]),
    ],
)
def test_an_unsupported_setting_is_refused_by_its_name(tmp_path, family, fields, parts):
    with raises(errors.UserError, *parts):
        hub.read(published.save(tmp_path, family, **fields))


def test_dynamic_positions_limit_the_tokens_of_a_call(tmp_path):
    model = open_model.open(published.save(tmp_path, "llama", rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert model.fields.relative_position == f"rotary_halves:500000:dynamic:2:{N}"
    with raises(errors.UserError, f"{N} tokens"):
        model(np.zeros((1, N + 1), int))


@pytest.mark.parametrize("content", ["{}", "{", "[1]", None])
def test_a_folder_without_a_config_that_names_a_family_is_refused(tmp_path, content):
    published.save(tmp_path, "gpt2")
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with raises(errors.UserError, "model_type" if content == "{}" else "config.json"):
        hub.read(tmp_path)


def test_a_model_that_the_family_does_not_have_is_not_written(tmp_path):
    gpt2, vit, llama = (hub.read(published.save(tmp_path / name, name)) for name in ("gpt2", "vit", "llama"))
    without_norm = {name: value for name, value in gpt2.model.items() if name != "norm"}
    mlp = gpt2.params["blocks"]["mlp"]
    mlp = {name: leaf for name, leaf in mlp.items() if name != "b1_F"} | {"gain_D": mlp["b2_D"]}
    blocks = gpt2.params["blocks"] | {"mlp": mlp}
    for read, family, changes, parts in (
        (gpt2, "gpt2", {"model": gpt2.model | {"mlp": "swiglu"}}, ["model.mlp", "swiglu"]),
        (gpt2, "gpt2", {"model": gpt2.model | {"D": 22}}, ["model.D", "22", "21"]),
        (gpt2, "gpt2", {"model": gpt2.model | {"own": 1}}, ["model.own", "1"]),
        (gpt2, "gpt2", {"model": without_norm}, ["norm"]),
        (
            gpt2,
            "gpt2",
            {"params": gpt2.params | {"blocks": blocks}},
            ["b1_F (2, 19) is missing", "gain_D (2, 21) is left over"],
        ),
        (gpt2, "gpt2", {"params": gpt2.params | {"head": {"G_WD": np.zeros((W, 1))}}}, ["head/G_WD"]),
        (gpt2, "opt", {}, ["opt", "gpt2"]),
        (vit, "vit", {"facts": {}}, ["'Z'"]),
        (llama, "llama", {"facts": {}}, ["'N'"]),
        (vit, "vit", {"facts": vit.facts | {"image": (10, 10)}}, ["position/P_ND", "(7, 21)", "(5, 21)"]),
    ):
        with raises(errors.UserError, *parts):
            hub.write(tmp_path / "b", dataclasses.replace(read, **changes), family)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("new", [3, 11])
def test_positions_are_stretched(new):
    P_ND = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    actual = warm_start.resize(P_ND, new, "linear")
    slow = [np.interp(np.arange(new) * 4 / (new - 1), np.arange(5), P_ND[:, d]) for d in range(3)]
    np.testing.assert_allclose(actual, np.stack(slow, 1), atol=1e-6)
    assert actual.dtype == np.float32


@pytest.mark.parametrize("new", [2, 7])
@pytest.mark.parametrize("first", [0, 1])
def test_a_grid_of_patches_is_resized_between_their_centres(new, first):
    P_ND = np.random.default_rng(0).standard_normal((first + 25, 3)).astype(np.float32)
    actual = warm_start.resize(P_ND, first + new * new, "grid")
    np.testing.assert_array_equal(actual[:first], P_ND[:first])
    grid, place = P_ND[first:].reshape(5, 5, 3), (np.arange(new) + 0.5) * 5 / new - 0.5
    rows = np.stack([[np.interp(place, np.arange(5), grid[:, x, d]) for d in range(3)] for x in range(5)])  # X, D, new
    slow = np.stack([[np.interp(place, np.arange(5), rows[:, d, y]) for d in range(3)] for y in range(new)])
    np.testing.assert_allclose(actual[first:], slow.swapaxes(1, 2).reshape(-1, 3), atol=1e-6)
    assert warm_start.resize(P_ND, first + new * new + 1 - 2 * first, "grid") is None
