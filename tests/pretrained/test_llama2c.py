"""Files of llama2.c: every tensor by its name and in its shape, and nothing read that does not fit."""

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
