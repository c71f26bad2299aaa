"""A trained model: its logits, its activations and its predictions."""

import dataclasses
import functools
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.tree_util import Partial

from experiments.config import by_name, disk, errors, settings as configs
from experiments.data import image_file, image_folder, labelled, pretrained_tokenizer, tokenization
from experiments.model import build, variants
from experiments.pretrained import families, tensors
from tfm import embed as embeds, head as heads, models, shapes
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
    "synthetic": "predicts a token for each token",
}
# Heads of tokens. None: the one that text.head names.
HEADS = {"causal": heads.next_word, "prefix": heads.next_word, "masked": heads.masked_word}
HEADS |= {"classes": None, "tokens": heads.each_word, "spans": heads.each_word, "synthetic": heads.masked_word}
# Kind -> the function that builds the model, and the facts that are its arguments.
BUILD = {
    "image": (build.vision_model, "Y X Z patch C output"),
    "masked_image": (build.masked_image_model, "Y X Z patch"),
    "translation": (build.encoder_decoder, "W N tied_output"),
} | dict.fromkeys(HEADS, (build.language_model, "W N C output"))
CAUSAL = ("causal", "prefix")  # kinds that predict the next token
IMAGES = ("image", "masked_image")  # kinds that read images
# Names of activations (block.Order), and their axes. G: heads of keys and values, at most H.
ACTIVATIONS = {
    "hidden": "M B N D",
    "q": "M B H N K",
    "k": "M B G N K",
    "v": "M B G N V",
    "A": "M B H N N",
    "y": "M B H N V",
    "attention": "M B N D",
    "mlp": "M B N D",
}
BATCH = 32  # inputs that are computed together
Fetch = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]  # index_B -> inputs_B, valid_BN or None


def read_fields(model: "Trained") -> types.SimpleNamespace:
    """Return the section `model` of the config as attributes.

    Raises UserError for missing fields, and for user's code, such as "my_file:my_score", that is not in model.trust.
    """
    check_trust(model.path, {"model": model.model, "image": {"head": model.facts.get("output")}}, model.trust)
    missing = ", ".join(name for name in families.MODEL if name not in model.model)
    errors.refuse((missing, f"{model.path}: the section model of its config.json lacks {missing}"))
    return types.SimpleNamespace(**{**families.FREE, **model.model})


def make_network(model: "Trained", **options: Any) -> models.Model:
    """Return the model's functions (tfm/models.py). options: replace facts of the model, such as Y and X of images.

    Raises UserError if the model is of an experiment that is not built in, or if its settings and facts do not fit.
    """
    if model.kind not in DOES:
        raise errors.UserError(f"the model in {model.path} {explain_kind(model.kind)}")
    function, names = BUILD[model.kind]
    facts = {"head": HEADS[model.kind]} if model.kind in HEADS else {}
    facts |= {name: model.facts[name] for name in names.split() if name in model.facts}
    facts |= {"head": heads.each_word, "output": "linear"} if is_pooled(model) else {}
    with disk.reading(model.path, TypeError, AttributeError, ArithmeticError):
        return model.own or function(model.fields, **facts | options)


def is_pooled(model: "Trained") -> bool:
    """Return True if the logits of a text are the mean of those of its tokens (experiments/text_classification.py)."""
    return model.kind == "classes" and model.facts["output"] == "pooled"


def expect(model: "Trained", network: models.Model) -> dict:
    """Return the tree of the shapes of a model's parameters. network: the functions of the model.

    Its "head" is empty if the model ends before its logits.
    """
    params = jax.eval_shape(network.init, jax.random.key(0))
    return params | ({"head": {}} if model.facts.get("headless") else {})


def build_network(model: "Trained", **options: Any) -> models.Model:
    """Return make_network(model, **options).

    Raises UserError if parameters are missing, left over, misshaped or not finite.
    """
    network, arrays = make_network(model, **options), shapes.flat(model.params)
    label = f"{model.path} does not hold the model that its config.json describes"
    tensors.complain(label, tensors.differences(arrays, shapes.flat(expect(model, network))))
    check_finite(model.path, arrays)
    return network


def make_compute(model: "Trained", edit: Mapping[str, Callable] = {}) -> Callable[..., tuple[jax.Array, dict]]:
    """Return the compiled function (params, inputs, valid, n_B, edits, names, output) -> (output, activations).

    output: "logits", or "features" as in Trained.look; then features and activations are float32. valid, n_B,
    names: the arguments `valid`, `at` and `look` of Trained.run. edits: {name: edit} of edits that are pytrees
    (Partial), whose arrays may change without a compilation. edit: {name: any other function}, compiled into the
    program.
    """

    def compute(
        params: dict, inputs: Any, valid: Any = None, n_B: Any = None, edits: Any = (), *, names: Any = (), output: str
    ) -> tuple[jax.Array, dict]:
        if output == "features":
            check_kind(model, *HEADS, *IMAGES, needs_head=False)
        network, x_BND, aux = _forward(model, params, inputs, valid, look=names, edit={**edit, **dict(edits)})
        real_BN, activations = jnp.ones(x_BND.shape[:2], bool) if valid is None else valid, aux.get("look", {})
        if output == "features":
            activations = {name: x.astype(jnp.float32) for name, x in activations.items()}
            return _summarise(model, x_BND.astype(jnp.float32), real_BN), activations
        if n_B is not None:
            return network.logits(params, _choose(x_BND, n_B)[:, None])[:, 0], activations
        logits = network.logits(params, x_BND)
        return build.average_tokens(logits, real_BN) if is_pooled(model) else logits, activations

    return jax.jit(compute, static_argnames=("names", "output"))


def _summarise(model: "Trained", x_BND: jax.Array, real_BN: jax.Array) -> jax.Array:
    """Return the features (B, D) of Trained.look. real_BN: True for tokens that are not padding."""
    if model.kind in CAUSAL:
        return _choose(x_BND, -1 - jnp.argmax(real_BN[:, ::-1], axis=1))
    outputs = {"class_token", *build.TEXT_CLASS_HEADS} - {"pooled"}
    reads_first = model.kind in ("image", "classes") and model.facts["output"] in outputs
    return x_BND[:, 0] if reads_first else build.average_tokens(x_BND, real_BN)


def _choose(x_BND: jax.Array, n_B: jax.Array) -> jax.Array:
    """Return x_BD: token n_B[b] of each input b, or token n_B of all inputs. -1 is the last token."""
    n_B = jnp.broadcast_to(n_B, len(x_BND)) % x_BND.shape[1]
    return jnp.take_along_axis(x_BND, n_B[:, None, None], axis=1)[:, 0]


def _forward(
    model: "Trained", params: dict, inputs: jax.Array, valid: jax.Array | None, **options: Any
) -> tuple[models.Model, jax.Array, dict]:
    """Return the model's functions, X^(M) and aux for ids or normalised images. options: look and edit of heads.Call.

    The inputs of a model that translates are a tuple (source_BS, valid_BS, w_BN), where w_BN are target ids.
    """
    for name in (*options["look"], *options["edit"]):
        by_name.choose("activation", name, dict.fromkeys(model.names(), ""))
    if model.kind == "translation":
        network = model.network()
        return network, *network.hidden(params, *inputs, **options)
    N, is_dynamic = model.facts.get("N"), variants.choose(model.fields, "relative_position").is_dynamic
    if model.table and is_dynamic and N < inputs.shape[1]:  # transformers rotates longer texts differently
        raise errors.UserError(
            f"the model in {model.path} takes {N} tokens at once. Shorten the text, or use experiments.tools.sample."
        )
    sides = {"Y": inputs.shape[1], "X": inputs.shape[2]} if model.kind in IMAGES else {}
    network = model.network(**sides)
    if model.kind in IMAGES:
        inputs = embeds.cut(inputs, size=model.facts["patch"])
    if model.kind == "masked_image":
        inputs = {"v_BNP": inputs, "hidden_BN": jnp.zeros(inputs.shape[:2], bool)}
    is_causal = model.kind in CAUSAL or model.facts.get("causal", False)
    mask = build.add_window(model.fields, masks.causal if is_causal else None)
    if valid is not None:
        mask = masks.padding(valid) if mask is None else masks.both(mask, masks.padding(valid))
    return network, *network.hidden(params, inputs, mask=mask, **options)


def check_token(model: "Trained", inputs: Any, n_B: Any) -> None:
    """Raise UserError if the model has no logits of single tokens, or if n_B is outside the tokens of the inputs.

    n_B: as `at` in Trained.run; None is not checked. A traced n_B, and one for patches of images, may be outside.
    """
    if n_B is None:
        return
    does = f"at = {n_B}: the model in {model.path} {DOES[model.kind]}, and has no logits of each token"
    errors.refuse((model.kind in ("image", "classes"), does))
    if model.kind not in IMAGES and not isinstance(n_B, jax.core.Tracer):
        N = (inputs[2] if model.kind == "translation" else inputs).shape[1]
        outside = not np.all((np.asarray(n_B) >= -N) & (np.asarray(n_B) < N))
        errors.refuse((outside, f"at = {n_B} is outside the {N} tokens of the inputs. Choose from {-N} to {N - 1}"))


def in_batches(function: Callable[..., Any], fetch: Fetch, *, n: int, batch: int = BATCH) -> Iterator[Any]:
    """Yield function(inputs_B, valid_BN) for each batch of n inputs, as numpy.

    fetch: index_B -> (inputs_B, valid_BN or None). The last batch is filled with copies of the last input. The caller
    cuts off their results. Raises UserError if n or `batch` is less than 1.
    """
    configs.at_least(1, {"batch": batch, "the number of inputs": n})
    batch = min(batch, n)
    for first in tqdm.tqdm(range(0, n, batch), disable=True if n == batch else None):
        yield jax.device_get(function(*fetch(np.minimum(np.arange(first, first + batch), n - 1))))


def predict(model: "Trained", fetch: Fetch, *, n: int, batch: int = BATCH) -> np.ndarray:
    """Return the probabilities (n, C), or (n, N, C) for tokens, or the outputs (n, C) of a regression.

    fetch: index_B -> (inputs_B, valid_BN or None). batch: inputs that are computed together.
    """
    several = model.facts.get("problem_type") == "multi_label_classification"
    activation = np.asarray if is_regression(model) else jax.jit(jax.nn.sigmoid if several else jax.nn.softmax)
    compute = functools.partial(model.compute, jax.device_put(model.params), output="logits")
    return np.concatenate([activation(logits) for logits, _ in in_batches(compute, fetch, n=n, batch=batch)])[:n]


def predict_texts(
    model: "Trained", texts: Sequence[str], batch: int = BATCH
) -> tuple[np.ndarray | list[np.ndarray], int]:
    """Return the predictions for texts, and the number of truncated texts.

    The predictions are p_BC, the numbers (B, C) of a regression, or p_TC of each text if the model classifies tokens
    (see `Trained.predict`). Raises UserError if `texts` is one str, or has an item that is not a str.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise errors.UserError(f"the model in {model.path} {DOES[model.kind]}. Give a list of texts (str).")
    id_BN, valid_BN, truncated = labelled.encode(model.tokenizer, texts, N=model.facts["N"])
    predictions = predict(model, fetch_texts(id_BN, valid_BN), n=len(texts), batch=batch)
    if model.kind == "tokens":
        predictions = [p_TC[:n] for p_TC, n in zip(predictions, valid_BN.sum(1), strict=True)]
    return predictions, truncated


def fetch_texts(id_BN: np.ndarray, valid_BN: np.ndarray) -> Fetch:
    """Return index_B -> (id_BN, valid_BN) of padded texts, without the columns that are padding in all of them.

    valid_BN: True for ids that are not padding; None if no padding is left. `in_batches` takes the function as `fetch`.
    """
    T = np.count_nonzero(valid_BN.any(0))
    is_padded = not valid_BN[:, :T].all()
    return lambda index_B: (id_BN[index_B, :T], valid_BN[index_B, :T] if is_padded else None)


def fetch_images(images: Sequence[Any], form: Mapping[str, Any]) -> Fetch:
    """Return the `fetch` of `in_batches`: index_B -> (images normalised like the training data, None).

    images: files (data_files.File), or an array of raw images. form: the format of the model's images
    (image_file.load_format).
    """
    if isinstance(images, np.ndarray):
        image_BYXZ = image_file.prepare(images, form)
        return lambda index_B: (image_BYXZ[index_B], None)
    return lambda index_B: (image_folder.read_batch([images[b] for b in index_B], form), None)


def is_regression(model: "Trained") -> bool:
    """Return True if the outputs are numbers without an activation, as in transformers.

    That is: problem_type is "regression", or it is not set and there is one class.
    """
    problem = model.facts.get("problem_type")
    return problem == "regression" or not problem and len(model.classes) == 1


def check_kind(model: "Trained", *kinds: str, needs_head: bool = True) -> None:
    """Raise UserError unless the model has one of these kinds (keys of DOES) and, if needs_head, a head."""
    if model.kind in kinds and not (needs_head and model.facts.get("headless")):
        return
    does = "has no head" if model.kind in kinds else DOES.get(model.kind) or explain_kind(model.kind)
    wanted = " or ".join(DOES[kind] for kind in kinds)
    raise errors.UserError(f"the model in {model.path} {does}; this command needs a model that {wanted}")


def explain_kind(experiment: str) -> str:
    """Return why the model of an experiment is not built from its settings, and what to do: the end of a sentence."""
    return (
        f"belongs to the experiment {experiment}, whose code may change it, so it is not built from its settings. Use "
        "the result of launch.run, which has params and apply; or, if Work.model has all changes, let prepare return "
        'work._replace(kind="language")'
    )


def check_trust(path: pathlib.Path, config: Mapping[str, Any], trust: Sequence[str]) -> None:
    """Raise UserError unless `trust` has all code of users that `config` names, because it would be executed.

    path: the model's folder, for the message.
    """
    for key, text in configs.find_code("", config):
        refused = f'{path} has {key} = "{text}", code that would be executed. Add --trust={text} if you trust it.'
        errors.refuse((text not in trust, refused))


def check_finite(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise UserError if parameters are not finite. path: the file or folder that contains them."""
    invalid = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    tensors.complain(f"{path} holds values that are not finite numbers", invalid)


def list_end_ids(model: "Trained", tokenizer: tokenization.Tokenizer) -> list[int]:
    """Return the token ids that end a text: those in a published model's files, else the tokenizer's eos and bos.

    bos ends a text too, because training texts may follow each other.
    """
    ids = model.facts.get("ids", {}).get("eos_token_id", [])
    ids = [id for id in (ids if isinstance(ids, list) else [ids]) if id < model.facts["W"]]
    return list(dict.fromkeys(ids or [id for id in (tokenizer.eos, tokenizer.bos) if id is not None]))


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A trained model with its settings. Called with a batch of ids or raw images, it returns logits.

    path: its folder. kind: a key of DOES, or the name of another experiment. params: our tree of numpy arrays. model:
    fields of a config's `model`. facts: other properties, such as arguments of the function that builds the model
    (BUILD), class_names, and those of a published model (hub.interpret). table: a text with our path of each tensor of
    a published model; '' for a run. trust: the user's code, such as 'my_file:my_score', that the run's config may name.
    own: the model that the user's experiment prepared; None: the model is built from its settings.
    """

    path: pathlib.Path
    kind: str
    params: dict = dataclasses.field(repr=False)  # a notebook shows what a cell ends with
    model: dict[str, Any]
    facts: dict[str, Any] = dataclasses.field(repr=False)
    table: str = dataclasses.field(default="", repr=False)
    trust: Sequence[str] = ()
    own: models.Model | None = dataclasses.field(default=None, repr=False)

    def __call__(self, inputs: np.ndarray, valid: np.ndarray | None = None) -> jax.Array:
        """Return logits: next-token or masked-token logits of w_BN (..BNW), class logits of images (..BC).

        valid: valid_BN, True for ids that are not padding. Images are raw: uint8, or numbers of the model's own data.
        `image_file.prepare` normalises them like the training data. Raises UserError if the model has no such logits.
        """
        return self.logits(self.normalise(inputs), valid)

    def logits(self, inputs: np.ndarray, valid: np.ndarray | None = None) -> jax.Array:
        """Return logits of ids, or of images that are normalised already, like those in the batches of a run.

        valid: valid_BN, False for padding. Raises UserError if the model has no head, translates, predicts pixels, or
        comes from an experiment whose code may change it.
        """
        check_kind(self, self.kind if self.kind in (*HEADS, "image") else "causal")
        return self.compute(self.params, inputs, valid, output="logits")[0]

    def normalise(self, inputs: Any) -> Any:
        """Return raw images normalised like the training data, and other inputs unchanged."""
        return image_file.prepare(inputs, self.image_format) if self.kind in IMAGES else inputs

    def run(
        self,
        inputs: Any,
        *,
        edit: Mapping[str, Callable] = {},
        look: Sequence[str] = (),
        valid: np.ndarray | None = None,
        at: int | np.ndarray | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (logits, {name: activation of every layer}) with some activations replaced.

        It can be called in jit, vmap and grad; token ids and the arrays of edits may be traced, images may not.

        inputs, valid: as in a call of the model; for a model that translates, the tuple (source_BS, valid_BS, w_BN),
        and activations are those of the decoder. edit: {name: (x, m) -> x}, functions that replace the activation x of
        layer m (0 is the first). Edits of tfm.inside are arguments of one compiled program; for other functions the
        program is compiled at each call. look: the names of activations to return. `names()` lists all with their axes.
        at: compute only the logits_BW of this token, or of token at[b] of input b; -1 is the last column, which may be
        padding. Raises UserError for unknown names, for a model without a head, and for `at` outside the tokens or
        without such logits.
        """
        check_kind(self, *BUILD)
        check_token(self, inputs, at)
        return self._compute(inputs, valid, at, edit, names=tuple(look), output="logits")

    def names(self) -> dict[str, str]:
        """Return {name: axes, such as "M=2 B N D=64"} of the activations that `run` returns and edits.

        `look` returns them too. M: layers, B: inputs, N: tokens, H: heads, G: heads of keys and values. block.Order
        explains the names.
        """
        m = self.fields
        shown = {"M": f"M={m.M}", "D": f"D={m.D}", "H": f"H={m.H}", "K": f"K={m.K or m.D // m.H}"}
        axes = ACTIVATIONS | ({"A_cross": "M B H N S"} if self.kind == "translation" else {})
        return {name: " ".join(shown.get(letter, letter) for letter in text.split()) for name, text in axes.items()}

    def look(
        self,
        inputs: np.ndarray,
        names: Sequence[str] = ("hidden",),
        valid: np.ndarray | None = None,
        edit: Mapping[str, Callable] = {},
    ) -> dict[str, np.ndarray]:
        """Return {name: activation of every layer}, and "features", a vector for each example (B, D). All are float32.

        inputs, valid: ids or raw images, as in a call of the model. names: any of `names()`, which has the axes of the
        activations. A class token is the first of the N tokens. edit: as in `run`.

        The features are tokens after the last norm. A model that predicts the next token gives the last token that is
        not padding. If the head reads only the first token, such as [CLS] or the class token, this is the vector. Else
        it is the mean of the tokens that are not padding. Raises UserError for a model that translates or is of a
        user's experiment, and for an unknown name.
        """
        features_BD, activations = self._compute(inputs, valid, None, edit, names=tuple(names), output="features")
        return jax.device_get({"features": features_BD} | activations)

    def _compute(
        self, inputs: Any, valid: Any, at: Any, edit: Mapping[str, Callable], **static: Any
    ) -> tuple[jax.Array, dict]:
        """Return the results of make_compute's function for raw inputs. static: its arguments `names` and `output`."""
        edits = {name: function for name, function in edit.items() if isinstance(function, Partial)}
        others = {name: function for name, function in edit.items() if name not in edits}
        compute = make_compute(self, others) if others else self.compute
        return compute(self.params, self.normalise(inputs), valid, at, edits, **static)

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
            image_BYXZ = self.normalise(inputs)
            return predict(self, lambda index_B: (image_BYXZ[index_B], None), n=len(image_BYXZ), batch=batch)
        predictions, truncated = predict_texts(self, inputs, batch)
        if truncated:
            context = f"more than the {self.facts['N']} tokens that the model reads, and are truncated"
            print(f"{truncated:,} of {len(predictions):,} texts have {context}", flush=True)
        return predictions

    @functools.cached_property
    def tokenizer(self) -> tokenization.Tokenizer:
        """Return the tokenizer. Raises UserError if there is none, or one with more tokens than the model."""
        W, tokenizer = self.facts["W"], pretrained_tokenizer.read(self.path)
        more = f"the tokenizer at {self.path} has {tokenizer.size} tokens, more than the {W} of its model"
        errors.refuse((tokenizer.size > W, more))
        return tokenizer

    @functools.cached_property
    def image_format(self) -> dict[str, Any]:
        """Return the format of the model's images, as image_file.load_format reads it from the model's folder.

        image_file.read and image_file.prepare convert images to it. Raises UserError as load_format does.
        """
        return image_file.load_format(self.path, self.facts, Z=self.facts["Z"], C=self.facts.get("C"))

    @property
    def classes(self) -> Sequence[str]:
        """Return the names of the classes, or of a regression's numbers, in the order of `predict`.

        Raises UserError if the model has no such names.
        """
        with disk.reading(self.path):
            return self.image_format["classes"] if self.kind == "image" else self.facts["class_names"]

    fields = property(read_fields)
    network = build_network
    compute = functools.cached_property(make_compute)
