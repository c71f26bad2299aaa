"""BERT (Devlin et al. 2019): post-norm, segments, a norm after the embedding, and a head that fills hidden words in."""

from typing import Any

import numpy as np

from experiments.engine import errors
from experiments.pretrained import families, tensors
from experiments.pretrained.families import Field

_LAYER = "encoder.layer.{m}."
LINES = (
    tensors.Line("embeddings.word_embeddings.weight", "W D", ("embed/E_WD",)),
    tensors.Line("embeddings.position_embeddings.weight", "N D", ("position/P_ND",)),
    tensors.Line("embeddings.token_type_embeddings.weight", "J D", ("embed/S_JD",)),
    *tensors.pair("embeddings.LayerNorm", "D; D", "embed/norm/gain_D", "shift_D"),
    *tensors.pair(_LAYER + "attention.self.query", "HK D; HK", "blocks/score/Uq_HKD", "bq_HK"),
    *tensors.pair(_LAYER + "attention.self.key", "HK D; HK", "blocks/score/Uk_HKD", "bk_HK"),
    *tensors.pair(_LAYER + "attention.self.value", "HK D; HK", "blocks/value/Uv_HKD", "bv_HK"),
    *tensors.pair(_LAYER + "attention.output.dense", "D HK; D", "blocks/value/Uo_HDK", "bo_D"),
    *tensors.pair(_LAYER + "attention.output.LayerNorm", "D; D", "blocks/norm1/gain_D", "shift_D"),
    *tensors.pair(_LAYER + "intermediate.dense", "F D; F", "blocks/mlp/W1_FD", "b1_F"),
    *tensors.pair(_LAYER + "output.dense", "D F; D", "blocks/mlp/W2_DF", "b2_D"),
    *tensors.pair(_LAYER + "output.LayerNorm", "D; D", "blocks/norm2/gain_D", "shift_D"),
    *tensors.pair("cls.predictions.transform.dense", "D D; D", "head/transform/W_DD", "b_D", "head"),
    *tensors.pair("cls.predictions.transform.LayerNorm", "D; D", "head/transform/norm/gain_D", "shift_D", "head"),
    tensors.Line("cls.predictions.bias", "W", ("head/b_W",), "head/bias"),
    tensors.Line("cls.predictions.decoder.weight", "W D", ("head/G_WD",), "untied"),
    tensors.Line("cls.predictions.decoder.bias", "W", ("head/b_W",), "untied/bias"),
    *tensors.pair("pooler.dense", "D D; D", "extras/pooler/W_DD", "b_D", "pooler"),
    *tensors.pair("cls.seq_relationship", "C D; C", "extras/next_sentence/G_CD", "b_C", "next_sentence"),
)
KNOWN = (
    tensors.constant("embeddings.position_ids", "the numbers from 0", lambda facts: np.arange(facts["N"])[None]),
    tensors.copy("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight", unless="untied"),
    tensors.copy("cls.predictions.decoder.bias", "cls.predictions.bias", unless="untied/bias"),
    tensors.Known("cls.predictions.bias", "not used, since its decoder.bias is", lambda *_: True, unless="head/bias"),
)
FIELDS = (
    *families.sizes(12, 768, 12, 3072),
    Field("vocab_size", "W", 30522),
    Field("max_position_embeddings", "N", 512),
    Field("type_vocab_size", "segments", 2),
    Field("hidden_act", "mlp", families.ACTIVATIONS),
    Field("layer_norm_eps", "eps", 1e-12),
    Field("tie_word_embeddings", "tied_output", families.YES),
    Field("position_embedding_type", "", families.only("absolute")),
    Field("is_decoder", "", families.only(False)),
    Field("add_cross_attention", "", families.only(False)),
)
HEADS = {"head": "cls.predictions.", "pooler": "pooler.", "next_sentence": "cls.seq_relationship."}


def groups(facts: families.Facts, names: set[str]) -> set[str]:
    """The heads that the file holds: without one, the model ends with its last block."""
    heads = {group for group, beginning in HEADS.items() if any(name.startswith(beginning) for name in names)}
    if "head" not in heads:
        return heads
    if facts["mlp"] != "gelu":  # theirs is one setting for the MLPs and the head, and our head has no other one
        right = "the exact gelu (hidden_act = 'gelu', model.mlp)"
        raise errors.UserError(f"a BERT that fills words in has {right}, and not {facts['mlp']!r}")
    if facts["tied_output"]:
        return heads | {"head/bias"}
    return heads | {"untied", "untied/bias" if "cls.predictions.decoder.bias" in names else "head/bias"}


def extra(facts: families.Facts, groups: set[str]) -> dict[str, Any]:
    """The class that holds its heads."""
    with_next = ("BertForNextSentencePrediction", "BertForPreTraining")
    classes = with_next if "next_sentence" in groups else ("BertModel", "BertForMaskedLM")
    return {"architectures": [classes["head" in groups]]}


FAMILY = families.Family(
    "bert",
    kind="masked",
    prefix="bert.",
    lines=LINES,
    known=KNOWN,
    model=families.SETTINGS
    | {"block": ("post_norm",), "final_norm": (False,), "embed_norm": (True,), "segments": families.ANY},
    fields=FIELDS,
    extra=extra,
    groups=groups,
    complete=lambda config, facts: {"J": facts["segments"], "C": 2},  # C: does the second sentence follow the first?
    ids=("pad_token_id",),
    unprefixed=("cls.",),
    spellings=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),  # the first files
)
