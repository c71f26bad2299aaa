"""Export: every setting of a model is written or refused, and a text ends at the same ids."""

import dataclasses
import functools
import json
import sys
import types

import jax
import numpy as np
import published
import pytest
import tiny
from errors import raises

from configs import base
from experiments.config import errors
from experiments.pretrained import families, hub, open_model, trained
from experiments.tools import export, sample
from tfm import shapes

PARITY = "parity with PyTorch's models needs the extra [parity]"
W, N = 23, 13  # W: the fewest tokens of a run below
WORDS_BN = np.random.default_rng(1).integers(0, W, (2, 11))
SEGMENT_BN = (np.arange(11)[None] >= np.array([[5], [2]])).astype(int)
IMAGE_BYXZ = np.random.default_rng(2).standard_normal((2, 8, 8, 1)).astype(np.float32)
SMALL = {"model.M": 2, "model.D": 24, "model.H": 2, "model.F": 7, "model.remat": "products"}
WORDS = SMALL | {"text.N": N}
BERT = {"text.objective": "masked", "text.head": "linear+gelu", "model.segments": 2, "model.outer_norm": "first"}
LLAMA = {"model.norm": "rms", "model.mlp": "swiglu", "model.position": "none", "model.relative_position": "rotary"}
RUNS = {
    "gpt2": WORDS,
    "bert": WORDS | {"model.block": "post_norm"} | BERT,
    "vit": SMALL | {"image.head": "class_token", "image.patch": 4},
    "llama": WORDS | {"model.bias": "none"} | LLAMA,
}
# For each field of `model`, and of the other sections, values. At least one of them differs from a family's.
MODEL = {
    **dict(M=[4], D=[32], H=[4], G=[1], K=[6], F=[9]),  # with D also K and G
    "score": ["tied", "asymmetric_noself", "symmetric_init", "asymmetric_std", "pairwise"],
    **dict(score_std=[0.5], output_std=[0.0], embed_std=[0.5], window=[3]),
    **dict(mup=[16], mup_depth=["completep:1"], flax=["my_flax:Model"], weights=[]),
    "scale": ["1/sqrt(D)", "1"],
    **dict.fromkeys(["cap", "output_cap"], [30.0]),
    "value": ["keys", "gated", "exclusive", "full_rank", "identity"],
    "norm": ["token", "token:0.1", "token_plain", "rms", "rms:0.1", "batch", "instance", "none"],
    "mlp": ["relu", "gelu", "gelu_tanh", "two_hidden_gelu", "swiglu", "geglu"],
    "position": ["learned", "sinusoidal", "learned_concatenated", "sinusoidal_concatenated", "none"],
    "relative_position": "none rotary rotary:50 rotary_halves rotary_halves:50:linear:2 relative buckets alibi".split(),
    "block": ["pre_norm", "post_norm", "plain"],
    "outer_norm": ["last", "first", "both", "none"],
    "bias": ["all", "none", "attention", "qkv"],
    "segments": [0, 1],
    "dropout": [0.5],
    "attention": ["explicit"],
    "compute_dtype": ["bfloat16"],
    "remat": ["full"],
}
TEXT = {"source": ["docstrings"], "tokenizer": ["characters"], "N": [12]}
IMAGE = {"source": ["mnist"], "patch": [2], "augment": [["shift:1"]]}
REFUSED = {  # fields of the other sections that every family refuses
    "text.objective": ["causal", "prefix", "masked"],
    "text.head": ["linear", "tied", "linear+gelu", "tied+gelu", "linear+tanh", "tied+bias"],
    "image.head": ["pooled"],
} | {"image.size": [], "text.field": [], "text.documents": []}  # of photographs, of rows, and of training


def add_section(section: str, values: dict) -> dict:
    return {f"{section}.{field}": value for field, value in values.items()}


VALUES = add_section("model", MODEL) | add_section("text", TEXT) | add_section("image", IMAGE) | REFUSED
FREE = "M D H F score_std output_std embed_std dropout attention compute_dtype remat".split()
ALWAYS = add_section("model", {field: MODEL[field] for field in FREE} | {"norm": ["token:0.1"]})
ALWAYS |= {"model.score": ["symmetric_init", "asymmetric_std"]}
TEXTS = ALWAYS | add_section("text", TEXT)
ACCEPTED = {  # the values of OTHERS that a family accepts, in addition to the values of its run above
    "gpt2": TEXTS | {"text.head": ["tied"], "model.scale": ["1"], "model.mlp": ["relu", "gelu_tanh"]},
    "bert": TEXTS | {"text.head": ["tied+gelu"], "model.segments": [1]},
    "vit": ALWAYS | add_section("image", IMAGE) | {"model.mlp": ["relu", "gelu_tanh"]},
    "llama": TEXTS
    | add_section("model", {"relative_position": ["rotary:50", "rotary_halves", "rotary_halves:50:linear:2"]})
    | add_section("model", {"mlp": ["geglu"], "bias": ["all", "attention"]})
    | {"text.head": ["tied"], "model.G": [1], "model.K": [6], "model.norm": ["rms:0.1"]},
}


def experiment_of(family: str) -> str:
    return "vision" if family == "vit" else "language"


def export_run(folder, family: str, write_tokenizer=None, **changes):
    """Return a run of this config, and the folder with its export."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_bytes(tiny.TEXT)
    source = {} if family == "vit" else {"text.source": str(folder / "text.txt")}
    run = published.write_run(folder / "run", experiment_of(family), **RUNS[family] | source | changes)
    if write_tokenizer:
        write_tokenizer(run)
    outcome = tiny.command(export, checkpoint=run, family=family, workdir=folder / "out")
    assert (outcome.err, outcome.code) == ("", 0)
    return run, folder / "out"


def compute_logits(model: open_model.Trained) -> np.ndarray:
    if model.kind == "image":
        return np.asarray(model.logits(IMAGE_BYXZ))
    words = {"w_BN": WORDS_BN, "segment_BN": SEGMENT_BN} if model.fields.segments > 1 else WORDS_BN
    return np.asarray(model(words))


def check_near(actual, expected, share: float = 1e-5) -> None:
    assert actual.shape == expected.shape and np.abs(actual - expected).max() < share * np.ptp(expected)


def combine_accepted(family: str):
    """Yield two changes by which every field of TAKEN differs from the family's run, computed in float32.

    The rotary positions of the first are in our order, which differs from theirs.
    """
    excluded = ("model.compute_dtype", "text.source", "text.tokenizer", "image.source")  # or need a download
    for index in (0, -1):
        if index or family != "bert":  # both changes would be equal
            yield {name: values[index] for name, values in ACCEPTED[family].items() if name not in excluded}


def find_refused(family: str, config: dict) -> str:
    """Return the settings of a run's config that the family does not have."""
    spec, fields = hub.FAMILIES[family], config["model"]
    kind = next(iter(spec.heads))
    if kind != "image" and config["text"]["objective"] != kind:
        return "text.objective"
    head = config["image" if kind == "image" else "text"]["head"]
    if family == "llama" and fields["relative_position"] in ("rotary", "rotary:50"):
        fields = fields | {"relative_position": "rotary_halves"}  # as export does, with the parameters
    settings = dict(W=W, N=N, headless=False, tied_output="tied" in head, aside={})
    settings |= dict(Z=1, patch=4, image=(8, 8), query_bias=True) | fields
    read_back = families.read(spec, {"model_type": family} | families.write(spec, kind, settings))
    output = families.name_output(spec, kind, settings)
    return "; ".join(hub.list_unlike(fields, head, read_back | {"output": output}))


def test_the_table_above_has_every_setting():
    config = base.get_config("vision")
    config = {"model": config.model, "image": config.image, "text": base.get_config("language").text}
    assert VALUES.keys() == {f"{section}.{field}" for section in config for field in config[section].keys()}
    assert {*families.MODEL, *families.FREE} == set(config["model"].keys())


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Return a function of the family: its runs of `combine_accepted`, each with its number and its export."""

    @functools.cache
    def export_family(family: str) -> list:
        folder = tmp_path_factory.mktemp(family)
        changes = enumerate(combine_accepted(family))
        return [(number, *export_run(folder / str(number), family, **fields)) for number, fields in changes]

    return export_family


@pytest.mark.parametrize("family", RUNS)
def test_every_setting_is_written_or_refused_by_its_name(exports, family):
    """Each value alone is refused or accepted. All accepted values together keep the logits or parameters."""
    accepted_values, settings = {}, tiny.settings(experiment_of(family), model=False, **RUNS[family]).to_dict()
    for name, values in VALUES.items():
        section, field = name.split(".")
        for value in [value for value in values if section in settings and value != settings[section][field]]:
            config = settings | {section: settings[section] | {field: value}}
            if name in ("model.D", "model.H"):  # and K with it
                config["model"] |= {"K": config["model"]["D"] // config["model"]["H"], "G": config["model"]["H"]}
            if message := find_refused(family, config):
                assert name in message
            else:
                accepted_values.setdefault(name, []).append(value)
    assert accepted_values == ACCEPTED[family]
    for number, *folders in exports(family):
        model, export_model = map(open_model.open, folders)
        names = trained.BUILD[model.kind][1].split()
        facts = [
            {name: opened.facts.get(name) for name in names if name not in "YX"} for opened in (model, export_model)
        ]
        assert facts[0] == facts[1] and export_model.kind == model.kind
        if number or family != "llama":  # then model and parameters determine the logits
            fields = {field: model.model[field] for field in export_model.model}
            assert fields | {"score": "asymmetric"} == export_model.model
            jax.tree.map(np.testing.assert_array_equal, export_model.params, model.params)
        else:
            check_near(compute_logits(export_model), compute_logits(model))


@pytest.mark.parametrize("family", RUNS)
def test_transformers_reads_every_setting_that_is_written(exports, family):
    torch, transformers = (pytest.importorskip(name, reason=PARITY) for name in ("torch", "transformers"))
    for _, run_folder, folder in exports(family):
        kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
        reference, info = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(info[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        model, inputs = open_model.open(run_folder), {"input_ids": torch.tensor(WORDS_BN)}
        if model.fields.segments > 1:
            inputs["token_type_ids"] = torch.tensor(SEGMENT_BN)
        if family == "vit":
            inputs = {"pixel_values": torch.tensor(IMAGE_BYXZ).permute(0, 3, 1, 2)}
        with torch.no_grad():
            check_near(reference.eval()(**inputs).logits.numpy(), compute_logits(model))


def test_a_setting_that_the_family_does_not_have_is_an_error(tmp_path):
    text = published.write_run(tmp_path / "text", "language", **{"model.D": 8, "model.H": 4, "model.G": 2})
    changes = {"text__objective": "masked", "text__head": "linear", "model__segments": 0}
    masked = published.copy_with_changes(text, tmp_path / "masked", **changes)
    image, out = published.write_run(tmp_path / "image", "vision"), tmp_path / "out"
    for run, family, *parts in (
        (text, "llama", "model.norm", "'token'", "'rms'"),
        (text, "bert", text),
        (text, "gpt3", "family", "gpt3", "gpt2"),
        (text, "experiments.pretrained.gpt2:FAMILY", "family", "gpt2"),
        (masked, "bert", "text.head", "'linear'", "'linear+gelu'", "model.segments is 0"),
        (image, "vit", "image.head", "'pooled'", "'class_token'"),
    ):
        with raises(errors.UserError, *parts):
            export.run(run, family=family, workdir=out)
    with raises(errors.UserError, "--workdir"):
        export.run(text, family="gpt2")
    own = dataclasses.replace(open_model.open(text), own=object())
    with pytest.MonkeyPatch.context() as patch, raises(errors.UserError, "an experiment of yours", "--family=npz"):
        patch.setattr(export.commands, "load", lambda *_: own)
        export.run(text, family="gpt2", workdir=out)
    assert not out.exists()
    (out / "something").mkdir(parents=True)
    with raises(errors.UserError, out):
        export.run(text, family="gpt2", workdir=out)


LETTERS = "abcdefghijklmnopqrstuvw"  # the 23 tokens of a model, in tests of the end of a text


def publish_letters(folder, family="gpt2", generation=None, **fields):
    """Return the folder of a published model of one layer, whose tokens are letters. fields: of its config.json."""
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 1}
    published.save(folder, family, published.tensors(family, layers=1), **layers, **fields)
    (folder / "tokenizer.json").write_text(json.dumps({"kind": "characters", "characters": LETTERS, "specials": []}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def continue_greedily(folder) -> str:
    """Return the model's most likely text after a letter."""
    return sample.run(folder, prompt="a", temperature=0.0, max_new_tokens=8).removeprefix("a")


@pytest.mark.parametrize(
    ("ids", "generation", "ends"),
    [
        (None, None, [4, 3]),  # of the tokenizer: the beginning of another text is also an end
        ([7, 5, 7], None, [7, 5]),
        (5, {"eos_token_id": None}, [5]),
        (5, {"eos_token_id": [6, 2]}, [6, 2]),
        (50256, None, [4, 3]),  # transformers writes it for every size of the vocabulary
    ],
)
def test_these_ids_end_a_text(tmp_path, ids, generation, ends):
    model = open_model.open(str(publish_letters(tmp_path, generation=generation, eos_token_id=ids)))
    assert trained.list_end_ids(model, types.SimpleNamespace(bos=3, eos=4)) == ends


@pytest.mark.parametrize(
    ("family", "ids", "missing"),
    [
        ("gpt2", {"bos_token_id": 1, "eos_token_id": [5, 6]}, {"pad_token_id": None}),
        ("llama", {"eos_token_id": 5, "pad_token_id": -1}, {"bos_token_id": None}),
        ("bert", {"pad_token_id": 3}, {}),
        ("vit", {}, {}),
    ],
)
def test_a_published_model_keeps_its_ids(tmp_path, family, ids, missing):
    folder = tmp_path / "ours"
    files = hub.write(folder, hub.read(published.save(tmp_path / "theirs", family, **ids)), family)
    assert sorted(files) == sorted(file.name for file in folder.iterdir())
    contents = {name: json.loads((folder / name).read_text()) for name in files if name.endswith(".json")}
    assert {name: x for name, x in contents["config.json"].items() if "token_id" in name} == ids | missing
    assert hub.read(folder).facts["ids"] == ids
    assert contents.get("generation_config.json") == (ids | missing if family in ("gpt2", "llama") else None)


def write_library_tokenizer(folder) -> None:
    """Write a tokenizer of the `tokenizers` library into the folder, with <s> = 21 and </s> = 22."""
    library = pytest.importorskip("tokenizers", reason="tokenizer.json needs the extra [text]")
    vocab = {word: i for i, word in enumerate([*LETTERS[:20], "<pad>", "<s>", "</s>"])}
    tokenizer = library.Tokenizer(library.models.WordLevel(vocab, unk_token="a"))
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_an_export_has_the_tokenizer_of_its_run_and_its_ids(tmp_path, family, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    run, folder = export_run(tmp_path, family, write_library_tokenizer)
    config = json.loads((folder / "config.json").read_text())
    ids = {"pad_token_id": 20} | ({} if family == "bert" else {"bos_token_id": 21, "eos_token_id": [22, 21]})
    assert {name: config[name] for name in config if name.endswith("token_id")} == ids
    assert (folder / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    # Without this field transformers chooses the class by the model's type.
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert not capsys.readouterr().err
    export.write_tokenizer(open_model.open(run), folder, "qwen2")
    assert "warning: transformers may read other ids" in capsys.readouterr().err
    for model in map(open_model.open, (run, folder) if family == "gpt2" else ()):
        assert trained.list_end_ids(model, model.tokenizer) == [22, 21]


def test_transformers_ends_a_text_at_the_same_token(tmp_path):
    torch, transformers = (pytest.importorskip(name, reason=PARITY) for name in ("torch", "transformers"))
    text = continue_greedily(publish_letters(tmp_path / "theirs", "llama"))
    ends = [LETTERS.index(text[position]) for position in (5, 4)]
    folder = publish_letters(tmp_path / "theirs", "llama", {"eos_token_id": ends}, eos_token_id=0)
    assert continue_greedily(folder) == text[: min(map(text.index, (text[5], text[4])))]
    export.run(folder, family="llama", workdir=tmp_path / "out")
    for path in (folder, tmp_path / "out"):
        model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        ids = model.generate(torch.tensor([[0]]), max_new_tokens=12, do_sample=False)[0].tolist()
        assert ids[-1] in ends and len(ids) < 13
        assert "".join(LETTERS[id] for id in ids[1:-1]) == continue_greedily(path)


@pytest.mark.parametrize("experiment", ["convolution", "synthetic", "vision"])
def test_arrays_of_any_run_are_read_by_numpy(tmp_path, experiment):
    run = published.write_run(tmp_path / "run", experiment)
    (file,) = export.run(run, family="npz", workdir=tmp_path / "out")
    params = shapes.flat(open_model.open(run).params)
    with np.load(file, allow_pickle=False) as arrays:
        assert set(arrays.files) == params.keys()
        for name in arrays.files:
            np.testing.assert_array_equal(arrays[name], params[name])
    assert experiment != "vision" or "blocks/score/Uq_HKD" in params
    with raises(errors.UserError, "--workdir", tmp_path / "out"):
        export.run(run, family="npz", workdir=tmp_path / "out")
