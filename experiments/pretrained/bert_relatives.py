"""RoBERTa (Liu et al. 2019) and XLM-R, DistilBERT (Sanh et al. 2019): BERT's blocks with other positions and heads."""

import functools
from typing import Any

from experiments.engine import errors
from experiments.pretrained import bert, families
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
    """Their number of positions, with those that no token has; in files before this, only `ids` tells."""
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
        *bert.layers("encoder.layer.{m}.", bert.NAMES),
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
SAME = ("vocab_size", "max_position_embeddings", "tie_word_embeddings", "problem_type")
DISTILBERT = bert.FAMILY._replace(
    name="distilbert",
    prefix="distilbert.",
    lines=(
        *bert.embeddings(segments=False),
        *bert.layers(
            "transformer.layer.{m}.",
            "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2"
            " output_layer_norm",
        ),
        *bert.words("vocab_transform", "vocab_layer_norm", "vocab_projector", ""),
        *bert.of_sequences("pre_classifier", "classifier"),
        *bert.OF_WORDS,
    ),
    known=bert.known("vocab_projector", ""),
    model=bert.MODEL | {"segments": (0,), "eps": (1e-12,)},
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
