"""BERT (Devlin et al. 2019): post-norm, segments, a norm after the embedding; heads for tokens, classes and spans.

Its relatives (roberta.py, distilbert.py, albert.py) change its table and the names of its tensors.
"""

from typing import Any

from experiments.pretrained import families, tensors

OUTPUTS = {"masked": "mlp", "classes": "tanh", "tokens": "linear", "spans": "linear"}
CLASSES = {"masked": "ForMaskedLM", "classes": "ForSequenceClassification", "tokens": "ForTokenClassification"}
CLASSES |= {"spans": "ForQuestionAnswering", "": "Model"}
NEXT_SENTENCE = ("cls.seq_relationship.", "sop_classifier.")
WORDS = "embeddings.word_embeddings.weight"
LAYER = "attention.self.query attention.self.key attention.self.value attention.output.dense attention.output.LayerNorm"
LAYER += " intermediate.dense output.dense output.LayerNorm"
NAMES = {
    **{"layer": "encoder.layer.{m}.", "in_layer": LAYER},  # as families.layers takes them
    # The head of masked tokens: the layer before the output, its norm, the output matrix, and its bias.
    **{"transform": "cls.predictions.transform.dense", "norm": "cls.predictions.transform.LayerNorm"},
    **{"decoder": "cls.predictions.decoder", "bias": "cls.predictions.bias"},
    **{"pooler": "pooler.dense", "classifier": "classifier"},  # of a text's classes: the layer before, and the output
}


def read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with the name of their class, which decides between heads."""
    return settings | {"architecture": str((config.get("architectures") or "?")[0])}


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the rest of config.json: their class with these heads, and the class names."""
    kind = settings["head"]
    suffix, labels = CLASSES[kind], {}
    if any(key.startswith(NEXT_SENTENCE) for key in settings["aside"]):
        suffix = "ForPreTraining" if kind else "ForNextSentencePrediction"
    if kind in ("classes", "tokens"):
        labels = families.write_labels(settings) | {"problem_type": settings.get("problem_type")}
    return {"architectures": [family.architecture + suffix]} | labels


def head(settings: families.Settings, arrays: tensors.Arrays, family: families.Family) -> families.Settings:
    """Return the head that the file holds, by the names of its tensors, with its number of classes.

    A text's classes need a pooler. Without that head, the pooler is no part of our models.
    """
    names = family.names
    has_pooler = f"{names['pooler']}.weight" in arrays and "ForTokenClassification" not in settings["architecture"]
    outputs = {"masked": names["transform"], **({"classes": names["classifier"]} if has_pooler else {})}
    for kind, name in {**outputs, "tokens": "classifier", "spans": "qa_outputs"}.items():
        if (weight := arrays.get(f"{name}.weight")) is not None:
            return {"head": kind} | ({} if kind == "masked" else {"C": len(weight)})
    return {"head": ""}


def lines(settings: families.Settings, family: families.Family) -> list[tensors.Line]:
    """Return the rules of all tensors. E: ALBERT's features of tokens, positions and segments."""
    D, names, kind = "E" if settings["E"] else "D", family.names, settings["head"]
    tables = [("word", f"W {D}", f"embed/E_W{D}"), ("position", f"N {D}", f"position/P_N{D}")]
    tables += [("token_type", f"J {D}", f"embed/S_J{D}")] if settings["segments"] else []
    rules = [tensors.Line(f"embeddings.{table}_embeddings.weight", axes, (ours,)) for table, axes, ours in tables]
    rules += tensors.pair("embeddings.LayerNorm", f"{D}; {D}", f"embed/norm/gain_{D}", f"shift_{D}")
    rules += families.layers(names["layer"], names["in_layer"])
    if kind == "masked":
        rules += tensors.pair(names["transform"], f"{D} D; {D}", f"head/transform/W_{D}D", f"b_{D}")
        rules += tensors.pair(names["norm"], f"{D}; {D}", f"head/transform/norm/gain_{D}", f"shift_{D}")
        rules += [tensors.Line(names["bias"], "W", ("head/b_W",))]
        untied = tensors.Line(f"{names['decoder']}.weight", f"W {D}", (f"head/G_W{D}",))
        return rules if settings["tied_output"] else [*rules, untied]
    if kind == "classes":
        rules += tensors.pair(names["pooler"], "D D; D", "head/pooler/W_DD", "b_D")
    outputs = {"classes": names["classifier"], "tokens": "classifier", "spans": "qa_outputs"}
    return rules + (tensors.pair(outputs[kind], "C D; C", "head/G_CD", "b_C") if kind else [])


def clean(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors with today's names of norms, and with one bias of an untied output: the decoder's."""
    copy = f"{family.names['decoder']}.bias"
    for old, name in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        arrays = {key.replace(old, name): x for key, x in arrays.items()}
    if not settings["tied_output"] and copy in arrays:
        arrays[family.names["bias"]] = arrays.pop(copy)
    return arrays


def restore(arrays: tensors.Arrays, settings: families.Settings, family: families.Family) -> tensors.Arrays:
    """Return the tensors as they are written: the bias of an untied output under both names."""
    if settings["tied_output"] or family.names["bias"] not in arrays:
        return arrays
    return {**arrays, f"{family.names['decoder']}.bias": arrays[family.names["bias"]]}


FAMILY = families.Family(
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
    aside=("pooler.", *NEXT_SENTENCE),
    clean=clean,
    restore=restore,
)
