"""RoBERTa (Liu et al. 2019) and XLM-R: BERTs with other heads. Their positions begin after the padding id."""

from typing import Any

import numpy as np

from experiments.pretrained import bert, bert_heads, families, tensors

POSITIONS = "embeddings.position_embeddings.weight"
NAMES = bert.NAMES | {
    **{"transform": "lm_head.dense", "norm": "lm_head.layer_norm", "decoder": "lm_head.decoder"},
    **{"bias": "lm_head.bias", "pooler": "classifier.dense", "classifier": "classifier.out_proj"},
}


def read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with `unread`, the number of the first rows of positions, which are not used."""
    N, unread = settings["N"], int(config.get("pad_token_id", 1)) + 1
    families.require(N > unread, "max_position_embeddings", N, f"more than {unread}, after pad_token_id")
    return bert.read(config, settings) | {"unread": unread, "N": N - unread}


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the fields of config.json that are not in the family's table. max_position_embeddings counts all rows.

    The padding id of a run comes from its tokenizer. Raises UserError if the tokenizer has no padding id.
    """
    pad = settings.get("ids", {}).get("pad_token_id", settings.get("unread", 0) - 1)
    families.require(pad is not None and pad >= 0, "pad_token_id", pad, "the id of the tokenizer's padding token")
    positions = {"pad_token_id": pad, "max_position_embeddings": settings["N"] + pad + 1}
    return bert_heads.write(settings, family) | positions


def clean(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors without the unused rows of positions."""
    arrays = bert.clean(arrays, settings, family)
    return {name: array[settings["unread"] :] if name == POSITIONS else array for name, array in arrays.items()}


def restore(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors with zeros for the unused rows of positions."""
    zeros = np.zeros((settings["unread"], settings["D"]), np.float32)
    arrays = bert.restore(arrays, settings, family)
    return {**arrays, POSITIONS: np.concatenate([zeros, arrays[POSITIONS]])}


ROBERTA = bert.FAMILY._replace(
    architecture="Roberta",
    outputs=bert_heads.OUTPUTS | {"masked": "gelu"},
    read=read,
    write=write,
    names=NAMES,
    prefix="roberta.",
    unprefixed=("lm_head.", "classifier.", "qa_outputs."),
    aside={"pooler.": f"{families.UNUSED}: RoBERTa's classifier has a layer of its own"},
    pooler={},
    tied={"lm_head.decoder.weight": bert.WORDS, "lm_head.decoder.bias": "lm_head.bias"},
    clean=clean,
    restore=restore,
)
XLM_ROBERTA = ROBERTA._replace(architecture="XLMRoberta")
