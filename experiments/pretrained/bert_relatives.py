"""RoBERTa (Liu et al. 2019) and XLM-R, DistilBERT (Sanh et al. 2019): BERT's blocks with other positions and heads; and
ALBERT (Lan et al. 2020), whose layers share parameters and whose words have fewer features than tokens."""

import functools
from typing import Any

import numpy as np

from experiments.engine import errors
from experiments.pretrained import bert, families, tensors

POSITIONS = "embeddings.position_embeddings.weight"


def roberta_read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings of a RoBERTa, whose positions begin after the padding id."""
    settings, unread = bert.read(config, settings), int(config.get("pad_token_id", 1)) + 1
    if settings["N"] <= unread:
        raise families.refuse("max_position_embeddings", settings["N"], f"more than {unread}, after pad_token_id")
    return settings | {"unread": unread, "N": settings["N"] - unread}


def roberta_write(settings: families.Settings, *, name: str) -> dict[str, Any]:
    """Return the rest of config.json, with the number of all rows of positions: those before the first are unused.
    The padding id of a run is the tokenizer's."""
    pad = settings.get("ids", {}).get("pad_token_id", settings.get("unread", 0) - 1)
    if pad is None or pad < 0:
        raise errors.UserError("this model cannot be written as roberta: its tokenizer has no token that pads")
    positions = {"pad_token_id": pad, "max_position_embeddings": settings["N"] + pad + 1}
    return bert.write(settings, name=name) | positions


def roberta_clean(arrays: tensors.Arrays, settings: families.Settings) -> tensors.Arrays:
    """Return the tensors without the unused positions."""
    arrays = bert.clean(arrays, settings, names=ROBERTA_NAMES)
    return {name: array[settings["unread"] :] if name == POSITIONS else array for name, array in arrays.items()}


def roberta_restore(arrays: tensors.Arrays, settings: families.Settings) -> tensors.Arrays:
    """Return the tensors with zeros for the unused positions."""
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
ROBERTA = bert.family(ROBERTA_NAMES, "Roberta")._replace(
    outputs=bert.OUTPUTS | {"masked": "gelu"},
    prefix="roberta.",
    unprefixed=("lm_head.", "classifier.", "qa_outputs."),
    read=roberta_read,
    write=functools.partial(roberta_write, name="Roberta"),
    clean=roberta_clean,
    restore=roberta_restore,
)
XLM_ROBERTA = ROBERTA._replace(write=functools.partial(roberta_write, name="XLMRoberta"))

DISTILBERT_FIELDS = families.Fields(
    plain=bert.FIELDS.plain | {"norm": "token:1e-12"},
    sizes={
        "M": ("n_layers", 6),
        "D": ("dim", 768),
        "H": ("n_heads", 12),
        "F": ("hidden_dim", 3072),
        "W": ("vocab_size", 30522),
        "N": ("max_position_embeddings", 512),
    },
    choices=bert.FIELDS.choices | {"mlp": ("activation", families.ACTIVATIONS)},
    epsilon=None,
)


def distilbert_write(settings: families.Settings) -> dict[str, Any]:
    """Return the rest of config.json."""
    return bert.write(settings, name="DistilBert") | {"sinusoidal_pos_embds": False}


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
    ),
    "DistilBert",
)._replace(
    outputs=bert.OUTPUTS | {"classes": "relu"},
    prefix="distilbert.",
    unprefixed=("vocab_", "pre_classifier.", "classifier.", "qa_outputs."),
    fields=DISTILBERT_FIELDS,
    write=distilbert_write,
)

ALBERT_SIZES = {
    "D": ("hidden_size", 4096),
    "H": ("num_attention_heads", 64),
    "F": ("intermediate_size", 16384),
    "E": ("embedding_size", 128),
}
ALBERT_FIELDS = bert.FIELDS._replace(
    sizes=bert.FIELDS.sizes | ALBERT_SIZES,
    choices=bert.FIELDS.choices | {"mlp": ("hidden_act", {"gelu_new": "gelu_tanh"} | families.ACTIVATIONS)},
    fixed=bert.FIELDS.fixed | {"inner_group_num": 1},
)


def albert_read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings of an ALBERT, where `share` layers have the parameters of one."""
    groups = families.size(config, "num_hidden_groups", 1)
    if settings["M"] % groups:
        raise families.refuse("num_hidden_groups", groups, f"a divisor of num_hidden_layers = {settings['M']}")
    return bert.read(config, settings) | {"share": settings["M"] // groups}


def albert_write(settings: families.Settings) -> dict[str, Any]:
    """Return the rest of config.json."""
    order = settings["aside"].get("sop_classifier.classifier.bias")  # of the head that predicts sentence order
    rows = {} if order is None else {"num_labels": len(order)}
    groups = settings["M"] // settings["share"]
    return bert.write(settings, name="Albert") | rows | {"num_hidden_groups": groups}


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
ALBERT = bert.family(ALBERT_NAMES, "Albert")._replace(
    prefix="albert.",
    unprefixed=("predictions.", "sop_classifier.", "classifier.", "qa_outputs."),
    fields=ALBERT_FIELDS,
    read=albert_read,
    write=albert_write,
    lines=albert_lines,
)
