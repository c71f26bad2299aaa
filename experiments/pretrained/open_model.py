"""Trained models, our own and published ones, each opened from its path as the same few facts."""

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import model as models
from experiments.data import image_file, pretrained_tokenizer, tokenizer
from experiments.engine import by_name, checkpoint, config as configs, disk, errors, manifest, workdir
from experiments.pretrained import adapters, families, hub, llama2c, tensors
from tfm import embed, head, shapes
from tfm.attention import mask as masks

# What a model can do, by its kind. A run of another experiment has that one's name for its kind.
DOES = {
    "causal": "predicts the next word",
    "prefix": "goes on with a prefix",
    "masked": "fills hidden words in",
    "classes": "tells the classes of texts",
    "tokens": "tells the class of each word",
    "spans": "tells where an answer begins and ends",
    "image": "tells the classes of images",
    "translation": "translates sentences",
}
RUNS = {"vision": "image", "text_classification": "classes"}  # the kinds of other experiments have their names
HEADS = {"causal": head.next_word, "prefix": head.next_word, "masked": head.masked_word}
HEADS |= {"classes": head.first_word, "tokens": head.each_word, "spans": head.each_word}


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A model and what its user must know; called with a batch of ids or raw images, it answers with logits.

    kind: one of DOES, or the name of another experiment. params: our tree, numpy arrays. model: fields of a config's
    `model`. facts: the arguments of models.language or models.vision that are not in there (W, N, output; Y, X,
    Z, patch, C, answer). table: what became of each tensor of a published model, '' for our own.
    trust: the programs of the user's own, 'my_file:my_score', that a run's config may name.
    """

    path: pathlib.Path
    kind: str
    params: dict = dataclasses.field(repr=False)  # a notebook shows what a cell ends with
    model: dict[str, Any]
    facts: dict[str, Any]
    extras: dict[str, Any] = dataclasses.field(repr=False)
    table: str = dataclasses.field(repr=False)
    trust: Sequence[str] = ()

    def __call__(self, inputs: np.ndarray, valid: np.ndarray | None = None) -> jax.Array:
        """Logits: of the next word, or of the word that stood there, for w_BN (..BNW); of the classes, for images
        (..BC). valid: valid_BN, which ids are no padding. Raises UserError if it does neither.

        Images are raw: uint8, or numbers of the model's own data (`image_file.prepared`), which makes and normalises
        them as those that the model was trained on.
        """
        if self.kind == "image":
            inputs = image_file.prepared(inputs, self.like)
        return self.logits(inputs, valid)

    def logits(self, inputs: np.ndarray, valid: np.ndarray | None = None) -> jax.Array:
        """The same, of images that are normalised already, as the batches of a run."""
        expect(self, self.kind if self.kind in (*HEADS, "image") else "causal")
        N = self.facts.get("N")
        if self.table and ":dynamic:" in self.model["relative_position"] and N < getattr(inputs, "shape", (0, 0))[1]:
            what = f"the model in {self.path} takes {N} tokens at once"  # of more, theirs turns every one otherwise
            raise errors.UserError(f"{what}: a longer text it reads and writes word by word")
        return self._apply(self.params, inputs, valid)

    @functools.cached_property
    def like(self) -> dict[str, Any]:
        """How an image is made like those that the model was trained on (image_file.expected)."""
        return image_file.expected(self.path, self.extras, Z=self.facts["Z"], C=self.facts["C"])

    @functools.cached_property
    def _apply(self) -> Callable[[dict, jax.Array, jax.Array | None], jax.Array]:
        mask = models.masked(self.fields, masks.causal if self.kind in ("causal", "prefix") else None)
        each = {name: fact for name, fact in self.facts.items() if name != "output"}
        of_words = dataclasses.replace(self, kind="tokens", facts=each)  # what each word answers alone

        def apply(params: dict, inputs: jax.Array, valid: jax.Array | None) -> jax.Array:
            size, who, by_word = {}, mask, False
            if self.kind == "image":
                size = {"Y": inputs.shape[1], "X": inputs.shape[2]}
                inputs = embed.cut(inputs, size=self.facts["patch"])
            if valid is not None:
                who = masks.padding(valid) if mask is None else masks.both(mask, masks.padding(valid))
                by_word = self.facts.get("output") == "pooled"
            answer = (of_words if by_word else self).network(**size).apply(params, inputs, mask=who)[0]
            return models.mean_of_words(answer, valid) if by_word else answer

        return jax.jit(apply)

    @property
    def fields(self) -> Any:
        """The section `model` of the config that the model was made with. UserError for a program not in `trust`."""
        for name, value in {**self.model, "head": self.facts.get("answer")}.items():
            if isinstance(value, str) and by_name.CODE.fullmatch(value) and value not in self.trust:
                what = f'{"image.head" if name == "head" else f"model.{name}"} = "{value}", a program that would be run'
                raise errors.UserError(f"{self.path} has {what}: give --trust={value} if you trust it")
        how = {name: families.FREE[name] for name in ("attention", "remat")}  # change no model, and had other names
        return types.SimpleNamespace(**{**families.FREE, "G": self.model.get("H"), **self.model, **how})

    def network(self, **size: Any) -> models.Model:
        """The model as functions, where the parameters are those that it has. size: Y and X of images. UserError that
        lists the parameters which are missing, left over, of another shape, or no numbers."""
        if self.kind in HEADS:
            size["answer"] = HEADS[self.kind]
        make = {"image": models.vision, "translation": models.encoder_decoder}.get(self.kind, models.language)
        model = make(self.fields, **size, **self.facts)
        check(self.path, self.params, jax.eval_shape(model.init, jax.random.key(0)))
        return model


def open(path: str | os.PathLike, trust: Sequence[str] = ()) -> Trained:
    """The model at the path: a run's folder, one of its checkpoints (RUN/checkpoints/40), a folder with a published
    model, or its file. Of a run with train.keep_best it is the best checkpoint, else the newest.

        model = open_model.open("runs/x")
        logits_BNW = model(np.array([open_model.words(model).encode("Once upon a time")]))

    A published model is config.json beside model.safetensors, or a .bin of llama2.c (also the only one in a folder); a
    config.json stands for its folder. UserError where there is none.
    """
    where, step = pathlib.Path(os.path.expanduser(path)), None
    if not str(path) or not where.exists():
        wrong = f"there is no {path}" if str(path) else "say which model: --checkpoint=PATH"
        raise errors.UserError(f"{wrong}; a model is a run's folder, or the folder or file of a published one")
    where = where.parent if where.name == "config.json" and where.is_file() else where
    file = _llama2c_file(where)
    if file is not None:
        return _llama2c(file)
    if where.is_dir() and not (where / "config.json").exists():
        if list(where.glob("*/config.json")):
            raise errors.UserError(f"{path} is no run{workdir.newest(where, '--checkpoint')}")
        for up in (where, *where.parents[:2]):  # of RUN/checkpoints/30/state
            if up.name == "checkpoints" and (up.parent / "config.json").exists():
                number = where.relative_to(up).parts[:1]
                where, step = up.parent, int(number[0]) if number and number[0].isdecimal() else None
                if number and step is None:
                    raise errors.UserError(f"{path} is no checkpoint: {up} has those of steps {_steps(where)}")
                break
    if (where / "adapter_config.json").is_file() and not (where / "config.json").exists():
        base = saved(where / "adapter_config.json").get("base_model_name_or_path")
        raise errors.UserError(
            f"{path} holds adapters of peft alone, for the model {base}: merge them there (merge_and_unload of peft), "
            "save that with save_pretrained, and give its folder"
        )
    config = saved(where / "config.json").get("config")
    if not isinstance(config, dict) or "experiment" not in config:
        return _published(where, hub.read(where))
    return _run(where, config, (trust,) if isinstance(trust, str) else tuple(trust), step)


def _llama2c_file(path: pathlib.Path) -> pathlib.Path | None:
    """The .bin of llama2.c: this file, or the only one in a folder that holds nothing else a model could be."""
    if not path.is_dir():
        return path if path.suffix == ".bin" else None
    candidates = []
    for file in [] if (path / "config.json").exists() else sorted(path.glob("*.bin")):
        with contextlib.suppress(errors.UserError):  # a file of pickles, or of words
            llama2c.read(file)
            candidates.append(file)
    if len(candidates) > 1:
        raise errors.UserError(f"{path} holds {len(candidates)} models: give one, as {candidates[0]}")
    return candidates[0] if candidates else None


def saved(file: pathlib.Path) -> dict[str, Any]:
    """The object in a file of a run; {} where there is none, as before a run's end or in a published model's folder."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(file.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def _check_settings(file: pathlib.Path, config: dict[str, Any]) -> None:
    """Raise UserError if a setting of a run is missing, of another type than it has, or too large a number."""
    base, name = importlib.import_module("configs.base"), config["experiment"]
    ours = isinstance(name, str) and name.isidentifier() and (by_name.ROOT / "experiments" / f"{name}.py").is_file()
    right, found = (
        configs.flat((base.get_config(name) if ours else base.get_config()).to_dict()),
        dict(configs.leaves(config)),
    )
    try:
        configs.check_type("experiment", name, str)
        for key, usual in right.items():
            if key not in found:
                raise errors.UserError(f'it has no "{key}"')
            if not (type(usual) is float and type(found[key]) is int):
                configs.check_type(key, found[key], type(usual))
        configs.check_numbers(config)
    except errors.UserError as error:
        raise errors.UserError(f"{file} is damaged: {error}") from error


def _steps(folder: pathlib.Path) -> str:
    return ", ".join(map(str, sorted(manifest.steps(folder / "checkpoints")))) or "none"


def _run(folder: pathlib.Path, config: dict[str, Any], trust: Sequence[str], step: int | None) -> Trained:
    """The model of a run after so many steps; None: the best checkpoint if one is kept, else the newest."""
    last = checkpoint.newest(folder / "checkpoints")
    if last is None:
        raise errors.UserError(f"the run {folder} has no checkpoint: train it to one first")
    summary = saved(folder / "summary.json")
    steps, asked = summary.get("steps"), step is not None
    metric = config["train"].get("keep_best") if isinstance(config.get("train"), dict) else ""
    step = step if asked else (checkpoint.best(folder / "checkpoints", metric) or {"step": last})["step"]
    if step not in manifest.steps(folder / "checkpoints"):
        raise errors.UserError(f"{folder} has no checkpoint of step {step}, but of steps {_steps(folder)}")
    params = checkpoint.parameters(folder / "checkpoints", step)
    if step != last and not asked:
        others = f"the newest is {folder / 'checkpoints' / str(last)}"
        print(f"{folder}: step {step:,} is opened, the best by {metric}; {others}", flush=True)
    elif isinstance(steps, int) and steps > step and not asked:
        print(f"{folder} was trained for {steps:,} steps, and its newest checkpoint is of step {step:,}", flush=True)
    digest = summary.get("params_sha256") if steps == step else None
    if digest is not None and digest != checkpoint.digest(params):
        wrong = f"the parameters of step {step} are not those of params_sha256 in its summary.json"
        raise errors.UserError(f"{folder} is damaged: {wrong}")
    _check_settings(folder / "config.json", config)
    try:
        extras: dict[str, Any] = {}
        params = adapters.merged(params, config["optim"].get("lora", ""))
        kind, facts = RUNS.get(config["experiment"], config["experiment"]), {}
        if kind == "language":
            kind, facts = config["text"]["objective"], {"N": config["text"]["N"], "output": config["text"]["head"]}
            by_name.choose("text.objective", kind, dict.fromkeys(("causal", "prefix", "masked")))
        elif kind == "classes":
            facts = {"N": config["text"]["N"], "output": config["text"]["head"], "C": params["head"]["G_CD"].shape[0]}
            extras["class_names"] = disk.read_json(folder / "data.json", says="the names of its classes")["classes"]
        elif kind == "translation":
            facts = {"N": config["pairs"]["N"], "tied_output": "G_WD" not in params["head"]}
            facts["output_bias"] = "b_W" in params["head"]
        elif kind in ("image", "masked_image"):
            patch = config["image"]["patch"]
            facts = {"patch": patch, "Z": params["embed"]["W_DP"].shape[1] // patch**2}
        if kind == "image":
            facts |= {"C": params["head"]["G_CD"].shape[0], "answer": config["image"]["head"]}
        if kind in (*HEADS, "translation"):
            facts["W"] = next(leaf for name, leaf in params["embed"].items() if name.startswith("E_W")).shape[0]
        return Trained(folder, kind, params, config["model"], facts, extras, "", trust)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise errors.UserError(f"{folder / 'config.json'} is damaged: no {error}") from error


def _published(path: pathlib.Path, read: hub.Imported) -> Trained:
    kind, extras, params = read.extras["kind"], read.extras, read.params
    names = ("patch", "C", "Z") if kind == "image" else ("W", "N", "output")
    names += ("C",) * (kind in ("classes", "tokens", "spans"))
    facts = {name: extras[name] for name in names} | (
        {"answer": hub.FAMILIES[read.family].answer} if kind == "image" else {}
    )
    if not extras.get("query_bias", True):  # zeros for queries, keys and values: ours has all biases or none
        blocks = params["blocks"]
        zeros_MHK = np.zeros(blocks["score"]["Uq_HKD"].shape[:3], np.float32)
        score = blocks["score"] | {"bq_HK": zeros_MHK, "bk_HK": zeros_MHK}
        params = params | {"blocks": blocks | {"score": score, "value": blocks["value"] | {"bv_HK": zeros_MHK}}}
    return Trained(path, kind, params, read.model, facts, extras, read.table)


def _llama2c(path: pathlib.Path) -> Trained:
    settings, arrays = llama2c.read(path)
    read = hub.interpret({"model_type": "llama", **settings}, arrays, path)
    # run.c of llama2.c knows no others, and ends a text where the next one would begin
    begin, end = pretrained_tokenizer.BOS, pretrained_tokenizer.EOS
    read.extras["ids"] = {"bos_token_id": begin, "eos_token_id": [end, begin]}
    read.model["relative_position"] = read.model["relative_position"].replace("rotary_halves", "rotary")
    return _published(path, read)


def expect(model: Trained, *kinds: str, whole: bool = True) -> None:
    """UserError unless the model is of one of these kinds, and has a head (whole)."""
    wanted = " or ".join(DOES[kind] for kind in kinds)
    if model.kind not in kinds:
        does = DOES[model.kind] if model.kind in DOES else f"is of the experiment {model.kind}"
        raise errors.UserError(f"a model that {wanted} is needed here, and the one in {model.path} {does}")
    if whole and model.extras.get("headless"):
        raise errors.UserError(f"the model in {model.path} ends before its head, and one that {wanted} is needed here")


def check(path: pathlib.Path, params: Any, expected: Any, what: str = "model") -> None:
    """UserError that lists what keeps parameters from being those expected, a tree of shapes, or from being numbers."""
    arrays = shapes.flat(params)
    wrong = f"{path} does not hold the {what} that its config.json describes"
    tensors.complain(wrong, tensors.differences(arrays, shapes.flat(expected)))
    finite(path, arrays)


def finite(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """UserError for parameters, by their paths, that are not all finite numbers; `path` is where they come from."""
    wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if wrong:
        hold = f"holds values that are not finite numbers{f', and so do {len(wrong) - 1} more' if wrong[1:] else ''}"
        raise errors.UserError(f"{path} is damaged: {wrong[0]} {hold}")


def words(model: Trained) -> tokenizer.Tokenizer:
    """The words that the model's ids stand for. UserError where there are none, or more of them than the model has."""
    W, files = model.facts["W"], tokenizers(model)
    tokens = pretrained_tokenizer.read(files[0] if files and files[0].name == f"tok{W}.bin" else folder_of(model))
    if tokens.size > W:
        raise errors.UserError(f"the tokenizer at {model.path} has {tokens.size} words, and the model {W}")
    return tokens


def ends(model: Trained, words: tokenizer.Tokenizer) -> list[int]:
    """The ids that end a text: those that a published model's files name, else the end and the beginning of its words.
    A beginning ends the text before it, as where the texts that a model learned from stood one after another."""
    said = model.extras.get("ids", {}).get("eos_token_id", [])
    ids = [id for id in (said if isinstance(said, list) else [said]) if id < model.facts["W"]]
    return list(dict.fromkeys(ids or [id for id in (words.eos, words.bos) if id is not None]))


def class_names(model: Trained) -> list[str] | None:
    """The names of the classes of its head, in order; None if it has no such head or nobody named them."""
    names = model.extras.get("class_names") if "class_names" in model.extras else None
    names = saved(model.path / "data.json").get("classes") if names is None and "C" in model.facts else names
    return None if not isinstance(names, list) or names == [f"LABEL_{i}" for i in range(len(names))] else names


def folder_of(model: Trained) -> pathlib.Path:
    """Where the model's other files are."""
    return model.path if model.path.is_dir() else model.path.parent


def tokenizers(model: Trained) -> list[pathlib.Path]:
    """The files there that may hold the model's words; of several, that of its own number of words comes first."""
    own = f"tok{model.facts.get('W')}.bin" if model.path.is_file() else ""
    files = (file for pattern in pretrained_tokenizer.FILES for file in sorted(folder_of(model).glob(pattern)))
    there = [file for file in files if file.is_file()]
    return sorted(there, key=lambda file: file.name != own)
