"""BERT (Devlin et al. 2019): post-norm, segments, a norm after the embedding, and a head that fills hidden words in."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.engine import errors
from experiments.pretrained import families, tensors

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
    tensors.Known(
        "embeddings.position_ids", "the numbers from 0", tensors.constant(lambda facts: np.arange(facts["N"])[None])
    ),
    tensors.Known(
        "cls.predictions.decoder.weight",
        "a copy of embeddings.word_embeddings.weight",
        tensors.copy_of("embeddings.word_embeddings.weight"),
        unless="untied",
    ),
    tensors.Known(
        "cls.predictions.decoder.bias",
        "a copy of cls.predictions.bias",
        tensors.copy_of("cls.predictions.bias"),
        unless="untied/bias",
    ),
    tensors.Known(
        "cls.predictions.bias",
        "not used, since cls.predictions.decoder.bias is",
        lambda array, tensors, facts: True,
        unless="head/bias",
    ),
)
_HEADS = {"head": "cls.predictions.", "pooler": "pooler.", "next_sentence": "cls.seq_relationship."}


def describe(config: families.Config) -> families.Description:
    """Our sizes and fields from its config.json. UserError for what it may ask and we do not have."""
    families.one_of(config, "position_embedding_type", ("absolute",))
    families.one_of(config, "is_decoder", (False,))
    families.one_of(config, "add_cross_attention", (False,))
    activation = families.one_of(config, "hidden_act", ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"))
    D, H = families.whole(config, "hidden_size", 768), families.whole(config, "num_attention_heads", 12)
    sizes = {
        "M": families.whole(config, "num_hidden_layers", 12),
        "D": D,
        "H": H,
        "K": families.shared(D, H, ("hidden_size", "num_attention_heads")),
        "F": families.whole(config, "intermediate_size", 3072),
        "W": families.whole(config, "vocab_size", 30522),
        "N": families.whole(config, "max_position_embeddings", 512),
        "J": families.whole(config, "type_vocab_size", 2),
        "C": 2,  # does the second sentence follow the first?
    }
    model = {
        "mlp": families.ACTIVATIONS[activation],
        "eps": families.real(config, "layer_norm_eps", 1e-12),
        "segments": sizes["J"],
    }
    tied = families.flag(config, "tie_word_embeddings", True)
    extras = {"W": sizes["W"], "N": sizes["N"], "tied_output": tied}
    return families.Description(sizes, model, extras)


def groups(description: families.Description, names: set[str]) -> set[str]:
    """The heads that the file holds: without one, the model ends with its last block."""
    heads = {group for group, beginning in _HEADS.items() if any(name.startswith(beginning) for name in names)}
    _same_activation(description.model["mlp"], heads)
    if "head" not in heads:
        return heads
    if description.extras["tied_output"]:
        return heads | {"head/bias"}
    return heads | {"untied", "untied/bias" if "cls.predictions.decoder.bias" in names else "head/bias"}


def _same_activation(mlp: str, groups: set[str]) -> None:
    """Theirs is one setting for the MLPs and the head; our head has the exact gelu of the published models."""
    if "head" in groups and mlp != "gelu":
        raise errors.UserError(
            f"a BERT that fills words in has the exact gelu (hidden_act = 'gelu', model.mlp), and not {mlp!r}"
        )


def config(sizes: Mapping[str, int], model: Mapping[str, Any], extras: Mapping[str, Any], groups: set[str]) -> dict:
    """Its config.json."""
    _same_activation(model["mlp"], groups)
    with_next = ("BertForNextSentencePrediction", "BertForPreTraining")
    architecture = (with_next if "next_sentence" in groups else ("BertModel", "BertForMaskedLM"))["head" in groups]
    return {
        "architectures": [architecture],
        "vocab_size": sizes["W"],
        "max_position_embeddings": sizes["N"],
        "type_vocab_size": sizes["J"],
        "hidden_size": sizes["D"],
        "num_hidden_layers": sizes["M"],
        "num_attention_heads": sizes["H"],
        "intermediate_size": sizes["F"],
        "hidden_act": families.activation(model["mlp"]),
        "layer_norm_eps": model["eps"],
        "tie_word_embeddings": "untied" not in groups,
    }


FAMILY = families.Family(
    "bert",
    "bert.",
    ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),  # as in the first files
    LINES,
    KNOWN,
    describe,
    groups,
    config,
    ("pad_token_id",),
    ("cls.",),
)
