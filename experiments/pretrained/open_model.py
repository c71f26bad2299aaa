"""Open a trained model, our own or a published one, from its path."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.build import model as models
from experiments.data import image_file, pretrained_tokenizer, tokenizer
from experiments.engine import by_name, checkpoint, disk, errors, manifest, workdir
from experiments.pretrained import adapters, families, hub, llama2c, tensors
from tfm import embed, head, shapes
from tfm.attention import mask as masks

# What a model can do, by its kind. The kind of other experiments is their name.
DOES = {
    "causal": "predicts the next token",
    "prefix": "continues a prefix",
    "masked": "predicts masked tokens",
    "classes": "classifies texts",
    "tokens": "classifies tokens",
    "spans": "finds the span of an answer",
    "image": "classifies images",
    "translation": "translates sentences",
}
RUNS = {"vision": "image", "text_classification": "classes"}  # experiment -> kind
PEFT = "adapter_config.json"
MERGE_PEFT = "Merge them (merge_and_unload of peft), save the result with save_pretrained, and give its folder."
HEADS = {"causal": head.next_word, "prefix": head.next_word, "masked": head.masked_word}
HEADS |= {"classes": head.first_word, "tokens": head.each_word, "spans": head.each_word}


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A trained model, and what its users need to know. Called with a batch of ids or raw images, it returns logits.

    kind: one of DOES, or the name of another experiment. params: our tree of numpy arrays. model: fields of a config's
    `model`. facts: the other arguments of the function in build/model.py (W, N, output; Y, X, Z, patch, C, output).
    table: where each tensor of a published model went; '' for our own. trust: the user's code, 'my_file:my_score',
    that a run's config may name.
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
        """Return logits: next-token or masked-token logits of w_BN (..BNW), class logits of images (..BC).

        valid: valid_BN, True for ids that are not padding. Images are raw: uint8, or numbers of the model's own data.
        `image_file.prepare` normalises them like the training data. Raises UserError if the model has no such logits.
        """
        if self.kind == "image":
            inputs = image_file.prepare(inputs, self.like)
        return self.logits(inputs, valid)

    def logits(self, inputs: np.ndarray, valid: np.ndarray | None = None) -> jax.Array:
        """Return logits of ids, or of images that are normalised already, as the batches of a run."""
        check_kind(self, self.kind if self.kind in (*HEADS, "image") else "causal")
        N, is_dynamic = self.facts.get("N"), ":dynamic:" in self.model["relative_position"]
        if self.table and is_dynamic and N < np.shape(inputs)[1]:  # transformers rotates longer texts differently
            raise errors.UserError(
                f"the model in {self.path} takes {N} tokens at once: shorten the text, or use experiments.tools.sample"
            )
        return self._apply(self.params, inputs, valid)

    @functools.cached_property
    def like(self) -> dict[str, Any]:
        """Return how an image becomes like those that the model was trained on (image_file.load_format)."""
        return image_file.load_format(self.path, self.extras, Z=self.facts["Z"], C=self.facts["C"])

    @functools.cached_property
    def _apply(self) -> Callable[[dict, jax.Array, jax.Array | None], jax.Array]:
        model_mask = models.add_window(self.fields, masks.causal if self.kind in ("causal", "prefix") else None)
        facts = {name: fact for name, fact in self.facts.items() if name != "output"}
        token_classifier = dataclasses.replace(self, kind="tokens", facts=facts)

        def apply(params: dict, inputs: jax.Array, valid: jax.Array | None) -> jax.Array:
            size, mask = {}, model_mask
            if self.kind == "image":
                size = {"Y": inputs.shape[1], "X": inputs.shape[2]}
                inputs = embed.cut(inputs, size=self.facts["patch"])
            if valid is not None:
                mask = masks.padding(valid) if mask is None else masks.both(mask, masks.padding(valid))
                if self.facts.get("output") == "pooled":  # the mean of the tokens that are not padding
                    logits_BNC = token_classifier.network().apply(params, inputs, mask=mask)[0]
                    return models.average_tokens(logits_BNC, valid)
            return self.network(**size).apply(params, inputs, mask=mask)[0]

        return jax.jit(apply)

    @property
    def fields(self) -> Any:
        """Return the section `model` of the model's config. Raises UserError for code that is not in `trust`."""
        for name, value in {**self.model, "output": self.facts.get("output")}.items():
            if isinstance(value, str) and by_name.CODE.fullmatch(value) and value not in self.trust:
                setting = "image.head" if name == "output" else f"model.{name}"
                code = f'{setting} = "{value}", code that would be executed'
                raise errors.UserError(f"{self.path} has {code}. Add --trust={value} if you trust it.")
        return types.SimpleNamespace(**{**families.FREE, **self.model})

    def network(self, **size: Any) -> models.Model:
        """Return the model as functions. size: Y and X of images.

        Raises UserError that lists parameters which are missing, left over, of another shape, or not finite.
        """
        if self.kind in HEADS:
            size["head"] = HEADS[self.kind]
        build = {"image": models.build_vision_model, "translation": models.build_encoder_decoder}
        model = build.get(self.kind, models.build_language_model)(self.fields, **size, **self.facts)
        arrays, expected = shapes.flat(self.params), shapes.flat(jax.eval_shape(model.init, jax.random.key(0)))
        label = f"{self.path} does not hold the model that its config.json describes"
        tensors.complain(label, tensors.differences(arrays, expected))
        check_finite(self.path, arrays)
        return model


def open(path: str | os.PathLike, trust: Sequence[str] = ()) -> Trained:
    """Return the model at the path: a run's folder, a checkpoint (RUN/checkpoints/40), or a published model.

        model = open_model.open("runs/x")
        logits_BNW = model(np.array([open_model.load_tokenizer(model).encode("Once upon a time")]))

    A run's folder means its best checkpoint if it has train.keep_best, else the newest. A published model is a folder
    with config.json and model.safetensors, one of these files, or a .bin of llama2.c. Raises UserError without a model.
    """
    place, step = pathlib.Path(os.path.expanduser(path)), None
    example = "a model is a run's folder, or the folder or file of a published one"
    errors.refuse(
        (not str(path), f"--checkpoint is missing. Add --checkpoint=PATH: {example}"),
        (not os.path.exists(place), f"there is no {path}; {example}"),  # also if the name is too long
    )
    if place.name == "config.json":
        place = place.parent
    if place.parent.name == "checkpoints" and place.name.isdecimal():
        place, step = place.parents[1], int(place.name)
    if place.suffix == ".bin":
        return _open_llama2c(place)
    if not (place / "config.json").exists():
        is_peft, base = (place / PEFT).is_file(), read_saved(place / PEFT).get("base_model_name_or_path")
        errors.refuse(
            (list(place.glob("*/config.json")), f"{path} is no run{workdir.suggest_newest(place, '--checkpoint')}"),
            (is_peft, f"{path} holds only adapters of peft, for the model {base}. {MERGE_PEFT}"),
        )
    config = read_saved(place / "config.json").get("config")
    if config is None:
        return _open_published(place, hub.read(place))
    return _open_run(place, config, (trust,) if isinstance(trust, str) else tuple(trust), step)


def read_saved(file: pathlib.Path) -> dict[str, Any]:
    """Return the object in a file of a run; {} if there is none, as before a run's end or in a published model."""
    with contextlib.suppress(errors.UserError):
        return disk.read_json(file, says="")
    return {}


def _open_run(folder: pathlib.Path, config: dict[str, Any], trust: Sequence[str], step: int | None) -> Trained:
    """Return the model of a run after `step` steps; None: the best checkpoint if one is kept, else the newest."""
    checkpoints = folder / "checkpoints"
    steps, last, metric = manifest.steps(checkpoints), checkpoint.newest(checkpoints), config["train"]["keep_best"]
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    if step is None and last is not None:
        step = (checkpoint.best(checkpoints, metric) or {"step": last})["step"]
        if step != last:
            newest = f"the newest is {checkpoints / str(last)}"
            print(f"{folder}: step {step:,} is opened, the best by {metric}; {newest}", flush=True)
    if step not in steps:
        listed = ", ".join(map(str, sorted(steps))) or "none"
        raise errors.UserError(f"{folder} has no {wanted}; its steps are: {listed}")
    params = checkpoint.parameters(checkpoints, step)
    with disk.reading(folder / "config.json"):
        params = adapters.merge(params, config["optim"]["lora"])
        kind, facts = _find_facts(config, params)
        names = read_saved(folder / "data.json").get("classes")
        extras = {"class_names": names} if "C" in facts and names else {}
        return Trained(folder, kind, params, config["model"], facts, extras, "", trust)


def _find_facts(config: dict[str, Any], params: dict) -> tuple[str, dict[str, Any]]:
    """Return a run's kind of model, and the arguments of its function in build/model.py."""
    kind, head = RUNS.get(config["experiment"], config["experiment"]), params.get("head", {})
    facts: dict[str, Any] = {}
    if kind in ("language", "classes"):
        facts = {"N": config["text"]["N"], "output": config["text"]["head"]}
        kind = config["text"]["objective"] if kind == "language" else kind
    elif kind == "translation":
        facts = {"N": config["pairs"]["N"], "tied_output": "G_WD" not in head, "output_bias": "b_W" in head}
    elif kind in ("image", "masked_image"):
        patch = config["image"]["patch"]
        facts = {"patch": patch, "Z": params["embed"]["W_DP"].shape[1] // patch**2}
    if kind == "image":
        facts["output"] = config["image"]["head"]
    if kind in ("image", "classes"):
        facts["C"] = head["G_CD"].shape[0]
    if kind in (*HEADS, "translation"):
        facts["W"] = shapes.find(params["embed"], "E").shape[0]
    return kind, facts


def _open_published(path: pathlib.Path, published: hub.Published) -> Trained:
    """Return a published model. If it has no biases of queries, keys and values, they are zero: we have all or none."""
    extras, params = published.extras, published.params
    names = ("patch", "C", "Z", "output") if extras["kind"] == "image" else ("W", "N", "output", "C")
    facts = {name: extras[name] for name in names if name in extras}
    if not extras.get("query_bias", True):
        score, value = params["blocks"]["score"], params["blocks"]["value"]
        zeros_MHK = np.zeros(score["Uq_HKD"].shape[:3], np.float32)
        biases = {"score": {**score, "bq_HK": zeros_MHK, "bk_HK": zeros_MHK}, "value": {**value, "bv_HK": zeros_MHK}}
        params = {**params, "blocks": params["blocks"] | biases}
    return Trained(path, extras["kind"], params, published.model, facts, extras, published.table)


def _open_llama2c(path: pathlib.Path) -> Trained:
    """Return the model in a file of llama2.c."""
    config, arrays = llama2c.read(path)
    published = hub.interpret({"model_type": "llama", **config}, arrays, path)
    # run.c of llama2.c has no other ids, and also ends a text at the beginning of the next one.
    begin, end = pretrained_tokenizer.BOS, pretrained_tokenizer.EOS
    published.extras["ids"] = {"bos_token_id": begin, "eos_token_id": [end, begin]}
    published.model["relative_position"] = published.model["relative_position"].replace("rotary_halves", "rotary")
    return _open_published(path, published)


def check_kind(model: Trained, *kinds: str, needs_head: bool = True) -> None:
    """Raise UserError unless the model has one of these kinds, and a head."""
    if model.kind in kinds and not (needs_head and model.extras.get("headless")):
        return
    does = DOES.get(model.kind, f"belongs to the experiment {model.kind}")
    does = "ends before its head" if model.kind in kinds else does
    wanted = " or ".join(DOES[kind] for kind in kinds)
    raise errors.UserError(f"the model in {model.path} {does}; this command needs a model that {wanted}")


def check_finite(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise UserError for parameters, by their paths, that are not finite; `path` is the file or folder with them."""
    invalid = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    tensors.complain(f"{path} holds values that are not finite numbers", invalid)


def load_tokenizer(model: Trained) -> tokenizer.Tokenizer:
    """Return the tokenizer of the model. Raises UserError if it has none, or one with more tokens than the model."""
    W, files = model.facts["W"], list_tokenizers(model)
    tokens = pretrained_tokenizer.read(files[0] if files and files[0].name == f"tok{W}.bin" else folder_of(model))
    if tokens.size > W:
        raise errors.UserError(
            f"the tokenizer at {model.path} has {tokens.size} tokens, more than the {W} of its model"
        )
    return tokens


def list_end_ids(model: Trained, tokens: tokenizer.Tokenizer) -> list[int]:
    """Return the ids that end a text: those in a published model's files, else the tokenizer's end and start.

    A start ends the text before it, because a model may have learned from texts that follow each other.
    """
    ids = model.extras.get("ids", {}).get("eos_token_id", [])
    ids = [id for id in (ids if isinstance(ids, list) else [ids]) if id < model.facts["W"]]
    return list(dict.fromkeys(ids or [id for id in (tokens.eos, tokens.bos) if id is not None]))


def folder_of(model: Trained) -> pathlib.Path:
    """Return the folder of the model's other files."""
    return model.path if model.path.is_dir() else model.path.parent


def list_tokenizers(model: Trained) -> list[pathlib.Path]:
    """Return the files that may hold the model's tokenizer. A file named by the model's number of tokens is first."""
    first = f"tok{model.facts.get('W')}.bin" if model.path.is_file() else ""
    files = (file for pattern in pretrained_tokenizer.FILES for file in sorted(folder_of(model).glob(pattern)))
    return sorted(filter(pathlib.Path.is_file, files), key=lambda file: file.name != first)
