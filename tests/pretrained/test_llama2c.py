"""Files of llama2.c: every tensor has its name and shape, and an invalid file is refused."""

import pathlib

import numpy as np
import pytest
from errors import raises

from experiments.data import pretrained_tokenizer
from experiments.engine import errors
from experiments.pretrained import llama2c, open_model
from experiments.tools import export

M, D, F, H, G, W, N = 3, 28, 11, 14, 7, 13, 5  # K = D / H = 2
LAYER_NAMES = {  # {name in llama2.c: name in transformers}
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


def make_arrays(is_tied: bool, H: int = H, G: int = G) -> dict[str, np.ndarray]:
    """Return random arrays {name: array} in the order of the file format."""
    rng = np.random.default_rng(0)
    shapes = {"embedding": (W, D), "rms_att": (M, D), "wq": (M, D, D), "wk": (M, D // H * G, D)}
    shapes |= {"wv": (M, D // H * G, D), "wo": (M, D, D), "rms_ffn": (M, D), "w1": (M, F, D), "w2": (M, D, F)}
    shapes |= {"w3": (M, F, D), "rms_final": (D,), "cosines": (N, D // H // 2), "sines": (N, D // H // 2)}
    shapes |= {} if is_tied else {"output": (W, D)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(path: pathlib.Path, header, arrays: dict[str, np.ndarray] | None = None) -> pathlib.Path:
    path.write_bytes(np.array(header, "<i4").tobytes() + b"".join(array.tobytes() for array in (arrays or {}).values()))
    return path


def test_a_text_ends_at_its_end_token_and_at_the_start_of_another(tmp_path):
    model = open_model.open(str(write(tmp_path / "model.bin", (D, F, M, H, G, W, N), make_arrays(is_tied=True))))
    tokenizer = pretrained_tokenizer.Pieces([b"<unk>", b"<s>", b"</s>"], [0.0] * 3)
    assert open_model.list_end_ids(model, tokenizer) == [2, 1]
    assert export.token_ids(model) == {"bos_token_id": 1, "eos_token_id": [2, 1]}  # independent of the tokenizer


@pytest.mark.parametrize("is_tied", [True, False])
def test_every_tensor_has_its_name(tmp_path, is_tied):
    arrays = make_arrays(is_tied)
    numbers = (D, F, M, H, G, W, N)
    settings, tensors = llama2c.read(str(write(tmp_path / "a.bin", (D, F, M, H, G, W if is_tied else -W, N), arrays)))
    assert tuple(settings.values()) == (*numbers, 1e-5, 10_000.0, is_tied)
    assert list(settings) == [*llama2c.HEADER, "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
    names = {"model.embed_tokens.weight": arrays["embedding"], "model.norm.weight": arrays["rms_final"]}
    names |= {} if is_tied else {"lm_head.weight": arrays["output"]}
    for m in range(M):
        names |= {f"model.layers.{m}.{name}.weight": arrays[group][m] for group, name in LAYER_NAMES.items()}
    assert tensors.keys() == names.keys()
    for name, array in names.items():
        assert tensors[name].dtype == np.float32 and tensors[name].shape == array.shape
        np.testing.assert_array_equal(tensors[name], array)


@pytest.mark.parametrize(
    "header",
    [
        (D, F, M, H, G, W, N + 1),
        (D, F, M, H, G, -W, N),  # -W means separate output weights
        (D, 0, M, H, G, W, N),
        (2**31 - 1,) * 7,
        (D, F, M, H, G, W),
        (D, F, M, 4, 2, W, N),  # K = 28 / 4 is odd
    ],
)
def test_a_header_that_does_not_account_for_every_byte_is_refused(tmp_path, header):
    arrays = make_arrays(True, 4, 2) if header[3:5] == (4, 2) else make_arrays(is_tied=True)
    for content in (arrays, None):
        with raises(errors.UserError, "a.bin", "save_pretrained(DIR)"):
            llama2c.read(write(tmp_path / "a.bin", header, content))
    with raises(errors.UserError, "absent.bin"):
        llama2c.read(tmp_path / "absent.bin")
