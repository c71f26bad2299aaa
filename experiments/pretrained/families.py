"""Families of published models: for each, tables of its config.json and of its tensors, and functions for the rest.

`settings` is one dictionary: the fields of a config's `model`, sizes by their letters, and further properties of a
published model (tied_output, headless, patch, ...). The first table translates config.json to settings and back, the
second the names of tensors to our paths (tensors.py).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.config import errors
from experiments.model import build, variants
from experiments.pretrained import tensors

HfConfig = Mapping[str, Any]
Settings = dict[str, Any]
# Name of the MLP's activation in config.json -> our name. `write` takes the first name with our name.
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu", "tanh": "tanh"}
ACTIVATIONS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh")
ACTIVATIONS |= {"gelu_python": "gelu", "quick_gelu": "quick_gelu", "swish": "silu"}
SIZES = {"M": "num_hidden_layers", "D": "hidden_size", "H": "num_attention_heads", "F": "intermediate_size"}
SIZES |= {"W": "vocab_size", "N": "max_position_embeddings", "Z": "num_channels"}
SIZES |= {"segments": "type_vocab_size"}  # the names that most families have for a size
# The other fields of a config's `model`, besides the sizes M, D, H, G, K and F, for a model without special features.
PLAIN = {
    **{"score": "asymmetric", "scale": "1/sqrt(K)", "cap": 0.0, "output_cap": 0.0, "value": "low_rank"},
    **{"norm": "token", "mlp": "gelu", "position": "learned", "relative_position": "none", "window": 0},
    **{"block": "pre_norm", "outer_norm": "last", "segments": 0, "bias": "all"},
    **{"weights": "softmax", "flax": "", "mup": 0, "mup_depth": ""},
}
MODEL = (*"MDHGKF", *PLAIN)
# Fields of `model` that do not change what a trained model computes. Published files do not have them, so that these
# are the defaults of base.py. Our copies of published parameters are float32, and float32 rounds least.
FREE = {"score_std": 1.0, "output_std": 1.0, "embed_std": 1.0, "dropout": 0.0, "attention": "flash", "remat": "none"}
FREE |= {"compute_dtype": "float32"}
SAME_SCORES = ("symmetric_init", "asymmetric_std")  # they differ from asymmetric only in their initial values
TRUE = {True: True, False: False}  # choices of a field that is true by default
FALSE = {False: False, True: True}
# Our paths of a layer's tensors, in the order of `name_layer`.
LAYER = ("score/Uq bq", "score/Uk bk", "value/Uv bv", "value/Uo bo", "norm1/gain shift")
LAYER += ("mlp/W1 b1", "mlp/W2 b2", "norm2/gain shift", "mlp/Wg bg")


def name_sizes(**defaults: int) -> dict[str, tuple[str, int]]:
    """Return Family.sizes, {letter: (field of config.json, default)}, with the field names of most families (SIZES)."""
    return {letter: (SIZES[letter], default) for letter, default in defaults.items()}


def name_layer(layer: str, names: str) -> dict[str, str]:
    """Return {"LAYER + NAME.*": our paths of its weight and bias} for a layer's tensors, entries of Family.table.

    layer: LAYER, the beginning of the published names. names: each further NAME, divided by spaces: queries, keys,
    values, output and norm of attention, the MLP's two matrices and its norm, and a gate. The last ones may be missing.
    """
    return {f"{layer}{name}.*": f"blocks/{ours}" for name, ours in zip(names.split(), LAYER, strict=False)}


class Head(NamedTuple):
    """A head: the end of the name of transformers' class, our name of the head, and its tensors (as in Family.table).

    output: the value of text.head or image.head. Next-token and masked-token heads give only the activation of the
    layer before the output: "" if there is no such layer, "mlp" for the activation of the model's MLP.
    """

    suffix: str
    output: str
    table: Mapping[str, str]


class Family(NamedTuple):
    """A family of published models. The defaults fit a causal language model.

    `arrays`, an argument of its functions, are a file's tensors by name without `prefix`, which some files lack.
    """

    architecture: str  # the beginning of the names of transformers' classes
    # The table of config.json. A field that is null or missing has the default.
    sizes: Mapping[str, tuple[str, int]]  # letter -> (field, default)
    choices: Mapping[str, tuple[str, Mapping[Any, Any]]]  # setting -> (field, {field's value: ours}), default first
    epsilon: tuple[str, float] | None  # (field, default) of the number of model.norm
    # The tables of tensors. Entries for parameters that a model lacks, such as biases, are ignored (tensors.select).
    prefix: str
    table: Mapping[str, str]  # names of published tensors -> our paths, without the head
    heads: Mapping[str, Head]  # kind (trained.DOES) -> head
    # (config, settings of the tables) -> the settings, completed by fields that are not in the tables
    read: Callable[..., Settings] = lambda config, settings: settings
    # (settings, family) -> the fields of config.json that are not in the table
    write: Callable[..., dict[str, Any]] = lambda settings, family: {}
    transposed: bool = False  # whether the matrices of layers have a row for each input (tensors.select)
    plain: Settings = PLAIN  # settings that are not in config.json
    fixed: Mapping[str, Any] = {}  # fields for which one value is supported, which is also the default
    ids: tuple[str, ...] = ("bos_token_id", "eos_token_id", "pad_token_id")  # fields that are ids of tokens
    unprefixed: tuple[str, ...] = ("lm_head.",)  # names that begin with one of these never have the prefix
    tied: Mapping[str, str] = {}  # tensors that equal others if the output is tied to the embedding
    buffers: tuple[str, ...] = ()  # tensors without parameters; {m} stands for the layer
    clean: Callable[..., tensors.Arrays] = lambda arrays, settings, family: arrays  # prepares the tensors for the table
    restore: Callable[..., tensors.Arrays] = lambda arrays, settings, family: arrays  # the inverse of `clean`


def read(family: Family, config: HfConfig) -> Settings:
    """Return our settings for a config.json. Raises UserError if values are unsupported or do not fit together."""
    expect(config, family.fixed)
    settings = dict(family.plain)
    settings |= {letter: size(config, name, default) for letter, (name, default) in family.sizes.items()}
    settings |= {setting: choose(config, name, choices) for setting, (name, choices) in family.choices.items()}
    if family.epsilon:
        epsilon = variants.format_number(number(config, *family.epsilon))
        settings["norm"] = variants.join("norm", settings["norm"], epsilon)
    settings = family.read(config, settings)
    D, H, G = settings["D"], settings["H"], settings.get("G", 1)
    if H % G or ("K" not in settings and D % H):
        sizes_text = f"D = {D} features, H = {H} heads and G = {G} heads of keys"
        raise errors.UserError(f"config.json has {sizes_text}. G must divide H and, without head_dim, H must divide D.")
    return {"G": H, "K": D // H} | settings


def write(family: Family, kind: str, settings: Settings) -> dict[str, Any]:
    """Return the fields of config.json: the inverse of `read`, without Family.fixed. kind: a key of Family.heads."""
    config = {name: settings[letter] or None for letter, (name, _) in family.sizes.items()}
    for setting, (name, choices) in family.choices.items():
        config[name] = next((theirs for theirs, ours in choices.items() if ours == settings[setting]), None)
    if family.epsilon:
        config[family.epsilon[0]] = float(variants.split("norm", settings["norm"])[1])
    suffix = "Model" if settings["headless"] else family.heads[kind].suffix
    config["architectures"] = [family.architecture + suffix]
    if "C" in settings:
        names = settings.get("class_names") or [f"LABEL_{i}" for i in range(settings["C"])]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
        config["problem_type"] = settings.get("problem_type")
    return config | family.write(settings, family)


def name_output(family: Family, kind: str, settings: Settings) -> str:
    """Return the value of text.head or image.head, such as "tied+gelu". kind: a key of Family.heads."""
    layer = family.heads[kind].output
    if kind not in ("causal", "masked"):
        return layer
    return build.name_head(settings["tied_output"], settings["mlp"] if layer == "mlp" else layer)


def require(valid: bool, name: str, value: Any, allowed: str) -> None:
    """Raise UserError unless `valid`. name, value: a field of config.json. allowed: its right values, in words."""
    if not valid:
        raise errors.UserError(f"config.json: {name} = {value!r} is not supported. It must be {allowed}.")


def number(config: HfConfig, name: str, default: float) -> float:
    """Return the field as a finite number >= 0 (`default` if missing or null). Raises UserError for other values."""
    value = default if config.get(name) is None else config[name]
    require(type(value) in (int, float) and 0 <= value < float("inf"), name, value, "a number from 0 on")
    return float(value)


def size(config: HfConfig, name: str, default: int) -> int:
    """Return the field `name`, an integer >= 1; `default` if it is missing or None. Raises UserError for others."""
    value = default if config.get(name) is None else config[name]
    require(type(value) is int and value >= 1, name, value, "an integer from 1 on")
    return value


def choose(config: HfConfig, name: str, choices: Mapping[Any, Any]) -> Any:
    """Return choices[config[name]], our value for theirs; the first choice if the field is missing or null.

    Raises UserError for a value that is not in `choices`.
    """
    value = next(iter(choices)) if config.get(name) is None else config[name]
    require(value in [*choices], name, value, " or ".join(map(str, choices)))
    return choices[value]


def expect(config: HfConfig, fixed: Mapping[str, Any]) -> None:
    """Raise UserError if a field has another value than in `fixed`. A field may be missing or null."""
    for name, value in fixed.items():
        choose(config, name, {value: value})


def read_labels(config: HfConfig, rows: int | None, path: Any) -> list[str]:
    """Return a class name for each row of the classification head: from id2label in config.json, else LABEL_i.

    rows: their number; None if the file has no head: then the number of names in id2label, else num_labels. Print a
    warning with the folder `path` if there is an id2label and it does not name exactly these rows.
    """
    names = config.get("id2label") or {}
    rows = rows or len(names) or size(config, "num_labels", 2)
    if names and names.keys() != {str(i) for i in range(rows)}:
        difference = f"and its config.json names {len(names)} (id2label)"
        print(f"warning: {path} has a head of {rows} classes, {difference}", flush=True)
    return [str(names.get(str(i), f"LABEL_{i}")) for i in range(rows)]
