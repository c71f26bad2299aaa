"""BERT (Devlin et al. 2019) and its relatives: post-norm, a norm after the embedding, and heads for four tasks.

RoBERTa and XLM-R (Liu et al. 2019) have other heads, and positions that begin after the padding id. DistilBERT (Sanh et
al. 2019) has no segments and no pooler. Relatives change BERT's table and the names of its tensors.
"""

from typing import Any

import numpy as np

from experiments.pretrained import families, tensors

WORDS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
OUTPUTS = {"masked": "mlp", "classes": "tanh", "tokens": "linear", "spans": "linear"}
CLASSES = {"masked": "ForMaskedLM", "classes": "ForSequenceClassification", "tokens": "ForTokenClassification"}
CLASSES |= {"spans": "ForQuestionAnswering", "": "Model"}
NEXT_SENTENCE = "cls.seq_relationship."
# Names of tensors. layer, in_layer: as families.layers takes them. Then, of masked tokens: the layer before the output,
# its norm, the output matrix, and the bias of the output; of classes of a text: the layer before the output, and this.
NAMES = {
    "layer": "encoder.layer.{m}.",
    "in_layer": "attention.self.query attention.self.key attention.self.value attention.output.dense"
    " attention.output.LayerNorm intermediate.dense output.dense output.LayerNorm",
    **{"transform": "cls.predictions.transform.dense", "norm": "cls.predictions.transform.LayerNorm"},
    **{"decoder": "cls.predictions.decoder", "bias": "cls.predictions.bias"},
    **{"pooler": "pooler.dense", "classifier": "classifier"},
}
ROBERTA_NAMES = NAMES | {
    **{"transform": "lm_head.dense", "norm": "lm_head.layer_norm", "decoder": "lm_head.decoder"},
    **{"bias": "lm_head.bias", "pooler": "classifier.dense", "classifier": "classifier.out_proj"},
}
DISTILBERT_NAMES = {
    "layer": "transformer.layer.{m}.",
    "in_layer": "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2"
    " output_layer_norm",
    **{"transform": "vocab_transform", "norm": "vocab_layer_norm", "decoder": "vocab_projector"},
    **{"bias": "vocab_projector.bias", "pooler": "pre_classifier", "classifier": "classifier"},
}


def read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with "architecture", the class in config.json.

    Heads for classes of texts and for classes of tokens can have the same tensors: only the class tells them apart.
    """
    return settings | {"architecture": str((config.get("architectures") or "?")[0])}


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the fields of config.json for the head: transformers' class of the model, and the class names."""
    kind = settings["head"]
    suffix, labels = CLASSES[kind], {}
    if any(key.startswith(NEXT_SENTENCE) for key in settings["aside"]):
        suffix = "ForPreTraining" if kind else "ForNextSentencePrediction"
    if kind in ("classes", "tokens"):
        labels = families.write_labels(settings) | {"problem_type": settings.get("problem_type")}
    return {"architectures": [family.architecture + suffix]} | labels


def head(settings: families.Settings, arrays: tensors.Arrays, family: families.Family) -> families.Settings:
    """Return {head, C}: the head that the file holds, found by the names of its tensors ('': none), and its classes.

    A classifier is for texts if the file has a pooler, else for tokens.
    """
    names = family.names
    has_pooler = f"{names['pooler']}.weight" in arrays and "ForTokenClassification" not in settings["architecture"]
    outputs = {"masked": names["transform"], **({"classes": names["classifier"]} if has_pooler else {})}
    for kind, name in {**outputs, "tokens": "classifier", "spans": "qa_outputs"}.items():
        if (weight := arrays.get(f"{name}.weight")) is not None:
            return {"head": kind} | ({} if kind == "masked" else {"C": len(weight)})
    return {"head": ""}


def lines(settings: families.Settings, family: families.Family) -> list[tensors.Line]:
    """Return the rules of all tensors."""
    names, kind = family.names, settings["head"]
    rules = [tensors.Line(WORDS, "W D", ("embed/E_WD",)), tensors.Line(POSITIONS, "N D", ("position/P_ND",))]
    if settings["segments"]:
        rules.append(tensors.Line("embeddings.token_type_embeddings.weight", "J D", ("embed/S_JD",)))
    rules += tensors.pair("embeddings.LayerNorm", "D; D", "embed/norm/gain_D", "shift_D")
    rules += families.layers(names["layer"], names["in_layer"])
    if kind == "masked":
        rules += tensors.pair(names["transform"], "D D; D", "head/transform/W_DD", "b_D")
        rules += tensors.pair(names["norm"], "D; D", "head/transform/norm/gain_D", "shift_D")
        rules += [tensors.Line(names["bias"], "W", ("head/b_W",)), *families.untied(settings, names["decoder"])]
    elif kind:
        if kind == "classes":
            rules += tensors.pair(names["pooler"], "D D; D", "head/pooler/W_DD", "b_D")
        outputs = {"classes": names["classifier"], "tokens": "classifier", "spans": "qa_outputs"}
        rules += tensors.pair(outputs[kind], "C D; C", "head/G_CD", "b_C")
    return rules


def clean(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors with the current names of norms. The decoder's copy of an untied output's bias replaces it."""
    copy = f"{family.names['decoder']}.bias"
    for old, name in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        arrays = {key.replace(old, name): x for key, x in arrays.items()}
    if not settings["tied_output"] and copy in arrays:
        arrays[family.names["bias"]] = arrays.pop(copy)
    return arrays


def restore(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors as published files have them: the bias of an untied output has two names."""
    if settings["tied_output"] or family.names["bias"] not in arrays:
        return arrays
    return {**arrays, f"{family.names['decoder']}.bias": arrays[family.names["bias"]]}


BERT = families.Family(
    architecture="Bert",
    outputs=OUTPUTS,
    sizes=families.sizes(M=12, D=768, H=12, F=3072, W=30522, N=512, segments=2),
    choices={"mlp": ("hidden_act", families.ACTIVATIONS), "tied_output": ("tie_word_embeddings", families.TRUE)},
    epsilon=("layer_norm_eps", 1e-12),
    plain=families.PLAIN | {"block": "post_norm", "outer_norm": "first"},
    fixed={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    ids=("pad_token_id",),
    read=read,
    write=write,
    names=NAMES,
    prefix="bert.",
    unprefixed=("cls.", "classifier.", "qa_outputs."),
    lines=lines,
    head=head,
    tied={f"{NAMES['decoder']}.weight": WORDS, f"{NAMES['decoder']}.bias": NAMES["bias"]},
    buffers=("embeddings.position_ids",),
    aside={
        "pooler.": "head/pooler of a new head for classes of texts (text.head = tanh)",
        NEXT_SENTENCE: families.UNUSED,
    },
    pooler={f"{NAMES['pooler']}.weight": "head/pooler/W_DD", f"{NAMES['pooler']}.bias": "head/pooler/b_D"},
    clean=clean,
    restore=restore,
)


def read_roberta(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with `unread`, the number of the first rows of positions, which are not used."""
    N, unread = settings["N"], int(config.get("pad_token_id", 1)) + 1
    families.require(N > unread, "max_position_embeddings", N, f"more than {unread}, after pad_token_id")
    return read(config, settings) | {"unread": unread, "N": N - unread}


def write_roberta(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the fields of config.json that are not in the family's table. max_position_embeddings counts all rows.

    The padding id of a run comes from its tokenizer. Raises UserError if the tokenizer has no padding id.
    """
    pad = settings.get("ids", {}).get("pad_token_id", settings.get("unread", 0) - 1)
    families.require(pad is not None and pad >= 0, "pad_token_id", pad, "the id of the tokenizer's padding token")
    return write(settings, family) | {"pad_token_id": pad, "max_position_embeddings": settings["N"] + pad + 1}


def cut_positions(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors without the unused rows of positions."""
    arrays = clean(arrays, settings, family)
    return {name: array[settings["unread"] :] if name == POSITIONS else array for name, array in arrays.items()}


def restore_positions(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors with zeros for the unused rows of positions."""
    arrays, zeros = restore(arrays, settings, family), np.zeros((settings["unread"], settings["D"]), np.float32)
    return {**arrays, POSITIONS: np.concatenate([zeros, arrays[POSITIONS]])}


ROBERTA = BERT._replace(
    architecture="Roberta",
    outputs=OUTPUTS | {"masked": "gelu"},
    read=read_roberta,
    write=write_roberta,
    names=ROBERTA_NAMES,
    prefix="roberta.",
    unprefixed=("lm_head.", "classifier.", "qa_outputs."),
    aside={"pooler.": f"{families.UNUSED}: RoBERTa's classifier has a layer of its own"},
    pooler={},
    tied={"lm_head.decoder.weight": WORDS, "lm_head.decoder.bias": "lm_head.bias"},
    clean=cut_positions,
    restore=restore_positions,
)
XLM_ROBERTA = ROBERTA._replace(architecture="XLMRoberta")
DISTILBERT = BERT._replace(
    architecture="DistilBert",
    outputs=OUTPUTS | {"classes": "relu"},
    sizes={"M": ("n_layers", 6), "D": ("dim", 768), "H": ("n_heads", 12), "F": ("hidden_dim", 3072)}
    | families.sizes(W=30522, N=512),
    choices=BERT.choices | {"mlp": ("activation", families.ACTIVATIONS)},
    epsilon=None,
    plain=BERT.plain | {"norm": "token:1e-12"},
    fixed={},
    write=lambda settings, family: write(settings, family) | {"sinusoidal_pos_embds": False},
    names=DISTILBERT_NAMES,
    prefix="distilbert.",
    unprefixed=("vocab_", "pre_classifier.", "classifier.", "qa_outputs."),
    aside={"pooler.": f"{families.UNUSED}: DistilBERT's classifier has a layer of its own"},
    pooler={},
    tied={"vocab_projector.weight": WORDS},
)
