"""RoBERTa (Liu et al. 2019) and XLM-R, DistilBERT (Sanh et al. 2019): BERT's blocks with other positions and heads; and
ALBERT (Lan et al. 2020), whose layers share parameters and whose words have fewer features than tokens."""

import functools
from typing import Any

from experiments.engine import errors
from experiments.pretrained import bert, families, tensors
from experiments.pretrained.families import Field


def roberta_complete(config: families.Config, facts: families.Facts) -> families.Facts:
    """Positions begin behind the id that pads."""
    pad = config.get("pad_token_id", 1)
    if type(pad) is not int or pad < -1:
        raise errors.UserError(f"config.json: pad_token_id must be the id of a token, and is {pad!r}")
    N = facts["N"] - pad - 1
    if N < 1:
        raise errors.UserError(
            f"config.json: max_position_embeddings = {facts['N']} leave none behind pad_token_id = {pad}"
        )
    return bert.complete(config, facts) | {"unread": pad + 1, "N": N}


def roberta_extra(name: str, facts: families.Facts, groups: set[str]) -> dict[str, Any]:
    """Their number of positions, with those that no token has; the id that pads is, in a run, that of its words."""
    pad = facts.get("ids", {}).get("pad_token_id", facts.get("unread", 0) - 1)
    if pad is None or pad < 0:
        raise errors.UserError("this model cannot be written as roberta: its words have none that pads")
    numbers = {"pad_token_id": pad, "max_position_embeddings": facts["N"] + pad + 1}
    return bert.architecture(name, facts, groups) | numbers


DECODER = ("lm_head.decoder", "lm_head.bias")
BEGINNINGS = {"masked": "lm_head.", "classes": "classifier.out_proj.", "tokens": "classifier.weight"}
BEGINNINGS |= {"spans": "qa_outputs.", "pooler": "pooler."}
ROBERTA = bert.FAMILY._replace(
    name="roberta",
    prefix="roberta.",
    lines=(
        *bert.embeddings(),
        *families.layers("encoder.layer.{m}.", bert.NAMES),
        *bert.words("lm_head.dense", "lm_head.layer_norm", *DECODER),
        *bert.of_sequences("classifier.dense", "classifier.out_proj"),
        *bert.OF_WORDS,
        *bert.POOLER,
    ),
    known=bert.known(*DECODER),
    extra=functools.partial(roberta_extra, "Roberta"),
    groups=functools.partial(bert.groups, BEGINNINGS, DECODER[0]),
    complete=roberta_complete,
    unprefixed=("lm_head.", "classifier.", "qa_outputs."),
    heads=bert.FAMILY.heads | {"masked": "gelu"},
)
XLM_ROBERTA = ROBERTA._replace(name="xlm-roberta", extra=functools.partial(roberta_extra, "XLMRoberta"))

DISTILLED = {"masked": "vocab_", "classes": "pre_classifier.", "tokens": "classifier.", "spans": "qa_outputs."}
SAME = ("vocab_size", "max_position_embeddings", "tie_word_embeddings")
DISTILBERT = bert.FAMILY._replace(
    name="distilbert",
    prefix="distilbert.",
    lines=(
        *bert.embeddings(segments=False),
        *families.layers(
            "transformer.layer.{m}.",
            "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2"
            " output_layer_norm",
        ),
        *bert.words("vocab_transform", "vocab_layer_norm", "vocab_projector", ""),
        *bert.of_sequences("pre_classifier", "classifier"),
        *bert.OF_WORDS,
    ),
    known=bert.known("vocab_projector", ""),
    model=bert.MODEL | {"segments": (0,), "norm": ("token:1e-12",)},
    fields=(
        *map(Field, ("n_layers", "dim", "n_heads", "hidden_dim"), "MDHF", (6, 768, 12, 3072)),
        *(field for field in bert.FIELDS if field.theirs in SAME),
        Field("activation", "mlp", families.ACTIVATIONS),
        Field("sinusoidal_pos_embds", "", families.only(False, True)),  # the table is in the file, whatever it holds
    ),
    extra=functools.partial(bert.architecture, "DistilBert"),
    groups=functools.partial(bert.groups, DISTILLED, "vocab_projector"),
    unprefixed=("vocab_", "pre_classifier.", "classifier.", "qa_outputs."),
    heads=bert.FAMILY.heads | {"classes": "relu"},
)


def albert_complete(config: families.Config, facts: families.Facts) -> families.Facts:
    """How many layers have the parameters of one."""
    groups = families.value(config, Field("num_hidden_groups", "", 1))
    if facts["M"] % groups:
        wrong = f"num_hidden_layers = {facts['M']} is not divisible by num_hidden_groups = {groups}"
        raise errors.UserError(f"config.json: {wrong}")
    found = bert.complete(config, facts)
    return found | {"share": facts["M"] // groups, "T": found["C"]}  # rows for the next sentence, as for classes


def albert_extra(facts: families.Facts, groups: set[str]) -> dict[str, Any]:
    """As `albert_complete` reads it."""
    return bert.architecture("Albert", facts, groups) | {"num_hidden_groups": facts["M"] // facts["share"]}


OF_ALBERT = ("predictions.decoder", "predictions.bias")
ALBERT = bert.FAMILY._replace(
    name="albert",
    prefix="albert.",
    lines=(
        *bert.embeddings("E"),
        *tensors.pair("encoder.embedding_hidden_mapping_in", "D E; D", "embed/up/W_DE", "b_D"),
        *families.layers(
            "encoder.albert_layer_groups.{m}.albert_layers.0.",
            "attention.query attention.key attention.value attention.dense attention.LayerNorm ffn ffn_output"
            " full_layer_layer_norm",
        ),
        *bert.words("predictions.dense", "predictions.LayerNorm", *OF_ALBERT, "E"),
        *bert.of_sequences("pooler", "classifier"),
        *bert.OF_WORDS,
        *tensors.pair("pooler", "D D; D", "extras/pooler/W_DD", "b_D", "pooler"),
        *tensors.pair("sop_classifier.classifier", "T D; T", "extras/next_sentence/G_TD", "b_T", "next_sentence"),
    ),
    known=bert.known(*OF_ALBERT),
    model=bert.MODEL | {"E": families.ANY, "share": families.ANY},
    fields=(
        *families.sizes(12, 4096, 64, 16384),
        *(field for field in bert.FIELDS if field.theirs in (*SAME, "layer_norm_eps", "type_vocab_size")),
        Field("hidden_act", "mlp", {"gelu_new": "gelu_tanh"} | families.ACTIVATIONS),
        Field("embedding_size", "E", 128),
        Field("inner_group_num", "", families.only(1)),
    ),
    extra=albert_extra,
    groups=functools.partial(
        bert.groups, bert.BEGINNINGS | {"masked": "predictions.", "next_sentence": "sop_"}, OF_ALBERT[0]
    ),
    complete=albert_complete,
    unprefixed=("predictions.", "sop_classifier.", "classifier.", "qa_outputs."),
)
FAMILIES = (ROBERTA, XLM_ROBERTA, DISTILBERT, ALBERT)
