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

# What a model can do, by its kind. A run of another experiment has that one's name for its kind.
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
RUNS = {"vision": "image", "text_classification": "classes"}  # the kinds of other experiments have their names
HEADS = {"causal": head.next_word, "prefix": head.next_word, "masked": head.masked_word}
HEADS |= {"classes": head.first_word, "tokens": head.each_word, "spans": head.each_word}


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A trained model, and what its users need to know. Called with a batch of ids or raw images, it returns logits.

    kind: one of DOES, or the name of another experiment. params: our tree of numpy arrays. model: fields of a config's
    `model`. facts: the other arguments of the function in build/model.py (W, N, output; Y, X, Z, patch, C, output).
    table: what became of each tensor of a published model, '' for our own. trust: the user's code, 'my_file:my_score',
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
        """Return logits: next-token or masked-token logits of w_BN (..BNW), class logits of images (..BC). valid:
        valid_BN, which ids are no padding. Raises UserError if the model has none of them.

        Images are raw: uint8, or numbers of the model's own data (`image_file.prepare`), which makes and normalises
        them as those that the model was trained on.
        """
        if self.kind == "image":
            inputs = image_file.prepare(inputs, self.like)
        return self.logits(inputs, valid)

    def logits(self, inputs: np.ndarray, valid: np.ndarray | None = None) -> jax.Array:
        """Return logits of ids, or of images that are normalised already, as the batches of a run."""
        check_kind(self, self.kind if self.kind in (*HEADS, "image") else "causal")
        N = self.facts.get("N")
        # transformers rotates all tokens of a longer text differently
        if self.table and ":dynamic:" in self.model["relative_position"] and N < np.shape(inputs)[1]:
            what = f"the model in {self.path} takes {N} tokens at once"
            raise errors.UserError(f"{what}; give longer texts to generate, token by token")
        return self._apply(self.params, inputs, valid)

    @functools.cached_property
    def like(self) -> dict[str, Any]:
        """Return how an image becomes like those that the model was trained on (image_file.load_format)."""
        return image_file.load_format(self.path, self.extras, Z=self.facts["Z"], C=self.facts["C"])

    @functools.cached_property
    def _apply(self) -> Callable[[dict, jax.Array, jax.Array | None], jax.Array]:
        mask = models.add_window(self.fields, masks.causal if self.kind in ("causal", "prefix") else None)
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
            return models.average_tokens(answer, valid) if by_word else answer

        return jax.jit(apply)

    @property
    def fields(self) -> Any:
        """Return the section `model` of the config that the model was made with. Raises UserError for a program that is
        not in `trust`."""
        for name, value in {**self.model, "output": self.facts.get("output")}.items():
            if isinstance(value, str) and by_name.CODE.fullmatch(value) and value not in self.trust:
                what = (
                    f'{"image.head" if name == "output" else f"model.{name}"} = "{value}", a program that would be run'
                )
                raise errors.UserError(f"{self.path} has {what}: give --trust={value} if you trust it")
        return types.SimpleNamespace(**{**families.FREE, **self.model})

    def network(self, **size: Any) -> models.Model:
        """Return the model as functions. size: Y and X of images. Raises UserError that lists the parameters which are
        missing, left over, of another shape, or not finite."""
        if self.kind in HEADS:
            size["head"] = HEADS[self.kind]
        build = {"image": models.build_vision_model, "translation": models.build_encoder_decoder}
        model = build.get(self.kind, models.build_language_model)(self.fields, **size, **self.facts)
        check(self.path, self.params, jax.eval_shape(model.init, jax.random.key(0)))
        return model


def open(path: str | os.PathLike, trust: Sequence[str] = ()) -> Trained:
    """Return the model at the path: a run's folder, one of its checkpoints (RUN/checkpoints/40), a folder with a
    published model, or its file. Of a run with train.keep_best it is the best checkpoint, else the newest.

        model = open_model.open("runs/x")
        logits_BNW = model(np.array([open_model.load_tokenizer(model).encode("Once upon a time")]))

    A published model is config.json next to model.safetensors, or a .bin of llama2.c; the path may also be that of its
    config.json. Raises UserError if there is none.
    """
    where = pathlib.Path(os.path.expanduser(path))
    if not str(path) or not os.path.exists(where):  # also False for a name that is too long
        wrong = f"there is no {path}" if str(path) else "say which model: --checkpoint=PATH"
        raise errors.UserError(f"{wrong}; a model is a run's folder, or the folder or file of a published one")
    where, step = _run_and_step(where.parent if where.name == "config.json" else where)
    if where.suffix == ".bin":
        return _llama2c(where)
    if list(where.glob("*/config.json")) and not (where / "config.json").exists():
        raise errors.UserError(f"{path} is no run{workdir.suggest_newest(where, '--checkpoint')}")
    if (where / "adapter_config.json").is_file() and not (where / "config.json").exists():
        base = read_saved(where / "adapter_config.json").get("base_model_name_or_path")
        raise errors.UserError(
            f"{path} holds adapters of peft alone, for the model {base}: merge them there (merge_and_unload of peft), "
            "save that with save_pretrained, and give its folder"
        )
    config = read_saved(where / "config.json").get("config")
    if config is None:
        return _published(where, hub.read(where))
    return _run(where, config, (trust,) if isinstance(trust, str) else tuple(trust), step)


def _run_and_step(path: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """Return (RUN, 40) of RUN/checkpoints/40, and of any other path (path, None)."""
    if path.parent.name != "checkpoints" or not path.name.isdecimal():
        return path, None
    return path.parent.parent, int(path.name)


def read_saved(file: pathlib.Path) -> dict[str, Any]:
    """Return the object in a file of a run; {} if there is none, as before a run's end or in a published model."""
    with contextlib.suppress(errors.UserError):
        return disk.read_json(file, says="")
    return {}


def _run(folder: pathlib.Path, config: dict[str, Any], trust: Sequence[str], step: int | None) -> Trained:
    """Return the model of a run after so many steps; None: the best checkpoint if one is kept, else the newest."""
    checkpoints = folder / "checkpoints"
    last = checkpoint.newest(checkpoints)
    metric = config["train"]["keep_best"]
    if step is None and last is not None:
        step = (checkpoint.best(checkpoints, metric) or {"step": last})["step"]
        if step != last:
            others = f"the newest is {checkpoints / str(last)}"
            print(f"{folder}: step {step:,} is opened, the best by {metric}; {others}", flush=True)
    steps = manifest.steps(checkpoints)
    if step not in steps:
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise errors.UserError(
            f"{folder} has no {wanted}; its steps are: {', '.join(map(str, sorted(steps))) or 'none'}"
        )
    params = checkpoint.parameters(checkpoints, step)
    with disk.reading(folder / "config.json"):
        params = adapters.merge(params, config["optim"]["lora"])
        kind, facts = _kind_and_facts(config, params)
        names = read_saved(folder / "data.json").get("classes")
        extras = {"class_names": names} if "C" in facts and names else {}
        return Trained(folder, kind, params, config["model"], facts, extras, "", trust)


def _kind_and_facts(config: dict[str, Any], params: dict) -> tuple[str, dict[str, Any]]:
    """Return what the model of a run does, and the arguments of its function in build/model.py."""
    kind, head = RUNS.get(config["experiment"], config["experiment"]), params.get("head", {})
    facts: dict[str, Any] = {}
    if kind == "language":
        kind, facts = config["text"]["objective"], {"N": config["text"]["N"], "output": config["text"]["head"]}
    elif kind == "classes":
        facts = {"N": config["text"]["N"], "output": config["text"]["head"], "C": head["G_CD"].shape[0]}
    elif kind == "translation":
        facts = {"N": config["pairs"]["N"], "tied_output": "G_WD" not in head, "output_bias": "b_W" in head}
    elif kind in ("image", "masked_image"):
        patch = config["image"]["patch"]
        facts = {"patch": patch, "Z": params["embed"]["W_DP"].shape[1] // patch**2}
    if kind == "image":
        facts |= {"C": head["G_CD"].shape[0], "output": config["image"]["head"]}
    if kind in (*HEADS, "translation"):
        facts["W"] = next(leaf for name, leaf in params["embed"].items() if name.startswith("E_W")).shape[0]
    return kind, facts


def _published(path: pathlib.Path, read: hub.Published) -> Trained:
    """Return a published model. One without biases of queries, keys and values gets zeros: ours has all or none."""
    extras, params = read.extras, read.params
    if extras["kind"] == "image":
        facts = {name: extras[name] for name in ("patch", "C", "Z")} | {"output": extras["output"]}
    else:
        facts = {name: extras[name] for name in ("W", "N", "output", "C") if name in extras}
    if not extras.get("query_bias", True):
        blocks = params["blocks"]
        zeros_MHK = np.zeros(blocks["score"]["Uq_HKD"].shape[:3], np.float32)
        score = blocks["score"] | {"bq_HK": zeros_MHK, "bk_HK": zeros_MHK}
        params = params | {"blocks": blocks | {"score": score, "value": blocks["value"] | {"bv_HK": zeros_MHK}}}
    return Trained(path, extras["kind"], params, read.model, facts, extras, read.table)


def _llama2c(path: pathlib.Path) -> Trained:
    settings, arrays = llama2c.read(path)
    read = hub.interpret({"model_type": "llama", **settings}, arrays, path)
    # run.c of llama2.c knows no others, and ends a text where the next one would begin
    begin, end = pretrained_tokenizer.BOS, pretrained_tokenizer.EOS
    read.extras["ids"] = {"bos_token_id": begin, "eos_token_id": [end, begin]}
    read.model["relative_position"] = read.model["relative_position"].replace("rotary_halves", "rotary")
    return _published(path, read)


def check_kind(model: Trained, *kinds: str, needs_head: bool = True) -> None:
    """Raise UserError unless the model has one of these kinds, and a head."""
    if model.kind not in kinds:
        does = DOES.get(model.kind, f"belongs to the experiment {model.kind}")
    elif needs_head and model.extras.get("headless"):
        does = "ends before its head"
    else:
        return
    wanted = " or ".join(DOES[kind] for kind in kinds)
    raise errors.UserError(f"the model in {model.path} {does}; this command needs a model that {wanted}")


def check(path: pathlib.Path, params: Any, expected: Any, what: str = "model") -> None:
    """Raise UserError that lists how parameters differ from those expected, a tree of shapes, or are not numbers."""
    arrays = shapes.flat(params)
    wrong = f"{path} does not hold the {what} that its config.json describes"
    tensors.complain(wrong, tensors.differences(arrays, shapes.flat(expected)))
    check_finite(path, arrays)


def check_finite(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise UserError for parameters, by their paths, that are not finite; `path` is where they come from."""
    wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    tensors.complain(f"{path} holds values that are not finite numbers", wrong)


def load_tokenizer(model: Trained) -> tokenizer.Tokenizer:
    """Return the tokenizer of the model. Raises UserError if it has none, or one with more tokens than the model."""
    W, files = model.facts["W"], tokenizers(model)
    tokens = pretrained_tokenizer.read(files[0] if files and files[0].name == f"tok{W}.bin" else folder_of(model))
    if tokens.size > W:
        raise errors.UserError(f"the tokenizer at {model.path} has {tokens.size} tokens, and its model has {W}")
    return tokens


def list_end_ids(model: Trained, tokens: tokenizer.Tokenizer) -> list[int]:
    """Return the ids that end a text: those that a published model's files name, else the tokenizer's end and start.
    A start ends the text before it, since a model may have learned from texts that stood one after another."""
    said = model.extras.get("ids", {}).get("eos_token_id", [])
    ids = [id for id in (said if isinstance(said, list) else [said]) if id < model.facts["W"]]
    return list(dict.fromkeys(ids or [id for id in (tokens.eos, tokens.bos) if id is not None]))


def class_names(model: Trained) -> list[str] | None:
    """Return the names of the classes of its head, in order; None if it has no such head or nobody named them."""
    names = model.extras.get("class_names")
    return None if not names or names == [f"LABEL_{i}" for i in range(len(names))] else names


def folder_of(model: Trained) -> pathlib.Path:
    """Return the folder of the model's other files."""
    return model.path if model.path.is_dir() else model.path.parent


def tokenizers(model: Trained) -> list[pathlib.Path]:
    """Return the files that may hold the model's tokenizer; that of its own number of tokens comes first."""
    own = f"tok{model.facts.get('W')}.bin" if model.path.is_file() else ""
    files = (file for pattern in pretrained_tokenizer.FILES for file in sorted(folder_of(model).glob(pattern)))
    there = [file for file in files if file.is_file()]
    return sorted(there, key=lambda file: file.name != own)
