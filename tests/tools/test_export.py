"""What is written for others is what we have: every setting of a model, and where its text ends."""

import json
import types

import jax
import numpy as np
import published
import pytest
import tiny

from configs import base
from experiments import model as models
from experiments.engine import checkpoint, errors
from experiments.pretrained import families as table
from experiments.pretrained import hub, open_model, safetensors
from experiments.tools import export, sample
from tfm import embed, head
from tfm.attention import mask as masks

W, N, Y, X, Z, C = 23, 13, 6, 4, 1, 3
WORDS_BN = np.random.default_rng(1).integers(0, W, (2, 11))
SEGMENT_BN = (np.arange(11)[None] >= np.array([[5], [2]])).astype(int)
IMAGE_BYXZ = np.random.default_rng(2).standard_normal((2, Y, X, Z)).astype(np.float32)
SMALL = {"model.M": 2, "model.D": 24, "model.H": 2, "model.F": 7, "model.unroll": 1, "text.N": N}
BERT = {"text.objective": "masked", "text.transform": True, "model.segments": 2, "model.block": "post_norm"}
LLAMA = {"model.norm": "rms", "model.mlp": "swiglu", "model.position": "none", "model.relative_position": "rotary"}
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
    "model.relative_position": ["none", "rotary", "rotary_halves", "relative", "buckets", "alibi"],
    "model.rotary_base": [50.0],
    "model.window": [3],
    "model.block": ["pre_norm", "post_norm"],
    "model.final_norm": [True, False],
    "model.embed_norm": [True, False],
    "model.segments": [0, 1],
    "model.bias": [True, False],
    "model.dropout": [0.5],
    "model.attention": ["flash", "fused"],
    "model.compute_dtype": ["bfloat16"],
    "model.remat": [True],
    "model.unroll": [2],
    "text.source": ["docstrings"],
    "text.tokenizer": ["characters"],
    "text.N": [12],
    "text.objective": ["causal", "prefix", "masked"],
    "text.tied_output": [True],
    "text.transform": [True, False],
    "image.source": ["mnist"],
    "image.patch": [1],
    "image.head": ["pooled"],
    "image.shift": [1.0],
}
UNUSED = {"language": "image.", "vision": "text."}


def config_of(family: str, **changed):
    """The config of a small run that the family has, with these changes."""
    made = base.get_config(RUNS[family]["experiment"])
    own = {key: value for key, value in RUNS[family].items() if key.split(".")[0] in made}
    made.update_from_flattened_dict(own | changed)
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
    kind, patch = ("image", config.image.patch) if config.experiment == "vision" else (config.text.objective, 0)
    return logits(model_of(config), params, config.model, kind, patch)


def read_again(folder) -> np.ndarray:
    """Those of what was written."""
    made = open_model.open(str(folder))
    size = {"Y": Y, "X": X} if made.kind == "image" else {}
    return logits(made.network(**size), made.params, made.fields, made.kind, made.facts.get("patch", 0))


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
        export.run(run, family=family, workdir=folder)
        return folder

    write.run = run
    return write


def near(found, right, share: float = 1e-5) -> None:
    assert found.shape == right.shape and np.abs(found - right).max() < share * np.ptp(right)


def test_every_setting_has_its_row():
    config = base.get_config("vision")
    config = {"model": config.model, "image": config.image, "text": base.get_config("language").text}
    named = {f"{section}.{field}" for section in config for field in config[section].keys()}
    assert named == OTHERS.keys() and table.ROWS.keys() == set(config["model"].keys())
    assert {len(row) for row in table.ROWS.values()} == {len(hub.FAMILIES)} == {len(open_model.KINDS)}


FREE = "score_std output_std dropout attention compute_dtype remat unroll"
ALWAYS = {f"model.{field}": OTHERS[f"model.{field}"] for field in f"M D H F eps {FREE}".split()}
ALWAYS |= {"model.score": ["symmetric_init", "asymmetric_std"]}
TEXT = "source tokenizer N tied_output"
WORDS = ALWAYS | {f"text.{field}": OTHERS[f"text.{field}"] for field in TEXT.split()}
IMAGES = ALWAYS | {f"image.{field}": OTHERS[f"image.{field}"] for field in "source patch shift".split()}
BASE = {"model.rotary_base": [50.0]}
TAKEN = {  # the values of OTHERS that a family has beside those of its run above
    "gpt2": WORDS | BASE | {"model.scale": ["1"], "model.mlp": ["relu", "gelu_tanh"]},
    "bert": WORDS | BASE | {"model.segments": [1]},
    "vit": IMAGES | BASE | {"model.mlp": ["relu", "gelu_tanh"]},
    "llama": WORDS | BASE | {"model.K": [6], "model.relative_position": ["rotary_halves"]},
}


def others(family: str):
    """(field, config) for every field and value that is another one."""
    for name, values in OTHERS.items():
        section, field = name.split(".")
        config = config_of(family)
        if section != {"language": "image", "vision": "text"}[config.experiment]:
            different = [value for value in values if value != config[section][field]]
            yield from ((name, config_of(family, **{name: value})) for value in different)


def taken_together(family: str):
    """Two configs in which every field of TAKEN has another value than in the family's run, all computed in float32."""
    for which in (0, -1):
        values = {name: values[which] for name, values in TAKEN[family].items() if name != "model.compute_dtype"}
        yield config_of(family, **values)


@pytest.mark.parametrize("family", RUNS)
def test_every_setting_is_written_or_refused_by_its_name(exported, family):
    """Each value alone is refused or taken; those that are taken then hold, all at once, in the logits."""
    taken, drawn_once = {}, drawn(config_of(family))
    for name, config in others(family):
        section, field = name.split(".")
        fits = config[section][field] in TAKEN[family].get(name, ())
        try:  # what is refused is so by the config, whatever the parameters are
            exported(family, config, drawn(config) if fits else drawn_once)
        except errors.UserError as error:
            assert name in str(error) or name == "text.objective" and "is needed here" in str(error), error
        else:
            taken.setdefault(name, []).append(config[section][field])
    assert taken == TAKEN[family]
    for config in taken_together(family):
        params = drawn(config)
        folder = exported(family, config, params)
        near(read_again(folder), ours(config, params))
    config.model.compute_dtype = "bfloat16"
    near(read_again(exported(family, config, params)), ours(config, params), share=0.03)


@pytest.mark.parametrize("family", RUNS)
def test_transformers_reads_every_setting_that_is_written(exported, family):
    torch = pytest.importorskip("torch", reason="parity with PyTorch's models needs the extra [parity]")
    transformers = pytest.importorskip("transformers", reason="parity with its models needs the extra [parity]")
    for config in taken_together(family):
        params = drawn(config)
        folder = exported(family, config, params)
        kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
        model, told = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(told[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
        inputs = {"input_ids": torch.tensor(WORDS_BN)}
        if config.model.segments > 1:
            inputs["token_type_ids"] = torch.tensor(SEGMENT_BN)
        if family == "vit":
            inputs = {"pixel_values": torch.tensor(IMAGE_BYXZ).permute(0, 3, 1, 2)}
        with torch.no_grad():
            near(model.eval()(**inputs).logits.numpy(), ours(config, params))


# Where a text ends.

LETTERS = "abcdefghijklmnopqrstuvw"  # of 23 words


def published_with_words(folder, family="gpt2", generation=None, **fields):
    """A published model whose words are letters; fields: of its config.json."""
    published.save(folder, family, **fields)
    (folder / "tokenizer.json").write_text(json.dumps({"kind": "characters", "characters": LETTERS, "specials": []}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def gained(folder) -> str:
    """What the model greedily says after a letter."""
    outcome = tiny.command(sample, checkpoint=folder, prompt="a", temperature=0.0)
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out.removesuffix("\n").removeprefix("a")


def test_a_text_ends_where_the_files_of_its_model_say(tmp_path):
    whole = gained(published_with_words(tmp_path, "llama"))
    ends = [LETTERS.index(whole[7]), LETTERS.index(whole[4])]
    assert 0 < whole.index(whole[4]) < whole.index(whole[7])
    folder = published_with_words(tmp_path, "llama", {"eos_token_id": ends}, eos_token_id=LETTERS.index(whole[0]))
    assert gained(folder) == whole[: whole.index(whole[4])]


@pytest.mark.parametrize(
    ("said", "generation", "ends"),
    [
        (None, None, [4, 3]),  # as the words say, and the beginning of another text ends one too
        (5, None, [5]),
        ([7, 5, 7], None, [7, 5]),
        (5, {}, [5]),
        (5, {"eos_token_id": None}, [5]),
        (5, {"eos_token_id": [6, 2]}, [6, 2]),
        (50256, None, [4, 3]),  # as transformers writes it whatever the number of words
        ([50256, 5], None, [5]),
    ],
)
def test_the_ids_that_end_a_text(tmp_path, said, generation, ends):
    made = open_model.open(str(published_with_words(tmp_path, generation=generation, eos_token_id=said)))
    words = types.SimpleNamespace(bos=3, eos=4)
    assert open_model.ends(made, words) == ends


@pytest.mark.parametrize("value", ["5", 5.0, True, -1, [], [5, "6"], [5, [6]], [5, -1], {"id": 5}])
def test_what_is_no_id_is_refused_in_a_sentence(tmp_path, value):
    def told(**fields):
        with pytest.raises(errors.UserError) as error:
            open_model.open(str(published_with_words(tmp_path, **fields)))
        return str(error.value)

    right = "eos_token_id must be the id of a token, a whole number from 0, or a list of such, and is "
    assert told(eos_token_id=value) == f"config.json: {right}{value!r}"
    assert told(generation={"eos_token_id": value}) == f"generation_config.json: {right}{value!r}"
    assert "bos_token_id must be the id of a token, a whole number from 0, and is [5]" in told(bos_token_id=[5])
    (published_with_words(tmp_path) / "generation_config.json").write_text("[5]")
    with pytest.raises(errors.UserError, match="generation_config.json must hold an object"):
        open_model.open(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "said", "kept"),
    [
        ("gpt2", {"bos_token_id": 1, "eos_token_id": [5, 6]}, {"pad_token_id": None}),
        ("llama", {"eos_token_id": 5, "pad_token_id": -1}, {"bos_token_id": None}),
        ("bert", {"pad_token_id": 3}, {}),
        ("vit", {}, {}),
    ],
)
def test_a_published_model_keeps_its_ids(tmp_path, family, said, kept):
    read = hub.read(published.save(tmp_path / "theirs", family, **said))
    more = {"params": read.params, "model": read.model, "extras": read.extras}
    files = hub.write(tmp_path / "ours", family=family, **more)
    assert sorted(files) == sorted(file.name for file in (tmp_path / "ours").iterdir())
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {name: written[name] for name in written if name.endswith("token_id")} == said | kept
    assert hub.read(tmp_path / "ours").extras.get("ids", {}) == said
    generation = tmp_path / "ours" / "generation_config.json"
    assert generation.exists() == (family in ("gpt2", "llama"))
    if generation.exists():
        assert json.loads(generation.read_text()) == said | kept


def library_words(folder) -> None:
    """A tokenizer of the `tokenizers` library in the folder, whose <s> is 21 and </s> is 22."""
    library = pytest.importorskip("tokenizers", reason="tokenizer.json needs the extra [text]")
    vocab = {word: i for i, word in enumerate([*LETTERS[:20], "<pad>", "<s>", "</s>"])}
    made = library.Tokenizer(library.models.WordLevel(vocab, unk_token="a"))
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_the_ids_of_a_run_are_those_of_its_words(exported, family):
    config = config_of(family)
    library_words(exported.run)
    folder = exported(family, config, drawn(config))
    written = json.loads((folder / "config.json").read_text())
    pad = {"pad_token_id": 20}
    assert {name: written[name] for name in written if name.endswith("token_id")} == (
        pad if family == "bert" else pad | {"bos_token_id": 21, "eos_token_id": [22, 21]}
    )
    run, read = (open_model.open(str(path)) for path in (exported.run, folder))
    assert family == "bert" or open_model.ends(run, open_model.words(run)) == open_model.ends(
        read, open_model.words(read)
    )


@pytest.mark.parametrize("places", [[7], [5, 4]])
def test_transformers_ends_a_text_where_we_do(tmp_path, places):
    torch = pytest.importorskip("torch", reason="parity with PyTorch's models needs the extra [parity]")
    transformers = pytest.importorskip("transformers", reason="parity with its models needs the extra [parity]")
    whole = gained(published_with_words(tmp_path / "theirs", "llama"))
    ends = [LETTERS.index(whole[place]) for place in places]
    generation = {"eos_token_id": ends if ends[1:] else ends[0]}
    folder = published_with_words(tmp_path / "theirs", "llama", generation, eos_token_id=0)
    outcome = tiny.command(export, checkpoint=folder, family="llama", workdir=tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    for path in (folder, tmp_path / "out"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        told = theirs.generate(torch.tensor([[0]]), max_new_tokens=12, do_sample=False)[0].tolist()
        assert told[-1] in ends and len(told) < 13
        assert "".join(LETTERS[id] for id in told[1:-1]) == gained(path)


# What our models do not have.


def with_pooler(folder, **fields):
    """A published ViT that ends with a pooler; fields: of its config.json."""
    arrays = {name: array for name, array in published.tensors("vit").items() if not name.startswith("classifier")}
    rng, D = np.random.default_rng(3), published.D
    pooler = {"weight": rng.standard_normal((D, D), np.float32), "bias": rng.standard_normal(D, np.float32)}
    arrays |= {f"vit.pooler.dense.{name}": array for name, array in pooler.items()}
    return published.save(folder, "vit", arrays, **fields)


@pytest.mark.parametrize("fields", [{}, {"pooler_act": "relu"}])
def test_a_poolers_activation_is_kept(tmp_path, fields):
    read = hub.read(with_pooler(tmp_path / "theirs", **fields))
    extras = read.extras
    hub.write(tmp_path / "ours", family="vit", params=read.params, model=read.model, extras=extras)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["pooler_act"] == fields.get("pooler_act", "tanh")
    theirs, ours = (safetensors.read(tmp_path / name) for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])
    with pytest.raises(errors.UserError, match="pooler_act must be a text, and is 3"):
        hub.read(with_pooler(tmp_path / "wrong", pooler_act=3))


def test_transformers_pools_with_the_same_activation(tmp_path):
    torch = pytest.importorskip("torch", reason="parity with PyTorch's models needs the extra [parity]")
    transformers = pytest.importorskip("transformers", reason="parity with its models needs the extra [parity]")
    read = hub.read(with_pooler(tmp_path / "theirs", pooler_act="relu"))
    hub.write(tmp_path / "ours", family="vit", params=read.params, model=read.model, extras=read.extras)
    image_BZYX = torch.tensor(np.random.default_rng(1).standard_normal((2, 2, 15, 10), np.float32))
    models = [transformers.ViTModel.from_pretrained(tmp_path / name).eval() for name in ("theirs", "ours")]
    with torch.no_grad():
        theirs, ours = (model(image_BZYX).pooler_output.numpy() for model in models)
    assert (theirs == 0).any() and (theirs > 1).any()
    np.testing.assert_array_equal(ours, theirs)
