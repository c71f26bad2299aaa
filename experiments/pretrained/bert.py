"""BERT (Devlin et al. 2019): post-norm, segments, a norm after the embedding; its heads are in bert_heads.py.

Its relatives (roberta.py, distilbert.py) change its table and the names of its tensors.
"""

from experiments.pretrained import bert_heads, families, tensors

WORDS = "embeddings.word_embeddings.weight"
LAYER = "attention.self.query attention.self.key attention.self.value attention.output.dense attention.output.LayerNorm"
LAYER += " intermediate.dense output.dense output.LayerNorm"
NAMES = bert_heads.NAMES | {"layer": "encoder.layer.{m}.", "in_layer": LAYER}  # as families.layers takes them


def read(config: families.HfConfig, settings: families.Settings) -> families.Settings:
    """Return the settings with "architecture", the class in config.json.

    Heads for classes of texts and for classes of tokens can have the same tensors: only the class tells them apart.
    """
    return settings | {"architecture": str((config.get("architectures") or "?")[0])}


def lines(settings: families.Settings, family: families.Family) -> list[tensors.Line]:
    """Return the rules of all tensors."""
    tables = [("word", "W D", "embed/E_WD"), ("position", "N D", "position/P_ND")]
    tables += [("token_type", "J D", "embed/S_JD")] if settings["segments"] else []
    return [
        *(tensors.Line(f"embeddings.{table}_embeddings.weight", axes, (ours,)) for table, axes, ours in tables),
        *tensors.pair("embeddings.LayerNorm", "D; D", "embed/norm/gain_D", "shift_D"),
        *families.layers(family.names["layer"], family.names["in_layer"]),
        *bert_heads.lines(settings, family),
    ]


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


FAMILY = families.Family(
    architecture="Bert",
    outputs=bert_heads.OUTPUTS,
    sizes=families.sizes(M=12, D=768, H=12, F=3072, W=30522, N=512, segments=2),
    choices={"mlp": ("hidden_act", families.ACTIVATIONS), "tied_output": ("tie_word_embeddings", families.TRUE)},
    epsilon=("layer_norm_eps", 1e-12),
    plain=families.PLAIN | {"block": "post_norm", "outer_norm": "first"},
    fixed={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    ids=("pad_token_id",),
    read=read,
    write=bert_heads.write,
    names=NAMES,
    prefix="bert.",
    unprefixed=("cls.", "classifier.", "qa_outputs."),
    lines=lines,
    head=bert_heads.find,
    tied={f"{NAMES['decoder']}.weight": WORDS, f"{NAMES['decoder']}.bias": NAMES["bias"]},
    buffers=("embeddings.position_ids",),
    aside={
        "pooler.": "head/pooler of a new head for classes of texts (text.head = tanh)",
        bert_heads.NEXT_SENTENCE: families.UNUSED,
    },
    pooler={f"{NAMES['pooler']}.weight": "head/pooler/W_DD", f"{NAMES['pooler']}.bias": "head/pooler/b_D"},
    clean=clean,
    restore=restore,
)
