"""Heads of BERT and its relatives: masked tokens, classes of a text, classes of tokens, and spans of answers."""

from typing import Any

from experiments.pretrained import families, tensors

OUTPUTS = {"masked": "mlp", "classes": "tanh", "tokens": "linear", "spans": "linear"}
CLASSES = {"masked": "ForMaskedLM", "classes": "ForSequenceClassification", "tokens": "ForTokenClassification"}
CLASSES |= {"spans": "ForQuestionAnswering", "": "Model"}
NEXT_SENTENCE = "cls.seq_relationship."
NAMES = {
    # For masked tokens: the layer before the output, its norm, the output matrix, and the bias of the output.
    **{"transform": "cls.predictions.transform.dense", "norm": "cls.predictions.transform.LayerNorm"},
    **{"decoder": "cls.predictions.decoder", "bias": "cls.predictions.bias"},
    **{"pooler": "pooler.dense", "classifier": "classifier"},  # for classes of a text: the same
}


def find(settings: families.Settings, arrays: tensors.Arrays, family: families.Family) -> families.Settings:
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
    """Return the rules of the head."""
    names, kind = family.names, settings["head"]
    if kind == "masked":
        untied = tensors.Line(f"{names['decoder']}.weight", "W D", ("head/G_WD",))
        return [
            *tensors.pair(names["transform"], "D D; D", "head/transform/W_DD", "b_D"),
            *tensors.pair(names["norm"], "D; D", "head/transform/norm/gain_D", "shift_D"),
            tensors.Line(names["bias"], "W", ("head/b_W",)),
            *([] if settings["tied_output"] else [untied]),
        ]
    outputs = {"classes": names["classifier"], "tokens": "classifier", "spans": "qa_outputs"}
    rules = tensors.pair(names["pooler"], "D D; D", "head/pooler/W_DD", "b_D") if kind == "classes" else []
    return rules + (tensors.pair(outputs[kind], "C D; C", "head/G_CD", "b_C") if kind else [])


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the fields of config.json for the head: transformers' class of the model, and the class names."""
    kind = settings["head"]
    suffix, labels = CLASSES[kind], {}
    if any(key.startswith(NEXT_SENTENCE) for key in settings["aside"]):
        suffix = "ForPreTraining" if kind else "ForNextSentencePrediction"
    if kind in ("classes", "tokens"):
        labels = families.write_labels(settings) | {"problem_type": settings.get("problem_type")}
    return {"architectures": [family.architecture + suffix]} | labels
