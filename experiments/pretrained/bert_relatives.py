"""RoBERTa (Liu et al. 2019) and XLM-R, DistilBERT (Sanh et al. 2019): BERT's blocks with other positions and heads; and
ALBERT (Lan et al. 2020), whose layers share parameters and whose words have fewer features than tokens."""

import functools
from typing import Any

import numpy as np

from experiments.engine import errors
from experiments.pretrained import bert, families, tensors

POSITIONS = "embeddings.position_embeddings.weight"


def roberta_read(config: families.HfConfig) -> families.Settings:
    """Return the settings of a RoBERTa, whose positions begin after the id that pads."""
    settings, unread = bert.read(config), int(config.get("pad_token_id", 1)) + 1
    if settings["N"] <= unread:
        raise families.refuse("max_position_embeddings", settings["N"], f"more than {unread}, after pad_token_id")
    return settings | {"unread": unread, "N": settings["N"] - unread}


def roberta_write(settings: families.Settings, *, name: str) -> dict[str, Any]:
    """Return config.json, with the number of positions that includes those that no token has; the id that pads is, in
    a run, that of its tokenizer."""
    pad = settings.get("ids", {}).get("pad_token_id", settings.get("unread", 0) - 1)
    if pad is None or pad < 0:
        raise errors.UserError("this model cannot be written as roberta: its tokenizer has no token that pads")
    more = {"pad_token_id": pad, "max_position_embeddings": settings["N"] + pad + 1}
    return bert.write(settings, name=name) | more


def roberta_clean(arrays: tensors.Arrays, settings: families.Settings) -> tensors.Arrays:
    """Return the tensors without the positions that no token has."""
    arrays = bert.clean(arrays, settings, names=ROBERTA_NAMES)
    return {name: array[settings["unread"] :] if name == POSITIONS else array for name, array in arrays.items()}


def roberta_restore(arrays: tensors.Arrays, settings: families.Settings) -> tensors.Arrays:
    """Return the tensors with zeros for the positions that no token has."""
    zeros = np.zeros((settings["unread"], settings["D"]), np.float32)
    arrays = bert.restore(arrays, settings, names=ROBERTA_NAMES)
    return {**arrays, POSITIONS: np.concatenate([zeros, arrays[POSITIONS]])}


ROBERTA_NAMES = bert.NAMES._replace(
    transform="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    bias="lm_head.bias",
    pooler="classifier.dense",
    classifier="classifier.out_proj",
)
ROBERTA = bert.family(ROBERTA_NAMES)._replace(
    prefix="roberta.",
    unprefixed=("lm_head.", "classifier.", "qa_outputs."),
    read=roberta_read,
    write=functools.partial(roberta_write, name="Roberta"),
    output=functools.partial(bert.output, masked="gelu"),
    clean=roberta_clean,
    restore=roberta_restore,
)
XLM_ROBERTA = ROBERTA._replace(write=functools.partial(roberta_write, name="XLMRoberta"))

DISTILBERT_SIZES = {"M": "n_layers", "D": "dim", "H": "n_heads", "F": "hidden_dim"}
DISTILBERT_SIZES |= {"W": "vocab_size", "N": "max_position_embeddings"}


def distilbert_read(config: families.HfConfig) -> families.Settings:
    """Return the settings of a DistilBERT, which has no segments."""
    settings = bert.PLAIN | families.sizes(config, DISTILBERT_SIZES, (6, 768, 12, 3072, 30522, 512))
    settings |= {"norm": "token:1e-12", "mlp": families.choose(config, "activation", families.ACTIVATIONS)}
    return families.heads(settings | bert.tied_and_class(config))


def distilbert_write(settings: families.Settings) -> dict[str, Any]:
    """Return config.json: the inverse of `distilbert_read`."""
    return bert.architecture("DistilBert", settings) | {
        **{field: settings[letter] for letter, field in DISTILBERT_SIZES.items()},
        "activation": families.theirs(families.ACTIVATIONS, settings["mlp"]),
        "tie_word_embeddings": settings["tied_output"],
        "sinusoidal_pos_embds": False,
    }


DISTILBERT = bert.family(
    bert.Names(
        layer="transformer.layer.{m}.",
        in_layer="attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2"
        " output_layer_norm",
        transform="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector",
        bias="vocab_projector.bias",
        pooler="pre_classifier",
        classifier="classifier",
    )
)._replace(
    prefix="distilbert.",
    unprefixed=("vocab_", "pre_classifier.", "classifier.", "qa_outputs."),
    read=distilbert_read,
    write=distilbert_write,
    output=functools.partial(bert.output, classes="relu"),
)

ALBERT_ACTIVATIONS = {"gelu_new": "gelu_tanh"} | families.ACTIVATIONS
ALBERT_SIZES = bert.SIZES | {"E": "embedding_size"}


def albert_read(config: families.HfConfig) -> families.Settings:
    """Return the settings of an ALBERT: E features of words, and several layers with the parameters of one."""
    families.expect(config, {"inner_group_num": 1})
    settings = bert.PLAIN | families.sizes(config, ALBERT_SIZES, (12, 4096, 64, 16384, 30522, 512, 2, 128))
    settings["norm"] = families.norm(config, "layer_norm_eps", 1e-12)
    settings["mlp"] = families.choose(config, "hidden_act", ALBERT_ACTIVATIONS)
    groups = families.size(config, "num_hidden_groups", 1)
    if settings["M"] % groups:
        raise families.refuse("num_hidden_groups", groups, f"a divisor of num_hidden_layers = {settings['M']}")
    return families.heads(settings | bert.tied_and_class(config) | {"share": settings["M"] // groups})


def albert_write(settings: families.Settings) -> dict[str, Any]:
    """Return config.json: the inverse of `albert_read`."""
    order = settings["aside"].get("sop_classifier.classifier.bias")  # whether sentences stand in their order
    rows = {} if order is None else {"num_labels": len(order)}
    config = bert.write(settings, name="Albert") | rows | {"embedding_size": settings["E"] or None}
    config |= {"hidden_act": families.theirs(ALBERT_ACTIVATIONS, settings["mlp"]), "inner_group_num": 1}
    return config | {"num_hidden_groups": settings["M"] // settings["share"]}


def albert_lines(settings: families.Settings) -> list[tensors.Line]:
    """Return the rules of all tensors, with the map from E to D features."""
    up = tensors.pair("encoder.embedding_hidden_mapping_in", "D E; D", "embed/up/W_DE", "b_D")
    return [*bert.lines(settings, names=ALBERT_NAMES), *up]


ALBERT_NAMES = bert.Names(
    layer="encoder.albert_layer_groups.{m}.albert_layers.0.",
    in_layer="attention.query attention.key attention.value attention.dense attention.LayerNorm ffn ffn_output"
    " full_layer_layer_norm",
    transform="predictions.dense",
    norm="predictions.LayerNorm",
    decoder="predictions.decoder",
    bias="predictions.bias",
    pooler="pooler",
    classifier="classifier",
)
ALBERT = bert.family(ALBERT_NAMES)._replace(
    prefix="albert.",
    unprefixed=("predictions.", "sop_classifier.", "classifier.", "qa_outputs."),
    read=albert_read,
    write=albert_write,
    lines=albert_lines,
)
