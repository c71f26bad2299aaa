"""BERT (Devlin et al. 2019): post-norm, segments, a norm after the embedding, and heads of words, classes and spans.

What its relatives (bert_relatives.py) have too is here a function of the names by which they call it.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.pretrained import families, tensors
from experiments.pretrained.families import Field


def embeddings(D: str = "D", *, segments: bool = True) -> tuple[tensors.Line, ...]:
    """Words, positions, segments and their norm; D: the letter of their features."""
    tables = (("word", f"W {D}", f"embed/E_W{D}", ""), ("position", f"N {D}", f"position/P_N{D}", "unread"))
    tables += (("token_type", f"J {D}", f"embed/S_J{D}", ""),) if segments else ()
    return (
        *(tensors.Line(f"embeddings.{a}_embeddings.weight", axes, (ours,), "", skip) for a, axes, ours, skip in tables),
        *tensors.pair("embeddings.LayerNorm", f"{D}; {D}", f"embed/norm/gain_{D}", f"shift_{D}"),
    )


def words(dense: str, norm: str, decoder: str, bias: str, D: str = "D") -> tuple[tensors.Line, ...]:
    """The head that fills words in. bias: that of the words where the matrix is the embedding; '': the decoder's."""
    own = "untied/bias" if bias else "masked"
    return (
        *tensors.pair(dense, f"{D} D; {D}", f"head/transform/W_{D}D", f"b_{D}", "masked"),
        *tensors.pair(norm, f"{D}; {D}", f"head/transform/norm/gain_{D}", f"shift_{D}", "masked"),
        *((tensors.Line(bias, "W", ("head/b_W",), "masked/bias"),) if bias else ()),
        tensors.Line(f"{decoder}.weight", f"W {D}", (f"head/G_W{D}",), "untied"),
        tensors.Line(f"{decoder}.bias", "W", ("head/b_W",), own),
    )


def known(decoder: str, bias: str) -> tuple[tensors.Known, ...]:
    """Copies and buffers that a file may hold."""
    numbers = tensors.constant(
        "embeddings.position_ids", "the numbers from 0", lambda facts: np.arange(facts["N"] + facts["unread"])[None]
    )
    weight = tensors.copy(f"{decoder}.weight", "embeddings.word_embeddings.weight", unless="untied")
    if not bias:
        return numbers, weight
    return (
        numbers,
        weight,
        tensors.copy(f"{decoder}.bias", bias, unless="untied/bias"),
        tensors.Known(bias, "not used, since its decoder.bias is", lambda *_: True, unless="masked/bias"),
    )


def of_sequences(pooler: str, classifier: str) -> tuple[tensors.Line, ...]:
    """The heads of a text's class, through one more layer."""
    return (
        *tensors.pair(pooler, "D D; D", "head/pooler/W_DD", "b_D", "classes"),
        *tensors.pair(classifier, "C D; C", "head/G_CD", "b_C", "classes"),
    )


# The class of each word; and where an answer begins and ends (C = 2).
OF_WORDS = (
    *tensors.pair("classifier", "C D; C", "head/G_CD", "b_C", "tokens"),
    *tensors.pair("qa_outputs", "C D; C", "head/G_CD", "b_C", "spans"),
)


def complete(config: families.Config, facts: families.Facts) -> families.Facts:
    """Names of the classes, and sizes by letter."""
    names, said = families.labels(config), config.get("architectures") or ["?"]
    classes = {"C": len(names), "class_names": names, "architecture": str(said[0]) if isinstance(said, list) else "?"}
    classes["problem_type"] = config.get("problem_type")  # whether a text has one class, several, or is a number
    return {"J": facts["segments"], "unread": 0, "T": 2} | classes  # T: the next sentence follows or not


def groups(beginnings: Mapping[str, str], decoder: str, facts: families.Facts, names: set[str]) -> set[str]:
    """The heads that the file holds, by how the names of their tensors begin: without one, the model ends with its last
    block. The pooler of a text's classes is a part of that head."""
    found = {group for group, beginning in beginnings.items() if any(name.startswith(beginning) for name in names)}
    if {"classes", "tokens"} <= found:  # by one name: only that of texts needs a pooler, but others may have one, too
        whole = "pooler" not in beginnings or "pooler" in found
        found.remove("tokens" if whole and "ForTokenClassification" not in facts["architecture"] else "classes")
    if "classes" in found and beginnings["classes"] == "classifier.":
        found.discard("pooler")
    if "masked" not in found:
        return found
    if facts["tied_output"]:
        return found | {"masked/bias"}
    return found | {"untied", "untied/bias" if f"{decoder}.bias" in names else "masked/bias"}


CLASSES = {"masked": "ForMaskedLM", "classes": "ForSequenceClassification", "tokens": "ForTokenClassification"}
CLASSES |= {"spans": "ForQuestionAnswering"}


def architecture(name: str, facts: families.Facts, groups: set[str]) -> dict[str, Any]:
    """Their class with these heads, and the names of its classes."""
    kind, labels = next((kind for kind in CLASSES if kind in groups), ""), {}
    if kind in ("classes", "tokens"):
        labels = families.named(facts) | {"problem_type": facts.get("problem_type")}
    if "next_sentence" in groups:
        rows = {"num_labels": facts["T"]} if facts["T"] != 2 else {}  # of an ALBERT
        return {"architectures": [f"{name}ForPreTraining" if kind else f"{name}ForNextSentencePrediction"]} | rows
    return {"architectures": [name + CLASSES.get(kind, "Model")]} | labels


FIELDS = (
    *families.sizes(12, 768, 12, 3072),
    Field("vocab_size", "W", 30522),
    Field("max_position_embeddings", "N", 512),
    Field("type_vocab_size", "segments", 2),
    Field("hidden_act", "mlp", families.ACTIVATIONS),
    Field("layer_norm_eps", "norm", 1e-12),
    Field("tie_word_embeddings", "tied_output", families.YES),
    Field("position_embedding_type", "", families.only("absolute")),
    Field("is_decoder", "", families.only(False)),
    Field("add_cross_attention", "", families.only(False)),
)
MODEL = families.SETTINGS | {"block": ("post_norm",), "outer_norm": ("first",)}
MODEL |= {"segments": families.ANY}
BEGINNINGS = {"masked": "cls.predictions.", "classes": "classifier.", "tokens": "classifier.", "spans": "qa_outputs."}
BEGINNINGS |= {"pooler": "pooler.", "next_sentence": "cls.seq_relationship."}
NAMES = "attention.self.query attention.self.key attention.self.value attention.output.dense attention.output.LayerNorm"
NAMES += " intermediate.dense output.dense output.LayerNorm"
DECODER = ("cls.predictions.decoder", "cls.predictions.bias")
POOLER = tensors.pair("pooler.dense", "D D; D", "extras/pooler/W_DD", "b_D", "pooler")
FAMILY = families.Family(
    "bert",
    kind="masked",
    prefix="bert.",
    lines=(
        *embeddings(),
        *families.layers("encoder.layer.{m}.", NAMES),
        *words("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", *DECODER),
        *of_sequences("pooler.dense", "classifier"),
        *OF_WORDS,
        *POOLER,
        *tensors.pair("cls.seq_relationship", "T D; T", "extras/next_sentence/G_TD", "b_T", "next_sentence"),
    ),
    known=known(*DECODER),
    model=MODEL,
    fields=FIELDS,
    extra=functools.partial(architecture, "Bert"),
    groups=functools.partial(groups, BEGINNINGS, DECODER[0]),
    complete=complete,
    ids=("pad_token_id",),
    unprefixed=("cls.", "classifier.", "qa_outputs."),
    spellings=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),  # the first files
    heads={"masked": None, "classes": "tanh", "tokens": "", "spans": ""},
)
