"""Published models: every tensor finds its place in our tree and back, and what does not fit is named."""

import json
import re

import jax
import numpy as np
import published
import pytest
from published import D, F, H, K, M, N, W

from experiments.engine import errors
from experiments.pretrained import hub, open_model, safetensors, warm_start
from tfm import embed


def refused(words: str):
    return pytest.raises(errors.UserError, match=words)


def again(folder, read: hub.Imported) -> dict[str, np.ndarray]:
    hub.write(folder, family=read.family, params=read.params, model=read.model, extras=read.extras)
    return safetensors.read(folder / "model.safetensors")


@pytest.mark.parametrize("family", ["gpt2", "gpt_bigcode", "bert", "vit", "llama"])
@pytest.mark.parametrize("prefixed", [True, False])
def test_there_and_back_is_bitwise(tmp_path, family, prefixed):
    arrays = published.tensors(family, prefix=None if prefixed else "")
    read = hub.read(published.save(tmp_path / "theirs", family, arrays))
    found, expected = again(tmp_path / "ours", read), published.tensors(family)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    second = hub.read(tmp_path / "ours")
    assert second.model == read.model and second.family == family
    jax.tree.map(np.testing.assert_array_equal, second.params, read.params)


def test_every_number_of_gpt2_stands_where_its_name_says(tmp_path):
    theirs = published.tensors("gpt2", prefix="")
    read = hub.read(published.save(tmp_path, "gpt2"))
    blocks = read.params["blocks"]
    rng = np.random.default_rng(0)
    for m, h, k, d, f in zip(*(rng.integers(0, n, 40) for n in (M, H, K, D, F)), strict=True):
        fused = theirs[f"h.{m}.attn.c_attn.weight"]
        for part, ours in enumerate((blocks["score"]["Uq_HKD"], blocks["score"]["Uk_HKD"], blocks["value"]["Uv_HKD"])):
            assert ours[m, h, k, d] == fused[d, part * H * K + h * K + k]
        for part, ours in enumerate((blocks["score"]["bq_HK"], blocks["score"]["bk_HK"], blocks["value"]["bv_HK"])):
            assert ours[m, h, k] == theirs[f"h.{m}.attn.c_attn.bias"][part * H * K + h * K + k]
        assert blocks["value"]["Uo_HDK"][m, h, d, k] == theirs[f"h.{m}.attn.c_proj.weight"][h * K + k, d]
        assert blocks["mlp"]["W1_FD"][m, f, d] == theirs[f"h.{m}.mlp.c_fc.weight"][d, f]
        assert blocks["mlp"]["W2_DF"][m, d, f] == theirs[f"h.{m}.mlp.c_proj.weight"][f, d]
    assert read.model["scale"] == "1/sqrt(K)" and read.model["mlp"] == "gelu_tanh"
    unscaled = published.save(tmp_path, "gpt2", scale_attn_weights=False, activation_function="gelu")
    assert {"scale": "1", "mlp": "gelu"}.items() <= hub.read(unscaled).model.items()
    assert read.params["head"] == {} and read.extras["tied_output"] and not read.extras["headless"]
    assert (read.extras["W"], read.extras["N"], read.extras["kind"]) == (W, N, "causal")
    three = "blocks/score/Uq_HKD, blocks/score/Uk_HKD, blocks/value/Uv_HKD"
    assert read.table.splitlines()[0].split() == ["theirs", "ours", "how"]
    for row in (["h.*.attn.c_attn.weight", three, "split in 3, transposed"], ["wte.weight", "embed/E_WD", "matched"]):
        assert row in [re.split("  +", line) for line in read.table.splitlines()]


def test_a_patch_is_read_in_the_order_in_which_we_cut_it(tmp_path):
    theirs = published.tensors("vit", prefix="")["embeddings.patch_embeddings.projection.weight"]
    read = hub.read(published.save(tmp_path, "vit"))
    image_BYXZ = np.random.default_rng(1).standard_normal((1, 15, 10, 2)).astype(np.float32)
    ours_BND = np.asarray(embed.cut(image_BYXZ, size=5)) @ read.params["embed"]["W_DP"].T
    for n in range(6):  # a convolution whose kernel is as large as its step
        piece_YXZ = image_BYXZ[0, 5 * (n // 2) : 5 * (n // 2) + 5, 5 * (n % 2) : 5 * (n % 2) + 5]
        np.testing.assert_allclose(ours_BND[0, n], np.einsum("dzyx,yxz->d", theirs, piece_YXZ), atol=1e-5)
    assert read.extras["class_names"] == ["cat", "dog", "owl"] and read.extras["image"] == (15, 10)


def test_known_buffers_and_copies_are_checked_and_named(tmp_path):
    arrays = published.tensors("gpt2")
    for m in range(M):
        arrays[f"transformer.h.{m}.attn.bias"] = np.tri(N, dtype=bool)[None, None]
        arrays[f"transformer.h.{m}.attn.masked_bias"] = np.float32(-1e4)
    arrays["lm_head.weight"] = arrays["transformer.wte.weight"]
    read = hub.read(published.save(tmp_path / "a", "gpt2", arrays))
    assert [re.split("  +", line) for line in read.table.splitlines()[-3:]] == [
        ["h.*.attn.bias", "the causal mask"],
        ["h.*.attn.masked_bias", "minus infinity"],
        ["lm_head.weight", "a copy of wte.weight"],
    ]
    wrong = {"lm_head.weight": arrays["transformer.wte.weight"] + 1}
    wrong |= {"transformer.h.1.attn.bias": np.ones((1, 1, N, N), bool), "transformer.h.0.attn.masked_bias": np.ones(1)}
    with refused("h.1.attn.bias is not the causal mask; h.0.*is not minus infinity; lm_head.* not a copy of wte"):
        hub.read(published.save(tmp_path / "b", "gpt2", arrays | wrong))
    untied = published.tensors("gpt2") | {"lm_head.weight": wrong["lm_head.weight"]}
    read = hub.read(published.save(tmp_path / "c", "gpt2", untied, tie_word_embeddings=False))
    np.testing.assert_array_equal(read.params["head"]["G_WD"], wrong["lm_head.weight"])
    assert again(tmp_path / "d", read).keys() == untied.keys()

    arrays = published.tensors("bert") | {"bert.embeddings.position_ids": np.arange(N)[None]}
    arrays["cls.predictions.decoder.weight"] = arrays["bert.embeddings.word_embeddings.weight"]
    arrays["cls.predictions.decoder.bias"] = arrays["cls.predictions.bias"]
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): array for name, array in arrays.items()}
    read = hub.read(published.save(tmp_path / "e", "bert", old))
    assert {"pooler", "next_sentence"} <= read.extras.keys() and "G_WD" not in read.params["head"]

    llama = published.tensors("llama")
    llama |= {f"model.layers.{m}.self_attn.rotary_emb.inv_freq": np.float32([1, 500000**-0.5]) for m in range(M)}
    assert hub.read(published.save(tmp_path / "g", "llama", llama)).model["relative_position"] == "rotary_halves:500000"
    with refused("inv_freq is not the rotary frequencies"):
        hub.read(published.save(tmp_path / "h", "llama", llama, rope_theta=10000.0))
    arrays["bert.embeddings.position_ids"] = np.arange(N)[None] + 2
    with refused("position_ids is not the numbers from 0"):
        hub.read(published.save(tmp_path / "f", "bert", arrays))


def test_a_poolers_weights_and_activation_are_kept(tmp_path):
    arrays = {name: array for name, array in published.tensors("vit").items() if not name.startswith("classifier")}
    rng = np.random.default_rng(3)
    arrays["vit.pooler.dense.weight"] = rng.standard_normal((D, D), np.float32)
    arrays["vit.pooler.dense.bias"] = rng.standard_normal(D, np.float32)
    for fields, activation in (({}, "tanh"), ({"pooler_act": "relu"}, "relu")):
        found = again(tmp_path / activation, hub.read(published.save(tmp_path / "a", "vit", arrays, **fields)))
        assert json.loads((tmp_path / activation / "config.json").read_text())["pooler_act"] == activation
        assert found.keys() == arrays.keys()
        for name in arrays:
            np.testing.assert_array_equal(found[name], arrays[name])


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    arrays = published.tensors("gpt2")
    del arrays["transformer.h.1.ln_2.bias"]
    arrays["transformer.wpe.weight"] = arrays["transformer.wpe.weight"][1:]
    arrays["score.weight"] = np.zeros((2, D), np.float32)
    arrays["transformer.ln_f.bias"] = np.zeros(D, np.int32)
    with refused("config.json describes: ") as error:
        hub.read(published.save(tmp_path / "a", "gpt2", arrays))
    told = str(error.value)
    assert f"h.1.ln_2.bias ({D},) is missing" in told and f"score.weight (2, {D}) is left over" in told
    assert f"wpe.weight has shape ({N - 1}, {D}) and not ({N}, {D})" in told
    assert "ln_f.bias holds no real numbers" in told
    with refused("h.2.attn.c_attn.weight .* is missing"):
        hub.read(published.save(tmp_path / "b", "gpt2", n_layer=3))
    with refused("h.1.*left over"):
        hub.read(published.save(tmp_path / "c", "gpt2", n_layer=1))
    with refused("twice"):
        both = published.tensors("gpt2") | published.tensors("gpt2", prefix="")
        hub.read(published.save(tmp_path / "d", "gpt2", both))


@pytest.mark.parametrize(
    ("family", "changed", "words"),
    [
        ("gpt2", {"model_type": "opt"}, "'opt' here: those known are gpt2, gpt_bigcode, bert, roberta"),
        ("gpt2", {"model_type": ["gpt2"]}, "those known are"),
        ("gpt2", {"activation_function": "mish"}, "activation_function = 'mish' is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("gpt2", {"n_head": 4}, "n_embd = 21 is not divisible by n_head = 4"),
        ("gpt2", {"n_layer": "2"}, "n_layer must be a whole number from 1, and is '2'"),
        ("gpt2", {"n_layer": 0}, "n_layer must be a whole number from 1, and is 0"),
        ("gpt2", {"n_layer": 10**12}, "1000000000000 layers are asked for, and there are 28 tensors"),
        ("gpt2", {"n_layer": 28}, "28 layers are asked for, and there are 28 tensors"),  # as many, and each has twelve
        ("gpt2", {"n_positions": 10**12}, "wpe.weight has shape .13, 21. and not .1000000000000, 21."),
        ("llama", {"num_attention_heads": 10**12}, "q_proj.weight has shape"),
        ("gpt2", {"layer_norm_epsilon": -1}, "layer_norm_epsilon must be a number from 0"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder = True"),
        ("bert", {"num_labels": 10**12}, "num_labels = 1000000000000 is not supported"),
        ("bert", {"model_type": "roberta", "max_position_embeddings": 2}, "= 2 leave none behind pad_token_id = 1"),
        ("vit", {"patch_size": [5, 3]}, "square patches"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling asks for the type 'longrope'"),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "of the type 'llama3' needs low_freq_factor"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": "8"}}, "factor must be a number from 0, and is '8'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0}}, "mscale = 1.0 is not"),
        (
            "llama",
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1},
            "in all layers or in none",
        ),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "type 'yarn'"),
        ("llama", {"sliding_window": 7}, "sliding_window = 7"),
        ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings = None is not supported .* only False or True"),
        ("vit", {"pooler_act": 3}, "pooler_act must be a text, and is 3"),
        ("llama", {"attention_bias": "yes"}, "attention_bias = 'yes'"),
        ("llama", {"hidden_act": "tanh"}, "hidden_act = 'tanh'"),
        ("llama", {"num_key_value_heads": 4}, "num_attention_heads = 6 is not divisible by num_key_value_heads = 4"),
        ("llama", {"tie_word_embeddings": True}, "lm_head.weight is not a copy of embed_tokens.weight"),
    ],
)
def test_a_setting_that_is_not_ours_is_refused_by_its_name(tmp_path, family, changed, words):
    with refused(words):
        hub.read(published.save(tmp_path, family, **changed))


def test_other_names_of_sizes_and_classes_that_nobody_named(tmp_path):
    other = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    fields = {other.get(name, name): n for name, n in published.CONFIGS["gpt2"].items()} | {"n_ctx": N + 1}
    folder = published.save(tmp_path / "gpt2", "gpt2")
    right = hub.read(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"} | fields))
    assert hub.read(folder).model == right.model
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "hidden_size": "7"} | fields))
    for labels in ({"id2label": None}, {"id2label": None, "num_labels": 3}):
        read = hub.read(published.save(tmp_path / "vit", "vit", **labels))
        assert read.extras["class_names"] == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_no_more_tokens_at_once_than_dynamic_positions_leave_as_they_are(tmp_path):
    made = open_model.open(published.save(tmp_path, "llama", rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert made.fields.relative_position == f"rotary_halves:500000:dynamic:2:{N}"
    with refused(f"takes {N} tokens at once: a longer text it reads and writes word by word"):
        made(np.zeros((1, N + 1), int))


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with refused(r"holds neither a run nor a published model \(config.json with model.safetensors, or a llama2c .bin"):
        hub.read(tmp_path)
    for name in ("pytorch_model.bin", "alone.pt"):  # said first, before the lack of config.json
        (tmp_path / name).write_bytes(b"\x80\x04.")
        for path, which in ((tmp_path, "pytorch_model.bin"), (tmp_path / name, name)):
            with refused(f"{which} is not read.*AutoModelForCausalLM"):
                hub.read(path)
    published.save(tmp_path, "gpt2")
    assert hub.read(tmp_path / "model.safetensors").family == "gpt2"
    for content, sentence in (
        ("{}", "config.json has no model_type, which must be one of gpt2, gpt_bigcode, bert, roberta"),
        ("{", "cannot be read as JSON"),
        ("[1]", "must hold an object"),
    ):
        (tmp_path / "config.json").write_text(content)
        with refused(sentence):
            hub.read(tmp_path)
    (tmp_path / "config.json").unlink()
    with refused("there is no .*config.json"):
        hub.read(tmp_path)


def test_what_is_none_of_the_family_is_not_written(tmp_path):
    read = hub.read(published.save(tmp_path / "a", "gpt2"))
    params, model = read.params, read.model

    def write(family="gpt2", params=params, model=model, extras=read.extras):
        hub.write(tmp_path / "b", family=family, params=params, model=model, extras=extras)

    for changes, sentence in (
        ({"block": "post_norm"}, "model.block is 'post_norm' and not 'pre_norm'"),
        ({"scale": "1/sqrt(D)"}, "model.scale is '1/sqrt\\(D\\)' and not"),
        ({"mlp": "swiglu"}, "model.mlp is 'swiglu' and not 'gelu' or 'gelu_tanh' or 'relu'"),
        ({"D": 22}, "model.D is 22 and not 21"),
        ({"own": 1}, "model.own is not known here, nor whether a gpt2 has it"),
    ):
        with refused(sentence):
            write(model=model | changes)
    with refused("model.norm is missing"):
        write(model={name: value for name, value in model.items() if name != "norm"})
    with refused("blocks/mlp/b1_F is missing; blocks/mlp/Wg_FD is left over"):
        mlp = {("Wg_FD" if name == "b1_F" else name): leaf for name, leaf in params["blocks"]["mlp"].items()}
        write(params=params | {"blocks": params["blocks"] | {"mlp": mlp}})
    with refused("D is 1 in head/G_WD"):
        write(params=params | {"head": {"G_WD": np.zeros((W, 1))}})
    with refused("no family of models 'opt' here"):
        write(family="opt")
    vit, llama = (hub.read(published.save(tmp_path / name, name)) for name in ("vit", "llama"))
    with refused("cannot be written as vit without extras\\['Z'\\]"):
        write("vit", vit.params, vit.model, {})
    with refused("cannot be written as llama without extras\\['N'\\]"):
        write("llama", llama.params, llama.model, {})
    with refused("N is 7 and not 5"):
        write("vit", vit.params, vit.model, vit.extras | {"image": (10, 10)})
    assert not (tmp_path / "b").exists()
    (tmp_path / "b").write_text("a file")
    with refused("b cannot be written"):
        write()


def test_positions_are_cut_or_stretched():
    P_ND = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    np.testing.assert_array_equal(warm_start.resize(P_ND, 2, "cut"), P_ND[:2])
    for new in (3, 11):
        found = warm_start.resize(P_ND, new, "linear")
        slow = [np.interp(np.arange(new) * 4 / (new - 1), np.arange(5), P_ND[:, d]) for d in range(3)]
        np.testing.assert_allclose(found, np.stack(slow, 1), atol=1e-6)
        assert found.dtype == np.float32


@pytest.mark.parametrize("new", [2, 7])
@pytest.mark.parametrize("first", [0, 1])
def test_a_grid_of_patches_is_resized_between_their_centres(new, first):
    P_ND = np.random.default_rng(0).standard_normal((first + 25, 3)).astype(np.float32)
    found = warm_start.resize(P_ND, first + new * new, "grid")
    np.testing.assert_array_equal(found[:first], P_ND[:first])
    grid, place = P_ND[first:].reshape(5, 5, 3), (np.arange(new) + 0.5) * 5 / new - 0.5
    rows = np.stack([[np.interp(place, np.arange(5), grid[:, x, d]) for d in range(3)] for x in range(5)])  # X, D, new
    slow = np.stack([[np.interp(place, np.arange(5), rows[:, d, y]) for d in range(3)] for y in range(new)])
    np.testing.assert_allclose(found[first:], slow.swapaxes(1, 2).reshape(-1, 3), atol=1e-6)
    assert warm_start.resize(P_ND, first + new * new + 1 - 2 * first, "grid") is None
