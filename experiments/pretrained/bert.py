"""BERT (Devlin et al. 2019) and its relatives: post-norm, a norm after the embedding, and heads for four tasks.

RoBERTa and XLM-R (Liu et al. 2019) have other heads, and positions that begin after the padding id. DistilBERT (Sanh et
al. 2019) has no segments and no pooler. Relatives change BERT's table and the names of its tensors.
"""

from typing import Any

import numpy as np

from experiments.pretrained import families, tensors

WORDS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
EMBEDDINGS = {
    WORDS: "embed/E",
    POSITIONS: "position/P",
    "embeddings.token_type_embeddings.weight": "embed/S",
    "embeddings.LayerNorm.*": "embed/norm/gain shift",
}
LAYER = "attention.self.query attention.self.key attention.self.value attention.output.dense"
LAYER += " attention.output.LayerNorm intermediate.dense output.dense output.LayerNorm"
DISTILBERT_LAYER = "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm"
DISTILBERT_LAYER += " ffn.lin1 ffn.lin2 output_layer_norm"
NEXT_SENTENCE = "cls.seq_relationship."


def name_heads(masked: str, classes: str, *, transform: str = "mlp", pooler: str = "tanh") -> dict[str, families.Head]:
    """Return {kind: head} of BERT (masked, classes, tokens, spans), for tensors with these names.

    masked: four names, divided by spaces: of the layer before the output, its norm, the output matrix, and the output's
    bias. classes: two names, of the layer before the output of a classifier of texts, and of the output. The names of
    layers and norms lack ".weight". transform, pooler: the activation of the first layer in `masked` and in `classes`.
    """
    dense, norm, decoder, bias = masked.split()
    masked_table = {f"{dense}.*": "head/transform/W b", f"{norm}.*": "head/transform/norm/gain shift"}
    masked_table |= {bias: "head/b", decoder: "head/G"}
    dense, classifier = classes.split()
    classes_table = {f"{dense}.*": "head/pooler/W b", f"{classifier}.*": "head/G b"}
    return {
        "masked": families.Head("ForMaskedLM", transform, masked_table),
        "classes": families.Head("ForSequenceClassification", pooler, classes_table),
        "tokens": families.Head("ForTokenClassification", "linear", {"classifier.*": "head/G b"}),
        "spans": families.Head("ForQuestionAnswering", "linear", {"qa_outputs.*": "head/G b"}),
    }


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return {"architectures": [name of transformers' class]} for config.json if there is a next-sentence head.

    Otherwise return {}. The head's tensors are in settings["aside"], {name: array} of tensors that our models lack.
    """
    if not any(key.startswith(NEXT_SENTENCE) for key in settings["aside"]):
        return {}
    suffix = "ForNextSentencePrediction" if settings["headless"] else "ForPreTraining"
    return {"architectures": [family.architecture + suffix]}


def _find_output(family: families.Family) -> tuple[str, str]:
    """Return both names that the output's bias for masked tokens has in files: that in our table, and the other one."""
    *_, bias, decoder = family.heads["masked"].table
    return bias, decoder.replace("weight", "bias")


def clean(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors with today's names of norms: LayerNorm.weight and .bias, not .gamma and .beta.

    If the output matrix is not tied, a tensor "decoder.bias" next to it replaces the output's bias (`_find_output`).
    """
    bias, copy = _find_output(family)
    for old, name in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        arrays = {key.replace(old, name): x for key, x in arrays.items()}
    if not settings["tied_output"] and copy in arrays:
        arrays[bias] = arrays.pop(copy)
    return arrays


def restore(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors, whose names are published ones; for an untied output, with a copy of its bias as in files."""
    bias, copy = _find_output(family)
    return arrays if settings["tied_output"] or bias not in arrays else {**arrays, copy: arrays[bias]}


BERT = families.Family(
    architecture="Bert",
    sizes=families.name_sizes(M=12, D=768, H=12, F=3072, W=30522, N=512, segments=2),
    choices={"mlp": ("hidden_act", families.ACTIVATIONS), "tied_output": ("tie_word_embeddings", families.TRUE)},
    epsilon=("layer_norm_eps", 1e-12),
    plain=families.PLAIN | {"block": "post_norm", "outer_norm": "first"},
    fixed={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    ids=("pad_token_id",),
    write=write,
    prefix="bert.",
    unprefixed=("cls.", "classifier.", "qa_outputs."),
    table=EMBEDDINGS | families.name_layer("encoder.layer.{m}.", LAYER),
    heads=name_heads(
        "cls.predictions.transform.dense cls.predictions.transform.LayerNorm cls.predictions.decoder.weight"
        " cls.predictions.bias",
        "pooler.dense classifier",
    ),
    tied={"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    buffers=("embeddings.position_ids",),
    clean=clean,
    restore=restore,
)


def read_roberta(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with `unread`, the number of unused first rows of positions, and with N without them.

    Raises UserError if all rows would be unused.
    """
    N, unread = settings["N"], int(config.get("pad_token_id", 1)) + 1
    families.require(N > unread, "max_position_embeddings", N, f"more than {unread}, after pad_token_id")
    return settings | {"unread": unread, "N": N - unread}


def write_roberta(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the fields pad_token_id and max_position_embeddings. Raises UserError if there is no padding id."""
    pad = settings.get("ids", {}).get("pad_token_id", settings.get("unread", 0) - 1)
    families.require(pad is not None and pad >= 0, "pad_token_id", pad, "the id of the tokenizer's padding token")
    return {"pad_token_id": pad, "max_position_embeddings": settings["N"] + pad + 1}


def cut_positions(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the result of `clean`, without the first settings["unread"] rows of the position embeddings."""
    arrays = clean(arrays, settings, family)
    return {name: array[settings["unread"] :] if name == POSITIONS else array for name, array in arrays.items()}


def restore_positions(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return `restore`'s tensors, with zeros before the positions: RoBERTa's first rows, which no token uses."""
    arrays, zeros = restore(arrays, settings, family), np.zeros((settings["unread"], settings["D"]), np.float32)
    return {**arrays, POSITIONS: np.concatenate([zeros, arrays[POSITIONS]])}


ROBERTA = BERT._replace(
    architecture="Roberta",
    read=read_roberta,
    write=write_roberta,
    prefix="roberta.",
    unprefixed=("lm_head.", "classifier.", "qa_outputs."),
    heads=name_heads(
        "lm_head.dense lm_head.layer_norm lm_head.decoder.weight lm_head.bias",
        "classifier.dense classifier.out_proj",
        transform="gelu",
    ),
    tied={"lm_head.decoder.weight": WORDS, "lm_head.decoder.bias": "lm_head.bias"},
    clean=cut_positions,
    restore=restore_positions,
)
XLM_ROBERTA = ROBERTA._replace(architecture="XLMRoberta")
DISTILBERT = BERT._replace(
    architecture="DistilBert",
    sizes={"M": ("n_layers", 6), "D": ("dim", 768), "H": ("n_heads", 12), "F": ("hidden_dim", 3072)}
    | families.name_sizes(W=30522, N=512),
    choices=BERT.choices | {"mlp": ("activation", families.ACTIVATIONS)},
    epsilon=None,
    plain=BERT.plain | {"norm": "token:1e-12"},
    fixed={},
    write=lambda settings, family: {"sinusoidal_pos_embds": False},
    prefix="distilbert.",
    unprefixed=("vocab_", "pre_classifier.", "classifier.", "qa_outputs."),
    table=EMBEDDINGS | families.name_layer("transformer.layer.{m}.", DISTILBERT_LAYER),
    heads=name_heads(
        "vocab_transform vocab_layer_norm vocab_projector.weight vocab_projector.bias",
        "pre_classifier classifier",
        pooler="relu",
    ),
    tied={"vocab_projector.weight": WORDS},
)
