"""DistilBERT (Sanh et al. 2019): BERT's blocks without segments and without a pooler."""

from typing import Any

from experiments.pretrained import bert, bert_heads, families

NAMES = {
    "layer": "transformer.layer.{m}.",
    "in_layer": "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2"
    " output_layer_norm",
    **{"transform": "vocab_transform", "norm": "vocab_layer_norm", "decoder": "vocab_projector"},
    **{"bias": "vocab_projector.bias", "pooler": "pre_classifier", "classifier": "classifier"},
}


def write(settings: families.Settings, family: families.Family) -> dict[str, Any]:
    """Return the fields of config.json that are not in the family's table."""
    return bert_heads.write(settings, family) | {"sinusoidal_pos_embds": False}


FAMILY = bert.FAMILY._replace(
    architecture="DistilBert",
    outputs=bert_heads.OUTPUTS | {"classes": "relu"},
    sizes={"M": ("n_layers", 6), "D": ("dim", 768), "H": ("n_heads", 12), "F": ("hidden_dim", 3072)}
    | families.sizes(W=30522, N=512),
    choices=bert.FAMILY.choices | {"mlp": ("activation", families.ACTIVATIONS)},
    epsilon=None,
    plain=bert.FAMILY.plain | {"norm": "token:1e-12"},
    fixed={},
    write=write,
    names=NAMES,
    prefix="distilbert.",
    unprefixed=("vocab_", "pre_classifier.", "classifier.", "qa_outputs."),
    aside={"pooler.": f"{families.UNUSED}: DistilBERT's classifier has a layer of its own"},
    pooler={},
    tied={"vocab_projector.weight": bert.WORDS},
)
