"""What is written for others is what we have: every setting of a model, and where its text ends."""

import json

import jax
import numpy as np
import pytest

from configs import base
from experiments import export
from experiments import model as models
from experiments.engine import checkpoint, errors, trained
from experiments.engine import config as settings
from experiments.engine.pretrained import settings as table
from tfm import embed, head
from tfm import mask as masks

W, N, Y, X, Z, C = 23, 13, 6, 4, 1, 3
WORDS_BN = np.random.default_rng(1).integers(0, W, (2, 11))
SEGMENT_BN = (np.arange(11)[None] >= np.array([[5], [2]])).astype(int)
IMAGE_BYXZ = np.random.default_rng(2).standard_normal((2, Y, X, Z)).astype(np.float32)
SMALL = {"model.M": 2, "model.D": 24, "model.H": 2, "model.F": 7, "model.unroll": 1, "text.N": N}
BERT = {"text.objective": "masked", "text.transform": True, "model.segments": 2, "model.block": "post_norm"}
LLAMA = {"model.norm": "rms", "model.mlp": "swiglu", "model.position": "none", "model.relation": "rotary"}
RUNS = {
    "gpt2": SMALL | {"experiment": "language"},
    "bert": SMALL | {"experiment": "language", "model.embed_norm": True, "model.final_norm": False} | BERT,
    "vit": SMALL | {"experiment": "vision", "image.head": "class_token"},
    "llama": SMALL | {"experiment": "language", "model.bias": False} | LLAMA,
}
# For each field, values of which at least one is another than a family's.
OTHERS = {
    "model.M": [3],
    "model.D": [32],  # and K with it
    "model.H": [4],
    "model.K": [6],
    "model.F": [9],
    "model.score": ["tied", "tied_noself", "symmetric_init", "asymmetric_std", "pairwise"],
    "model.score_std": [0.5],
    "model.output_std": [0.0],
    "model.diagonal": ["exclude"],
    "model.scale": ["1/sqrt(D)", "1"],
    "model.value": ["full_rank", "identity"],
    "model.norm": ["token", "token_plain", "rms", "batch", "instance"],
    "model.eps": [0.1],
    "model.mlp": ["relu", "gelu", "gelu_tanh", "two_hidden_gelu", "swiglu"],
    "model.position": ["learned", "sinusoidal", "learned_concatenated", "sinusoidal_concatenated", "none"],
    "model.relation": ["none", "rotary", "rotary_halves", "relative", "buckets", "alibi"],
    "model.rotary_base": [50.0],
    "model.window": [3],
    "model.block": ["pre_norm", "post_norm"],
    "model.final_norm": [True, False],
    "model.embed_norm": [True, False],
    "model.segments": [0, 1],
    "model.bias": [True, False],
    "model.dropout": [0.5],
    "model.attention": ["blockwise", "fused"],
    "model.compute_dtype": ["bfloat16"],
    "model.remat": [True],
    "model.unroll": [2],
    "text.source": ["docstrings"],
    "text.tokenizer": ["characters"],
    "text.N": [12],
    "text.objective": ["causal", "prefix", "masked"],
    "text.prefix": [3],
    "text.mask_rate": [0.5],
    "text.tied_output": [True],
    "text.transform": [True, False],
    "image.source": ["mnist"],
    "image.patch": [1],
    "image.head": ["pooled"],
    "image.hide": [0.5],
    "image.shift": [1.0],
}
UNUSED = {"language": "image.", "vision": "text."}


def config_of(family: str, **changed):
    """The config of a small run that the family has, with these changes."""
    made = base.get_config()
    made.update_from_flattened_dict(RUNS[family] | changed)
    return made


def model_of(config) -> models.Model:
    """Our model, as the experiment makes it."""
    if config.experiment == "vision":
        sizes = {"Y": Y, "X": X, "Z": Z, "patch": config.image.patch, "C": C}
        return models.vision(config.model, answer=config.image.head, **sizes)
    t = config.text
    facts = {"W": W, "N": t.N, "tied_output": t.tied_output, "transform": t.transform}
    return models.language(config.model, answer=head.next_word, **facts)


def logits(model: models.Model, params, fields, kind: str, patch: int = 0) -> np.ndarray:
    if kind == "image":
        inputs, who = embed.cut(IMAGE_BYXZ, size=patch), None
    else:
        inputs = {"w_BN": WORDS_BN, "segment_BN": SEGMENT_BN} if fields.segments > 1 else WORDS_BN
        who = None if kind == "masked" else masks.causal
    return np.asarray(model.apply(params, inputs, mask=models.masked(fields, who))[0])


def ours(config, params) -> np.ndarray:
    """The logits of the run's own model."""
    kind = "image" if config.experiment == "vision" else config.text.objective
    return logits(model_of(config), params, config.model, kind, config.image.patch)


def read_again(folder) -> np.ndarray:
    """Those of what was written."""
    made = trained.open(str(folder))
    fields = trained.fields(made, base.get_config().model.to_dict())
    if made.kind == "image":
        model = models.vision(fields, Y=Y, X=X, **made.facts)
        return logits(model, made.params, fields, "image", made.facts["patch"])
    return logits(models.language(fields, answer=head.next_word, **made.facts), made.params, fields, made.kind)


def drawn(config) -> dict:
    """Parameters as large as trained ones; the same tree gets the same numbers."""
    tree, rng = jax.eval_shape(model_of(config).init, jax.random.key(0)), np.random.default_rng(0)
    return jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape, np.float32), tree)


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """A function from a config and parameters to the folder in which `export` has written the run that has them."""
    run, count = tmp_path / "run", iter(range(999))
    run.mkdir()
    like = {"image": [Y, X, Z], "values": [0.0, 1.0], "mean": [0.5], "std": [0.5], "classes": ["a", "b", "c"]}
    (run / "data.json").write_text(json.dumps(like))
    monkeypatch.setattr(checkpoint, "newest", lambda folder: 1)

    def write(family, config, params):
        (run / "config.json").write_text(json.dumps({"config": config.to_dict()}))
        monkeypatch.setattr(checkpoint, "parameters", lambda *_: params)
        folder = tmp_path / str(next(count))
        asked = base.get_config()
        asked.checkpoint, asked.family = str(run), family
        export.run(settings.Settings(asked, defaults=base.get_config()), folder)
        return folder

    write.run = run
    return write


def near(found, right, share: float = 1e-5) -> None:
    assert found.shape == right.shape and np.abs(found - right).max() < share * np.ptp(right)


def test_every_setting_has_its_row():
    config = base.get_config()
    named = {f"{section}.{field}" for section in ("model", "text", "image") for field in config[section].keys()}
    assert named == OTHERS.keys() and table.ROWS.keys() == set(config.model.keys())
    assert {len(row) for row in table.ROWS.values()} == {len(table.COLUMNS)} == {len(trained.KINDS)}


ALWAYS = "M D H F score score_std output_std eps dropout attention compute_dtype remat unroll"
TAKEN = {  # the fields of which a family takes another value than that of its run above
    "gpt2": f"{ALWAYS} scale mlp rotary_base",
    "bert": f"{ALWAYS} segments rotary_base",
    "vit": f"{ALWAYS} mlp rotary_base",
    "llama": f"{ALWAYS} K relation rotary_base",
}
TEXT = {"text.source", "text.tokenizer", "text.N", "text.prefix", "text.mask_rate", "text.tied_output"}
IMAGE = {"image.source", "image.patch", "image.hide", "image.shift"}


def others(family: str):
    """(field, config) for every field and value that is another one."""
    for name, values in OTHERS.items():
        section, field = name.split(".")
        config = config_of(family)
        if section != {"language": "image", "vision": "text"}[config.experiment]:
            different = [value for value in values if value != config[section][field]]
            yield from ((name, config_of(family, **{name: value})) for value in different)


@pytest.mark.parametrize("family", RUNS)
def test_every_setting_is_written_or_refused_by_its_name(exported, family):
    """Each value alone is refused or taken; what is taken then holds, all of it at once, in the logits."""
    taken = {}
    for name, config in others(family):
        try:
            exported(family, config, drawn(config))
        except errors.UserError as error:
            assert name in str(error) or name == "text.objective" and "is needed here" in str(error), error
        else:
            section, field = name.split(".")
            taken.setdefault(name, []).append(config[section][field])
    expected = {f"model.{field}" for field in TAKEN[family].split()} | (IMAGE if family == "vit" else TEXT)
    assert taken.keys() == expected
    narrow = taken.pop("model.compute_dtype")
    for which in (0, -1):
        config = config_of(family, **{name: values[which] for name, values in taken.items()})
        params = drawn(config)
        folder = exported(family, config, params)
        near(read_again(folder), ours(config, params))
    config.model.compute_dtype = narrow[0]
    assert (exported(family, config, params) / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()
    near(read_again(folder), ours(config, params), share=0.03)
