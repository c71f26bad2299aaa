"""ALBERT (Lan et al. 2020): a BERT with shared layers, and with an embedding of fewer features than the layers."""

from typing import Any

from experiments.pretrained import bert, bert_heads, families, tensors

NAMES = {
    "layer": "encoder.albert_layer_groups.{m}.albert_layers.0.",
    "in_layer": "attention.query attention.key attention.value attention.dense attention.LayerNorm ffn ffn_output"
    " full_layer_layer_norm",
    **{"transform": "predictions.dense", "norm": "predictions.LayerNorm", "decoder": "predictions.decoder"},
    **{"bias": "predictions.bias", "pooler": "pooler", "classifier": "classifier"},
}


def read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with `share`, the number of layers that have the same parameters."""
    M, groups = settings["M"], families.size(config, "num_hidden_groups", 1)
    families.require(M % groups == 0, "num_hidden_groups", groups, f"a divisor of num_hidden_layers = {M}")
    return bert.read(config, settings) | {"share": M // groups}


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the fields of config.json that are not in the family's table."""
    order = settings["aside"].get("sop_classifier.classifier.bias")  # of the head for sentence order
    rows = {} if order is None else {"num_labels": len(order)}
    groups = settings["M"] // settings["share"]
    return bert_heads.write(settings, family) | rows | {"num_hidden_groups": groups}


def lines(settings: families.Settings, family: families.Family) -> list[tensors.Line]:
    """Return the rules of all tensors, with the map from E to D features."""
    up = tensors.pair("encoder.embedding_hidden_mapping_in", "D E; D", "embed/up/W_DE", "b_D")
    return [*bert.lines(settings, family), *up]


FAMILY = bert.FAMILY._replace(
    architecture="Albert",
    sizes=bert.FAMILY.sizes | families.sizes(D=4096, H=64, F=16384, E=128),
    choices=bert.FAMILY.choices | {"mlp": ("hidden_act", {"gelu_new": "gelu_tanh"} | families.ACTIVATIONS)},
    fixed=bert.FAMILY.fixed | {"inner_group_num": 1},
    read=read,
    write=write,
    names=NAMES,
    prefix="albert.",
    unprefixed=("predictions.", "sop_classifier.", "classifier.", "qa_outputs."),
    lines=lines,
    tied={"predictions.decoder.weight": bert.WORDS, "predictions.decoder.bias": "predictions.bias"},
)
