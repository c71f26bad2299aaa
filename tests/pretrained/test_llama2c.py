"""Files of llama2.c: every tensor by its name and in its shape, nothing read that does not fit, and a real model."""

import os
import pathlib

import numpy as np
import pytest

from experiments.data import pretrained_tokenizer
from experiments.engine import errors
from experiments.pretrained import llama2c, open_model
from experiments.tools import export

M, D, F, H, G, W, N = 3, 28, 11, 14, 7, 13, 5  # K = D / H = 2
PER_LAYER = {  # their names -> those of transformers
    "rms_att": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "rms_ffn": "post_attention_layernorm",
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
}


def model(tied: bool, H: int = H, G: int = G) -> dict[str, np.ndarray]:
    """The values in the order of the format, each group by itself."""
    rng = np.random.default_rng(0)
    shapes = {"embedding": (W, D), "rms_att": (M, D), "wq": (M, D, D), "wk": (M, D // H * G, D)}
    shapes |= {"wv": (M, D // H * G, D), "wo": (M, D, D), "rms_ffn": (M, D), "w1": (M, F, D), "w2": (M, D, F)}
    shapes |= {"w3": (M, F, D), "rms_final": (D,), "cosines": (N, D // H // 2), "sines": (N, D // H // 2)}
    shapes |= {} if tied else {"output": (W, D)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(path: pathlib.Path, header, arrays: dict[str, np.ndarray] | None = None) -> pathlib.Path:
    path.write_bytes(np.array(header, "<i4").tobytes() + b"".join(array.tobytes() for array in (arrays or {}).values()))
    return path


def test_a_text_ends_with_s_and_where_another_begins(tmp_path):
    made = open_model.open(str(write(tmp_path / "model.bin", (D, F, M, H, G, W, N), model(tied=True))))
    words = pretrained_tokenizer.Pieces([b"<unk>", b"<s>", b"</s>"], [0.0] * 3)
    assert open_model.ends(made, words) == [2, 1]
    assert export.token_ids(made) == {"bos_token_id": 1, "eos_token_id": [2, 1]}  # whatever words lie beside it


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_has_its_name(tmp_path, tied):
    arrays = model(tied)
    numbers = (D, F, M, H, G, W, N)
    settings, tensors = llama2c.read(str(write(tmp_path / "a.bin", (D, F, M, H, G, W if tied else -W, N), arrays)))
    assert tuple(settings.values()) == (*numbers, 1e-5, 10_000.0, tied)
    assert list(settings) == [*llama2c.HEADER, "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
    names = {"model.embed_tokens.weight": arrays["embedding"], "model.norm.weight": arrays["rms_final"]}
    names |= {} if tied else {"lm_head.weight": arrays["output"]}
    for m in range(M):
        names |= {f"model.layers.{m}.{name}.weight": arrays[group][m] for group, name in PER_LAYER.items()}
    assert tensors.keys() == names.keys()
    for name, array in names.items():
        assert tensors[name].dtype == np.float32 and tensors[name].shape == array.shape
        np.testing.assert_array_equal(tensors[name], array)


@pytest.mark.parametrize(
    "header",
    [
        (D, F, M, H, G, W, N + 1),
        (D, F, M, H, G, -W, N),  # announces an output of its own
        (D, F, M, H, H, W, N),
        (D + H, F, M, H, G, W, N),
        (D, 0, M, H, G, W, N),
        (D, F, -M, H, G, W, N),
        (D, F, M, H, 0, W, N),
        (D, F, M, 0, G, W, N),
        (D, F, M, H, G, 0, N),
        (2**31 - 1,) * 7,
        (-(2**31),) * 7,
        (),
        (D, F, M, H, G, W),
    ],
)
def test_a_header_that_does_not_account_for_every_byte_is_refused(tmp_path, header):
    for arrays in (model(tied=True), None):
        with pytest.raises(errors.UserError, match=r"a.bin is not read.*save_pretrained\(DIR"):
            llama2c.read(write(tmp_path / "a.bin", header, arrays))


@pytest.mark.parametrize(("H", "G"), [(14, 4), (4, 2)])  # 4 does not divide 14; K = 28 / 4 is odd
def test_heads_that_no_model_has_are_refused_in_a_file_of_the_right_length(tmp_path, H, G):
    with pytest.raises(errors.UserError, match="a.bin is not read"):
        llama2c.read(write(tmp_path / "a.bin", (D, F, M, H, G, W, N), model(True, H, G)))


def test_a_file_of_another_length_or_none_is_refused(tmp_path):
    file = write(tmp_path / "a.bin", (D, F, M, H, G, W, N), model(tied=True))
    content = file.read_bytes()
    for damaged in (content[:-1], content[:-4], content[:28], content[:27], b"", content + b"\0", content + bytes(4)):
        file.write_bytes(damaged)
        with pytest.raises(errors.UserError, match="a.bin is not read"):
            llama2c.read(file)
    for path in (tmp_path, tmp_path / "absent.bin"):
        with pytest.raises(errors.UserError, match="is not there, or not a file"):
            llama2c.read(path)


def normed(x_ND: np.ndarray, gain_D: np.ndarray) -> np.ndarray:
    return x_ND / np.sqrt((x_ND**2).mean(-1, keepdims=True) + 1e-5) * gain_D


def turned(x_NHK: np.ndarray) -> np.ndarray:
    """The rotary position: feature pairs (2i, 2i+1) as complex numbers."""
    N, _, K = x_NHK.shape
    angle_NC = np.arange(N)[:, None] * 10_000.0 ** (-np.arange(0, K, 2) / K)
    turned_NHC = (x_NHK[..., ::2] + 1j * x_NHK[..., 1::2]) * np.exp(1j * angle_NC)[:, None]
    return np.stack([turned_NHC.real, turned_NHC.imag], -1).reshape(x_NHK.shape)


def likeliest(settings: dict, tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """The likeliest next word after each position."""
    D, H, G = (settings[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    N, K = len(ids), D // H
    x_ND = tensors["model.embed_tokens.weight"][ids]
    for m in range(settings["num_hidden_layers"]):
        w = {name: tensors[f"model.layers.{m}.{PER_LAYER[name]}.weight"] for name in PER_LAYER}
        n_ND = normed(x_ND, w["rms_att"])
        q_NHK = turned((n_ND @ w["wq"].T).reshape(N, H, K))
        k_SHK = np.repeat(turned((n_ND @ w["wk"].T).reshape(N, G, K)), H // G, 1)
        v_SHK = np.repeat((n_ND @ w["wv"].T).reshape(N, G, K), H // G, 1)
        A_HNS = np.exp(np.einsum("NHK,SHK->HNS", q_NHK, k_SHK) / np.sqrt(K)) * np.tril(np.ones((N, N)))
        A_HNS /= A_HNS.sum(-1, keepdims=True)
        x_ND = x_ND + np.einsum("HNS,SHK->NHK", A_HNS, v_SHK).reshape(N, D) @ w["wo"].T
        n_ND = normed(x_ND, w["rms_ffn"])
        gate_NF = n_ND @ w["w1"].T
        x_ND = x_ND + (gate_NF / (1 + np.exp(-gate_NF)) * (n_ND @ w["w3"].T)) @ w["w2"].T
    return (normed(x_ND, tensors["model.norm.weight"]) @ tensors["model.embed_tokens.weight"].T).argmax(-1)


def test_the_published_model_tells_its_story():
    folder = pathlib.Path(os.environ.get("TFM_DATA", "")) / "stories260K"
    if not os.environ.get("TFM_DATA") or not folder.is_dir():
        pytest.skip("TFM_DATA names no folder with stories260K")
    settings, tensors = llama2c.read(folder / "stories260K.bin")
    words = pretrained_tokenizer.read(folder / "tok512.bin")
    assert settings["tie_word_embeddings"] and settings["vocab_size"] == words.size == 512
    # Greedy decoding gives these ids, if each is the likeliest after those before it.
    story = (folder / "greedy.txt").read_text(encoding="utf-8").removesuffix("\n")
    ids = words.encode(story)
    assert ids[0] == words.bos and len(ids) == 201
    np.testing.assert_array_equal(likeliest(settings, tensors, ids)[:-1], ids[1:])
    assert words.decode(ids) == story == "".join(words.stream(ids))
    begun = words.encode("Once upon a time")
    np.testing.assert_array_equal(begun, ids[: len(begun)])
    assert "Once upon a time" + "".join(words.stream(ids[len(begun) :], after=begun)) == story
