"""Open a trained model, of a run or published, from its path."""

import dataclasses
import functools
import os
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from experiments.config import by_name, disk, errors, settings as configs
from experiments.data import image_file, labelled, pretrained_tokenizer, tokenization
from experiments.folder import checkpoint, manifest, records, workdir as workdirs
from experiments.model import losses, model as models
from experiments.pretrained import adapters, families, hub, tensors
from tfm import embed as embeds, head as heads, shapes
from tfm.attention import mask as masks

# What a model does, by its kind. The kind of another experiment's model is the name of the experiment.
DOES = {
    "causal": "predicts the next token",
    "prefix": "continues a prefix",
    "masked": "predicts masked tokens",
    "classes": "classifies texts",
    "tokens": "classifies tokens",
    "spans": "finds the span of an answer",
    "image": "classifies images",
    "masked_image": "predicts masked patches",
    "translation": "translates sentences",
}
RUNS = {"vision": "image", "text_classification": "classes"}  # experiment -> kind
PEFT = "adapter_config.json"
MERGE_PEFT = "Merge them (merge_and_unload of peft), save the result with save_pretrained, and give its folder."
HEADS = {"causal": heads.next_word, "prefix": heads.next_word, "masked": heads.masked_word}
HEADS |= {"classes": heads.first_word, "tokens": heads.each_word, "spans": heads.each_word}
IMAGES = ("image", "masked_image")  # kinds that read images
ACTIVATIONS = ("hidden", "q", "k", "v", "A", "attention", "mlp")  # names of activations (block.Order)
BATCH = 32  # inputs of `predict` that are computed together
Fetch = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]  # index_B -> inputs_B, valid_BN or None


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A trained model with its settings. Called with a batch of ids or raw images, it returns logits.

    kind: one of DOES, or the name of another experiment. params: our tree of numpy arrays. model: fields of a config's
    `model`. facts: the other arguments of the function in model/model.py that builds the model (W, N, output; Y, X, Z,
    patch, C, output). extras: other properties, such as class_names (hub.Published). table: where each tensor of a
    published model went; '' for a run. trust: the user's code, such as 'my_file:my_score', that the run's config may
    name.
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
            inputs = image_file.prepare(inputs, self.image_format)
        return self.logits(inputs, valid)

    def logits(self, inputs: np.ndarray, valid: np.ndarray | None = None) -> jax.Array:
        """Return logits of ids, or of images that are normalised already, like those in the batches of a run."""
        check_kind(self, self.kind if self.kind in (*HEADS, "image") else "causal")
        return self._apply(self.params, inputs, valid)

    def look(
        self, inputs: np.ndarray, names: Sequence[str] = ("hidden",), valid: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return {name: activation of every layer}, and "features", a vector for each example (B, D). All are float32.

        inputs, valid: ids or raw images, as in a call of the model. names: any of ACTIVATIONS. The activations have a
        leading axis of layers. hidden, attention and mlp have the shape (M, B, N, D). q, k and v have (M, B, H, N, K),
        and k and v may have fewer heads. A has (M, B, H, N, N). A class token is the first of the N tokens.

        The features are tokens after the last norm. A model that predicts the next token gives the last token that is
        not padding. If the head reads only the first token, such as [CLS] or the class token, this is the vector. Else
        it is the mean of the tokens that are not padding. Raises UserError for another kind of model or name.
        """
        if self.kind in IMAGES:
            inputs = image_file.prepare(inputs, self.image_format)
        activations = self.activations(self.params, inputs, valid, names=tuple(names))
        return {name: np.asarray(x) for name, x in activations.items()}

    @functools.cached_property
    def activations(self) -> Callable[..., dict[str, jax.Array]]:
        """The compiled function of `look`: (params, inputs, valid, names=names), for images that are normalised."""
        check_kind(self, *HEADS, *IMAGES, needs_head=False)
        outputs = {"class_token", *models.TEXT_CLASS_HEADS} - {"pooled"}
        reads_first = self.kind in ("image", "classes") and self.facts["output"] in outputs

        def look(params: dict, inputs: jax.Array, valid: jax.Array | None, *, names: tuple[str, ...]) -> dict:
            for name in names:
                by_name.choose("activation", name, dict.fromkeys(ACTIVATIONS, ""))
            network, inputs, mask = self._arguments(inputs, valid)
            x_BND, aux = network.hidden(params, inputs, mask=mask, look=names)
            x_BND = x_BND.astype(jnp.float32)
            valid_BN = jnp.ones(x_BND.shape[:2], bool) if valid is None else valid
            if self.kind in ("causal", "prefix"):
                last_B = x_BND.shape[1] - 1 - jnp.argmax(valid_BN[:, ::-1], axis=1)
                features_BD = jnp.take_along_axis(x_BND, last_B[:, None, None], axis=1)[:, 0]
            else:
                features_BD = x_BND[:, 0] if reads_first else models.average_tokens(x_BND, valid_BN)
            return {"features": features_BD} | {name: x.astype(jnp.float32) for name, x in aux.get("look", {}).items()}

        return jax.jit(look, static_argnames="names")

    def predict(self, inputs: Any, batch: int = BATCH) -> np.ndarray | list[np.ndarray]:
        """Return the predictions for a list of texts, or for images as in `__call__`, in their order.

        Of a classifier, return p_BC, the probabilities of `classes` (each its own if an input may have several labels).
        Of a regression, return its numbers (B, C). Of a classifier of tokens, return p_TC of each text, with the
        special tokens around it. A text of more tokens than the context keeps its beginning; the number of such texts
        is printed. batch: inputs that are computed together, in one compiled shape. Raises UserError for other inputs,
        and for other kinds of models, which have no such predictions: call those, or use the tools sample and fill.
        """
        check_kind(self, "image", "classes", "tokens")
        if self.kind == "image":
            image_BYXZ = image_file.prepare(inputs, self.image_format)
            return self.score(lambda index_B: (image_BYXZ[index_B], None), n=len(image_BYXZ), batch=batch)
        predictions, truncated = self.predict_texts(inputs, batch)
        if truncated:
            context = f"more than the {self.facts['N']} tokens that the model reads, and are truncated"
            print(f"{truncated:,} of {len(predictions):,} texts have {context}", flush=True)
        return predictions

    def predict_texts(self, texts: Sequence[str], batch: int = BATCH) -> tuple[np.ndarray | list[np.ndarray], int]:
        """Return the predictions for texts as `predict` does, and the number of truncated texts."""
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise errors.UserError(f"the model in {self.path} {DOES[self.kind]}. Give a list of texts (str).")
        id_BN, valid_BN, truncated = labelled.encode(self.tokenizer, texts, N=self.facts["N"])
        scores = self.score(fetch_texts(id_BN, valid_BN), n=len(texts), batch=batch)
        if self.kind == "tokens":
            scores = [score_TC[:n] for score_TC, n in zip(scores, valid_BN.sum(1), strict=True)]
        return scores, truncated

    def score(self, fetch: Fetch, *, n: int, batch: int = BATCH) -> np.ndarray:
        """Return the probabilities of n inputs, or the numbers of a regression. fetch: as in `compute`."""
        activation = self.activation or np.asarray
        return np.concatenate([np.asarray(activation(logits)) for logits in self.compute(fetch, n=n, batch=batch)])

    def compute(self, fetch: Fetch, *, n: int, batch: int) -> Iterator[np.ndarray]:
        """Yield the logits of n inputs in batches of one shape. fetch: returns the prepared inputs of these indices."""
        configs.at_least(1, {"batch": batch, "the number of inputs": n})
        params, batch = jax.device_put(self.params), min(batch, n)
        for first in tqdm.tqdm(range(0, n, batch), disable=True if n == batch else None):
            index_B = np.minimum(np.arange(first, first + batch), n - 1)  # the last batch repeats the last input
            yield np.asarray(self._apply(params, *fetch(index_B)))[: n - first]

    @property
    def classes(self) -> Sequence[str]:
        """Return the names of the classes, or of a regression's numbers, in the order of `predict`."""
        if self.kind == "image":
            return self.image_format["classes"]
        with disk.reading(self.path):
            return self.extras["class_names"]

    @property
    def activation(self) -> Callable[[np.ndarray], jax.Array] | None:
        """Return the function from logits to probabilities; None for a regression, by the rules of transformers."""
        problem = self.extras.get("problem_type")
        if problem == "regression" or not problem and len(self.classes) == 1:
            return None
        return jax.jit(jax.nn.sigmoid if problem == "multi_label_classification" else jax.nn.softmax)

    @functools.cached_property
    def tokenizer(self) -> tokenization.Tokenizer:
        """Return the model's tokenizer. Raises UserError as `load_tokenizer` does."""
        return load_tokenizer(self)

    @functools.cached_property
    def image_format(self) -> dict[str, Any]:
        """Return the format of the model's images, to which image files are converted (image_file.load_format)."""
        return image_file.load_format(self.path, self.extras, Z=self.facts["Z"], C=self.facts.get("C"))

    @functools.cached_property
    def _apply(self) -> Callable[[dict, jax.Array, jax.Array | None], jax.Array]:
        facts = {name: fact for name, fact in self.facts.items() if name != "output"}
        token_classifier = dataclasses.replace(self, kind="tokens", facts=facts)

        def apply(params: dict, inputs: jax.Array, valid: jax.Array | None) -> jax.Array:
            is_mean = valid is not None and self.facts.get("output") == "pooled"  # of the tokens that are not padding
            network, inputs, mask = (token_classifier if is_mean else self)._arguments(inputs, valid)
            output = network.apply(params, inputs, mask=mask)[0]
            return models.average_tokens(output, valid) if is_mean else output

        return jax.jit(apply)

    def _arguments(self, inputs: jax.Array, valid: jax.Array | None) -> tuple[models.Model, Any, masks.Mask | None]:
        """Return the network, and its inputs and mask for ids or normalised images. Raises UserError as `network`."""
        N, is_dynamic = self.facts.get("N"), ":dynamic:" in self.model["relative_position"]
        if self.table and is_dynamic and N < inputs.shape[1]:  # transformers rotates longer texts differently
            raise errors.UserError(
                f"the model in {self.path} takes {N} tokens at once. Shorten the text, or use experiments.tools.sample."
            )
        size, mask = {}, models.add_window(self.fields, masks.causal if self.kind in ("causal", "prefix") else None)
        if self.kind in IMAGES:
            size = {"Y": inputs.shape[1], "X": inputs.shape[2]}
            inputs = embeds.cut(inputs, size=self.facts["patch"])
        if self.kind == "masked_image":
            inputs = {"v_BNP": inputs, "hidden_BN": jnp.zeros(inputs.shape[:2], bool)}
        if valid is not None:
            mask = masks.padding(valid) if mask is None else masks.both(mask, masks.padding(valid))
        return self.network(**size), inputs, mask

    @property
    def fields(self) -> Any:
        """Return the section `model` of the model's config. Raises UserError for code that is not in `trust`."""
        for name, value in {**self.model, "output": self.facts.get("output")}.items():
            if isinstance(value, str) and by_name.CODE.fullmatch(value) and value not in self.trust:
                setting = "image.head" if name == "output" else f"model.{name}"
                code = f'{setting} = "{value}", code that would be executed'
                raise errors.UserError(f"{self.path} has {code}. Add --trust={value} if you trust it.")
        missing = ", ".join(name for name in families.MODEL if name not in self.model)
        errors.refuse((missing, f"{self.path}: the section model of its config.json lacks {missing}"))
        return types.SimpleNamespace(**{**families.FREE, **self.model})

    def network(self, **size: Any) -> models.Model:
        """Return the model as functions. size: Y and X of images.

        Raises UserError, with a list, if parameters are missing, left over, of another shape, or not finite.
        """
        if self.kind not in DOES:
            raise errors.UserError(f"the model in {self.path} {explain_kind(self.kind)}")
        if self.kind in HEADS:
            size["head"] = HEADS[self.kind]
        build = {"image": models.build_vision_model, "masked_image": models.build_masked_image_model}
        build |= {"translation": models.build_encoder_decoder}
        fields = self.fields
        with disk.reading(self.path, TypeError, AttributeError, ArithmeticError):
            model = build.get(self.kind, models.build_language_model)(fields, **size, **self.facts)
        arrays, expected = shapes.flat(self.params), shapes.flat(jax.eval_shape(model.init, jax.random.key(0)))
        if self.extras.get("headless"):
            expected = {path: array for path, array in expected.items() if not path.startswith("head/")}
        if self.extras.get("may_have_more") and (more := arrays.keys() - expected.keys()):
            print(
                f"{self.path}: parameters of an experiment of yours are not used: {', '.join(sorted(more))}", flush=True
            )
            arrays = {path: array for path, array in arrays.items() if path in expected}
        label = f"{self.path} does not hold the model that its config.json describes"
        tensors.complain(label, tensors.differences(arrays, expected))
        check_finite(self.path, arrays)
        return model


def open(path: str | os.PathLike, trust: Sequence[str] = ()) -> Trained:
    """Return the model at the path: a run's folder, a checkpoint (RUN/checkpoints/40), or a published model.

        model = open_model.open("runs/x")
        logits_BNW = model(np.array([open_model.load_tokenizer(model).encode("Once upon a time")]))

    Of a run's folder, open the best checkpoint if the run has train.keep_best, else the newest. A published model is a
    folder with config.json and model.safetensors, or one of these files. Raises UserError if there is no model.
    """
    place, step = pathlib.Path(os.path.expanduser(path)), None
    example = "a model is a run's folder, or the folder or file of a published one"
    errors.refuse(
        (not str(path), f"--checkpoint is missing. Add --checkpoint=PATH: {example}"),
        (not os.path.exists(place), f"{path} does not exist; {example}"),  # also if the name is too long
    )
    if place.name == "config.json":
        place = place.parent
    if place.parent.name == "checkpoints" and place.name.isdecimal():
        place, step = place.parents[1], int(place.name)
    if not (place / "config.json").exists():
        is_peft, base = (place / PEFT).is_file(), read_saved(place / PEFT).get("base_model_name_or_path")
        errors.refuse(
            (list(place.glob("*/config.json")), f"{path} is not a run{workdirs.suggest_newest(place, '--checkpoint')}"),
            (is_peft, f"{path} holds only adapters of peft, for the model {base}. {MERGE_PEFT}"),
        )
    if "config" not in read_saved(place / "config.json"):
        return _open_published(place, hub.read(place))
    trust = (trust,) if isinstance(trust, str) else tuple(trust)
    with disk.reading(place / "config.json", TypeError, AttributeError):
        return _open_run(place, records.read_config(place)["config"], trust, step)


def read_saved(file: pathlib.Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if it is missing. Raises UserError if it is damaged."""
    return disk.read_json(file, says="") if os.path.lexists(file) else {}


def _open_run(folder: pathlib.Path, config: dict[str, Any], trust: Sequence[str], step: int | None) -> Trained:
    """Return the model of a run after `step` steps. None: of its best checkpoint, if it is kept, or of its newest."""
    if module := config["model"].get("flax"):
        raise errors.UserError(
            f"{folder} has the Flax module model.flax = {module}, which the tools cannot open. Use the result of "
            "launch.run(config, workdir), which has params and apply"
        )
    checkpoints = folder / "checkpoints"
    steps, last, metric = manifest.steps(checkpoints), checkpoint.newest(checkpoints), config["train"]["keep_best"]
    metrics = losses.choose_metrics(config["train"].get("metrics", [])) if metric else {}
    best = checkpoint.choose_best(metric, {name: metrics[name].better for name in metrics})
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    if step is None and last is not None:
        step = (checkpoint.find_best(checkpoints, best) or {"step": last})["step"]
        if step != last:
            newest = f"the newest is {checkpoints / str(last)}"
            print(f"{folder}: opening step {step:,}, the best by {metric}; {newest}", flush=True)
    if step not in steps:
        listed = ", ".join(map(str, sorted(steps))) or "none"
        raise errors.UserError(f"{folder} has no {wanted}; its steps are: {listed}")
    params = checkpoint.parameters(checkpoints, step)
    params = adapters.merge(params, config["optim"]["lora"])
    data = records.read_data(folder)
    kind, facts = _find_facts(config, params, data.get("kind") or config["experiment"])
    extras = {"class_names": data["classes"]} if "C" in facts and data.get("classes") else {}
    extras |= {"may_have_more": True} if data.get("kind") else {}
    extras |= {"documents": config["text"].get("documents", False)} if kind == "causal" else {}
    return Trained(folder, kind, params, config["model"], facts, extras, "", trust)


def _find_facts(config: dict[str, Any], params: dict, experiment: str) -> tuple[str, dict[str, Any]]:
    """Return a run's kind of model, and the arguments of its function in model/model.py.

    experiment: the built-in one that defines the model (runs.Work.kind).
    """
    kind, head = RUNS.get(experiment, experiment), params.get("head", {})
    facts: dict[str, Any] = {}
    if kind in ("language", "classes"):
        facts = {"N": config["text"]["N"], "output": config["text"]["head"]}
        kind = config["text"]["objective"] if kind == "language" else kind
    elif kind == "translation":
        facts = {"N": config["pairs"]["N"], "tied_output": "G_WD" not in head}
    elif kind in ("image", "masked_image"):
        patch = config["image"]["patch"]
        facts = {"patch": patch, "Z": params["embed"]["W_DP"].shape[1] // patch**2}
    if kind == "image":
        facts["output"] = config["image"]["head"]
    if kind in ("image", "classes"):
        facts["C"] = head["G_CD"].shape[0]
    if kind in (*HEADS, "translation"):
        facts["W"] = params["embed"]["E_WD"].shape[0]
    return kind, facts


def _open_published(path: pathlib.Path, published: hub.Published) -> Trained:
    """Return a published model. Missing biases of queries, keys and values are zero, as ours have all or none."""
    extras, params = published.extras, published.params
    names = ("patch", "C", "Z", "output") if extras["kind"] == "image" else ("W", "N", "output", "C")
    facts = {name: extras[name] for name in names if name in extras}
    if not extras.get("query_bias", True):
        score, value = params["blocks"]["score"], params["blocks"]["value"]
        zeros_MHK = np.zeros(score["Uq_HKD"].shape[:3], np.float32)
        biases = {"score": {**score, "bq_HK": zeros_MHK, "bk_HK": zeros_MHK}, "value": {**value, "bv_HK": zeros_MHK}}
        params = {**params, "blocks": params["blocks"] | biases}
    return Trained(path, extras["kind"], params, published.model, facts, extras, published.table)


def fetch_texts(id_BN: np.ndarray, valid_BN: np.ndarray) -> Fetch:
    """Return a function for `Trained.compute`: padded texts, without the columns that are padding in all of them."""
    T = np.count_nonzero(valid_BN.any(0))
    is_padded = not valid_BN[:, :T].all()
    return lambda index_B: (id_BN[index_B, :T], valid_BN[index_B, :T] if is_padded else None)


def check_kind(model: Trained, *kinds: str, needs_head: bool = True) -> None:
    """Raise UserError unless the model has one of these kinds and, if needs_head, a head."""
    if model.kind in kinds and not (needs_head and model.extras.get("headless")):
        return
    does = DOES.get(model.kind) or explain_kind(model.kind)
    does = "has no head" if model.kind in kinds else does
    wanted = " or ".join(DOES[kind] for kind in kinds)
    raise errors.UserError(f"the model in {model.path} {does}; this command needs a model that {wanted}")


def explain_kind(experiment: str) -> str:
    """Return why the model of an experiment is not built from its settings, as the end of a sentence."""
    return (
        f"belongs to the experiment {experiment}, whose code may change it, so it is not built from its settings. Use "
        "the result of launch.run, which has params and apply; or, if it is the model of one of our experiments, let "
        'prepare return work._replace(kind="language")'
    )


def check_finite(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise UserError if parameters are not finite. path: the file or folder that contains them."""
    invalid = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    tensors.complain(f"{path} holds values that are not finite numbers", invalid)


def load_tokenizer(model: Trained) -> tokenization.Tokenizer:
    """Return the tokenizer of the model. Raises UserError if it has none, or one with more tokens than the model."""
    W, tokenizer = model.facts["W"], pretrained_tokenizer.read(folder_of(model))
    if tokenizer.size > W:
        raise errors.UserError(
            f"the tokenizer at {model.path} has {tokenizer.size} tokens, more than the {W} of its model"
        )
    return tokenizer


def list_end_ids(model: Trained, tokenizer: tokenization.Tokenizer) -> list[int]:
    """Return the ids that end a text: those in a published model's files, else the tokenizer's eos and bos.

    bos ends the text before it, because a model may have learned from texts that follow each other.
    """
    ids = model.extras.get("ids", {}).get("eos_token_id", [])
    ids = [id for id in (ids if isinstance(ids, list) else [ids]) if id < model.facts["W"]]
    return list(dict.fromkeys(ids or [id for id in (tokenizer.eos, tokenizer.bos) if id is not None]))


def folder_of(model: Trained) -> pathlib.Path:
    """Return the folder that contains the model's files, such as its tokenizer."""
    return model.path if model.path.is_dir() else model.path.parent


def find_tokenizer(model: Trained) -> pathlib.Path | None:
    """Return the file that holds the model's tokenizer, or None."""
    return pretrained_tokenizer.find(folder_of(model))
