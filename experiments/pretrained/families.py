"""What a family of published models is: its config.json field by field, which of our settings it has, its tensors."""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments import model as models, variants
from experiments.engine import errors
from experiments.pretrained import tensors

Config = Mapping[str, Any]
Facts = dict[str, Any]
# their name of the MLP's activation -> ours; one name of theirs for each of ours is written back
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu", "tanh": "tanh"}
ACTIVATIONS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh")
ACTIVATIONS |= {"gelu_python": "gelu", "quick_gelu": "quick_gelu", "swish": "silu"}
GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}  # the MLP with such a gate
GATED = {"silu": "swiglu"} | {theirs: GATES[ours] for theirs, ours in ACTIVATIONS.items() if ours in GATES}
YES = {True: True, False: False}  # of a field that is true or false, and true where nothing is said
NO = {False: False, True: True}
MOST_LABELS = 2**20  # each has a name
TEXT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # fields of a model that writes text

# What a family may have of the fields of a config's `model`, if it does not say otherwise: one of these values, which
# are the same function of the parameters where config.json does not say which (the first is what is read); or ANY,
# which config.json or the tensors say.
ANY = ()
SETTINGS = {
    **dict.fromkeys(("M", "D", "H", "G", "K", "F"), ANY),
    "score": ("asymmetric", "symmetric_init", "asymmetric_std"),  # they differ where they begin
    "scale": ("1/sqrt(K)",),
    "cap": (0.0,),
    "output_cap": (0.0,),
    "value": ("low_rank",),
    "norm": ("token",),
    "mlp": tuple(dict.fromkeys(ACTIVATIONS.values())),
    "position": ("learned",),
    "relative_position": ("none",),
    "window": (0,),
    "block": ("pre_norm",),
    "outer_norm": ("last",),
    "segments": (0,),
    "E": (0,),
    "share": (1,),
    "bias": ("all",),
}
# Where a model begins, or how it is trained and computed: no matter to what the trained one says. What a published
# model's files do not say is as base.py has it.
FREE = {
    "score_std": 1.0,
    "output_std": 1.0,
    "dropout": 0.0,
    "attention": "flash",
    "compute_dtype": "float32",  # what is written is float32, as the parameters are: it rounds less
    "remat": "none",
}


class Field(NamedTuple):
    """A field of config.json, and ours that it says: a size by its letter, a field of `model`, or another fact.

    The default holds where it is absent, and tells what it may be: an int, a whole number from 1; a float, a finite
    number from 0 (of the norm, what stands behind its name); a str, any text; a dictionary, one of its keys, and ours
    is the value, or where that is None any other one; a function, a size that it makes of the facts before; None, a
    size that may be unknown. '' for `ours`: only the default is supported.
    """

    theirs: str
    ours: str
    default: Any


def sizes(M: int, D: int, H: int, F: int) -> tuple[Field, ...]:
    """The fields by which most families say them, with their defaults."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    return tuple(map(Field, names, "MDHF", (M, D, H, F)))


def layers(layer: str, names: str, *, qkv_bias: str = "") -> tuple[tensors.Line, ...]:
    """A layer's tensors, from what they are called in it: queries, keys, values, output, norm of attention, the MLP's
    two, its norm. qkv_bias: the group of the biases of the first three."""
    rows = (
        ("HK D; HK", "score/Uq_HKD", "bq_HK", qkv_bias),
        ("HK D; HK", "score/Uk_HKD", "bk_HK", qkv_bias),
        ("HK D; HK", "value/Uv_HKD", "bv_HK", qkv_bias),
        ("D HK; D", "value/Uo_HDK", "bo_D", ""),
        ("D; D", "norm1/gain_D", "shift_D", ""),
        ("F D; F", "mlp/W1_FD", "b1_F", ""),
        ("D F; D", "mlp/W2_DF", "b2_D", ""),
        ("D; D", "norm2/gain_D", "shift_D", ""),
    )
    of = zip(names.split(), rows, strict=True)
    return sum((tensors.pair(layer + a, axes, f"blocks/{w}", b, bias_group=group) for a, (axes, w, b, group) in of), ())


def labels(config: Config) -> list[str]:
    """The names of the classes. UserError where not every class has one."""
    many = value(config, Field("num_labels", "", 2))  # their default
    if many > MOST_LABELS:
        raise errors.UserError(f"config.json: num_labels = {many} is not supported here, at most {MOST_LABELS}")
    said = config.get("id2label") or {str(i): f"LABEL_{i}" for i in range(many)}
    if not isinstance(said, dict) or set(said) != {str(i) for i in range(len(said))}:
        raise errors.UserError("config.json: id2label must give every class from 0 a name")
    return [str(said[str(i)]) for i in range(len(said))]


def labelled(config: Config, rows: int, path: Any) -> Config:
    """Return the config with a name for each row of the head; a warning is printed if it names others."""
    said = config.get("id2label")
    if isinstance(said, dict) and said and said.keys() != {str(i) for i in range(rows)}:
        print(
            f"warning: {path} has a head of {rows} classes, and its config.json names {len(said)} (id2label)",
            flush=True,
        )
        config = {**config, "id2label": {str(i): said.get(str(i), f"LABEL_{i}") for i in range(rows)}}
    return {**config, "num_labels": rows}


def named(facts: Facts) -> dict[str, Any]:
    """What `labels` reads."""
    names = facts.get("class_names") or [f"LABEL_{i}" for i in range(facts.get("C", 2))]
    return {"id2label": {str(i): a for i, a in enumerate(names)}, "label2id": {a: i for i, a in enumerate(names)}}


def untied(facts: Facts, names: set[str]) -> set[str]:
    """The groups of a family in which only the output may be tied or not."""
    return set() if facts["tied_output"] else {"untied"}


class Family(NamedTuple):
    """`name` is config.json's model_type; every tensor's name may begin with `prefix` or not."""

    name: str
    kind: str  # what its models do, as open_model.DOES; what one of them does, `heads` and its tensors tell
    prefix: str
    lines: tuple[tensors.Line, ...]
    known: tuple[tensors.Known, ...]
    model: dict[str, tuple]  # as SETTINGS
    fields: tuple[Field, ...]
    extra: Callable[[Facts, set[str]], dict[str, Any]]  # (facts, groups) -> what else config.json says
    groups: Callable[[Facts, set[str]], set[str]] = untied  # (facts, names of tensors) -> groups of lines to read
    complete: Callable[[Config, Facts], Facts] = lambda config, facts: {}  # facts that are no field; or UserError
    ids: tuple[str, ...] = TEXT_IDS  # the fields of config.json that are ids of words (hub.py)
    unprefixed: tuple[str, ...] = ("lm_head.",)  # beginnings of names that stand outside of the prefix
    spellings: tuple[tuple[str, str], ...] = ()  # (regular expression, replacement): other names for the same tensors
    # The groups of lines that are a head, of which a model has one or none, its kind: to the activation of the layer
    # before the head, '' where there is none, and None where it is that of the MLPs.
    heads: Mapping[str, str | None] = types.MappingProxyType({})
    answer: str = "class_token"  # image.head of its models of images
    aliases: Mapping[str, str] = {}  # other names for the same fields of config.json
    # (our arrays by path, facts) -> the same model, as we write its equations; and back.
    ours: Callable[[tensors.Arrays, Facts], tensors.Arrays] = lambda flat, facts: flat
    theirs: Callable[[tensors.Arrays, Facts], tensors.Arrays] = lambda flat, facts: flat


def output(family: Family, kind: str, facts: Facts) -> str:
    """text.head of its models of this kind, of the facts mlp and tied_output."""
    said = family.heads.get(kind, "")
    layer = facts["mlp"] if said is None else said
    return models.word_head(facts["tied_output"], layer) if kind in ("causal", "masked") else layer or "linear"


def only(*values: Any) -> dict[Any, Any]:
    """The default of a field with these values, which mean the same; the first is written."""
    return dict.fromkeys(values)


def value(config: Config, field: Field, facts: Facts | None = None) -> Any:
    """What config.json says there, in our words. UserError for another kind of value, and one that is not supported."""
    name, default = field.theirs, field.default
    if isinstance(default, dict):
        said = config.get(name, next(iter(default)))
        for theirs, ours in default.items():
            if theirs == said and isinstance(theirs, bool) == isinstance(said, bool):
                return ours
        right = " or ".join(map(str, default))
        raise errors.UserError(f"config.json: {name} = {said!r} is not supported here, only {right}")
    default = default(facts) if callable(default) else default
    said = default if config.get(name) is None else config[name]
    if isinstance(default, str):
        what, fits = "a text", isinstance(said, str)
    elif isinstance(default, float):
        what, fits = "a number from 0", type(said) in (int, float) and 0 <= said < float("inf")
    else:
        what, fits = "a whole number from 1", said is None or type(said) is int and said >= 1
    if not fits:
        raise errors.UserError(f"config.json: {name} must be {what}, and is {said!r}")
    return float(said) if isinstance(default, float) else said


def describe(family: Family, config: Config) -> Facts:
    """config.json in our words: sizes by letter, fields of `model`, and what else one must know (tied_output, ...)."""
    facts: Facts = {name: values[0] for name, values in family.model.items() if values}
    config = {right: config[other] for other, right in family.aliases.items() if other in config} | dict(config)
    for field in family.fields:
        said = value(config, field, facts)
        said = variants.joined("norm", facts["norm"], variants.written(said)) if field.ours == "norm" else said
        if field.ours and said is not None:
            facts[field.ours] = said
    for many, few in (("H", "G"), *([] if "K" in facts else [("D", "H")])):
        if facts[many] % facts.get(few, 1):
            theirs = {ours: f"{name} = {facts.get(ours)}" for name, ours, _ in family.fields}
            raise errors.UserError(f"config.json: {theirs[many]} is not divisible by {theirs[few]}")
    facts.setdefault("K", facts["D"] // facts["H"])
    facts.setdefault("G", facts["H"])
    return facts | family.complete(config, facts)


def config(family: Family, facts: Facts, groups: set[str]) -> dict[str, Any]:
    """Its config.json, the inverse of `describe`; groups: those of the lines that are written."""
    config = {"model_type": family.name, "dtype": "float32"}
    try:
        for theirs, ours, default in family.fields:
            if isinstance(default, dict):
                config[theirs] = next(name for name, said in default.items() if not ours or said in (facts[ours], None))
            elif ours == "norm":
                config[theirs] = float(variants.split(ours, facts[ours])[1])
            else:
                config[theirs] = facts.get(ours, default) if isinstance(default, str) else facts[ours]
        return config | family.extra(facts, groups)
    except KeyError as error:
        raise errors.UserError(f"this model cannot be written as {family.name} without extras[{error}]") from error


def faults(family: Family, model: Mapping[str, Any]) -> list[str]:
    """What keeps a model with these fields from being one of the family; what its sizes do, `hub.write` finds. A field
    that no family knows does too: whether the family has what it says is not known."""
    wrong = [f"model.{name} is missing" for name in family.model if name not in model]
    unknown = sorted(model.keys() - family.model.keys() - FREE.keys())
    wrong += [f"model.{name} is not known here, nor whether a {family.name} has it" for name in unknown]
    if all(field.ours != "G" for field in family.fields) and model.get("G") != model.get("H"):
        wrong.append(f"model.G is {model.get('G')} and not {model.get('H')}, the number of heads")
    for name, values in family.model.items():
        if values and name in model and not {model[name], variants.split(name, str(model[name]))[0]} & {*values}:
            wrong.append(f"model.{name} is {model[name]!r} and not {' or '.join(map(repr, values))}")
    return wrong
