"""BERT (Devlin et al. 2019): post-norm, segments, a norm after the embedding, and heads of words, classes and spans.

What its relatives (bert_relatives.py) have too is here a function of `Names`, by which they call their tensors.
"""

import functools
import re
from typing import Any, NamedTuple

from experiments.pretrained import families, tensors

OUTPUTS = {"masked": "mlp", "classes": "tanh", "tokens": "linear", "spans": "linear"}
CLASSES = {"masked": "ForMaskedLM", "classes": "ForSequenceClassification", "tokens": "ForTokenClassification"}
CLASSES |= {"spans": "ForQuestionAnswering", "": "Model"}
NEXT_SENTENCE = ("cls.seq_relationship.", "sop_classifier.")
LAYER = "attention.self.query attention.self.key attention.self.value attention.output.dense attention.output.LayerNorm"
LAYER += " intermediate.dense output.dense output.LayerNorm"
FIELDS = families.Fields(
    plain=families.PLAIN | {"block": "post_norm", "outer_norm": "first"},
    sizes={
        "M": ("num_hidden_layers", 12),
        "D": ("hidden_size", 768),
        "H": ("num_attention_heads", 12),
        "F": ("intermediate_size", 3072),
        "W": ("vocab_size", 30522),
        "N": ("max_position_embeddings", 512),
        "segments": ("type_vocab_size", 2),
    },
    choices={
        "mlp": ("hidden_act", families.ACTIVATIONS),
        "tied_output": ("tie_word_embeddings", families.TRUE),
    },
    epsilon=("layer_norm_eps", 1e-12),
    fixed={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
)


class Names(NamedTuple):
    """Names of a family's tensors."""

    layer: str  # the prefix of a layer
    in_layer: str  # as families.layers has them
    transform: str  # of the head of words: the layer before the output, its norm, the output matrix, and its bias
    norm: str
    decoder: str
    bias: str
    pooler: str  # of the head of a text's classes: the layer before it, and the output
    classifier: str


NAMES = Names(
    layer="encoder.layer.{m}.",
    in_layer=LAYER,
    transform="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    bias="cls.predictions.bias",
    pooler="pooler.dense",
    classifier="classifier",
)


def read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with the name of their class, which decides between heads."""
    return settings | {"architecture": str((config.get("architectures") or "?")[0])}


def write(settings: families.Settings, *, name: str) -> dict[str, Any]:
    """Return the rest of config.json: their class with these heads, which begins with `name`, and the class names."""
    kind = settings["head"]
    if any(key.startswith(NEXT_SENTENCE) for key in settings["aside"]):
        return {"architectures": [f"{name}ForPreTraining" if kind else f"{name}ForNextSentencePrediction"]}
    config = {"architectures": [name + CLASSES[kind]]}
    if kind in ("classes", "tokens"):
        config |= families.write_labels(settings) | {"problem_type": settings.get("problem_type")}
    return config


def head(settings: families.Settings, arrays: tensors.Arrays, *, names: Names) -> families.Settings:
    """Return which head the file holds, by the names of its tensors, with its number of classes. A text's classes need
    a pooler; without that head, the pooler is no part of our models."""
    texts = f"{names.pooler}.weight" in arrays and "ForTokenClassification" not in settings["architecture"]
    last = {"masked": names.transform, **({"classes": names.classifier} if texts else {})}
    last |= {"tokens": "classifier", "spans": "qa_outputs"}
    for kind, name in last.items():
        if (weight := arrays.get(f"{name}.weight")) is not None:
            return {"head": kind} | ({} if kind == "masked" else {"C": len(weight)})
    return {"head": ""}


def lines(settings: families.Settings, *, names: Names) -> list[tensors.Line]:
    """Return the rules of all tensors. E: ALBERT's features of words, positions and segments."""
    D = "E" if settings["E"] else "D"
    tables = [("word", f"W {D}", f"embed/E_W{D}"), ("position", f"N {D}", f"position/P_N{D}")]
    tables += [("token_type", f"J {D}", f"embed/S_J{D}")] if settings["segments"] else []
    rules = [tensors.Line(f"embeddings.{table}_embeddings.weight", axes, (ours,)) for table, axes, ours in tables]
    rules += tensors.pair("embeddings.LayerNorm", f"{D}; {D}", f"embed/norm/gain_{D}", f"shift_{D}")
    rules += families.layers(names.layer, names.in_layer)
    if settings["head"] == "masked":
        rules += tensors.pair(names.transform, f"{D} D; {D}", f"head/transform/W_{D}D", f"b_{D}")
        rules += tensors.pair(names.norm, f"{D}; {D}", f"head/transform/norm/gain_{D}", f"shift_{D}")
        rules += [tensors.Line(names.bias, "W", ("head/b_W",))]
        untied = tensors.Line(f"{names.decoder}.weight", f"W {D}", (f"head/G_W{D}",))
        rules += [] if settings["tied_output"] else [untied]
    elif settings["head"] == "classes":
        rules += tensors.pair(names.pooler, "D D; D", "head/pooler/W_DD", "b_D")
        rules += tensors.pair(names.classifier, "C D; C", "head/G_CD", "b_C")
    elif settings["head"]:
        classifier = "classifier" if settings["head"] == "tokens" else "qa_outputs"
        rules += tensors.pair(classifier, "C D; C", "head/G_CD", "b_C")
    return rules


def clean(arrays: tensors.Arrays, settings: families.Settings, *, names: Names) -> tensors.Arrays:
    """Return the tensors with today's names of norms, and with one bias of an untied output: the decoder's."""
    spell = {"gamma": "weight", "beta": "bias"}
    arrays = {re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda m: spell[m[0]], name): x for name, x in arrays.items()}
    if not settings["tied_output"] and f"{names.decoder}.bias" in arrays:
        arrays[names.bias] = arrays.pop(f"{names.decoder}.bias")
    return arrays


def restore(arrays: tensors.Arrays, settings: families.Settings, *, names: Names) -> tensors.Arrays:
    """Return the tensors as they are written: the bias of an untied output under both names."""
    if settings["tied_output"] or names.bias not in arrays:
        return arrays
    return {**arrays, f"{names.decoder}.bias": arrays[names.bias]}


def family(names: Names, name: str) -> families.Family:
    """Return a family with BERT's settings and these names of tensors. Names of their classes begin with `name`."""
    tied = {f"{names.decoder}.weight": "embeddings.word_embeddings.weight", f"{names.decoder}.bias": names.bias}
    return families.Family(
        outputs=OUTPUTS,
        prefix="bert.",
        unprefixed=("cls.", "classifier.", "qa_outputs."),
        ids=("pad_token_id",),
        fields=FIELDS,
        read=read,
        write=functools.partial(write, name=name),
        lines=functools.partial(lines, names=names),
        head=functools.partial(head, names=names),
        tied={copy: original for copy, original in tied.items() if copy != original},
        buffers=("embeddings.position_ids",),
        aside=("pooler.", *NEXT_SENTENCE),
        clean=functools.partial(clean, names=names),
        restore=functools.partial(restore, names=names),
    )


FAMILY = family(NAMES, "Bert")
