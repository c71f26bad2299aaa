"""A study of twelve techniques whose benefit is disputed, against a plain model: two depths, ten seeds.

python launch.py --config configs/contradictions.py --workdir runs/contradictions
For one v5e chip of Colab; not run yet. The compiler (libtpu 0.0.50.1) estimates six hours for it with two more arms.
Its estimate of a step of ten seeds with eight layers is 0.48 s. Each arm has the best of three learning rates.
Claims and results: docs/contradictions.md.
"""

from configs import base


def arms(F):
    """Return the arms. F: hidden units of the MLP; a gated MLP has 2/3 of them, and so the same number of weights."""
    return [
        ("qk_norm", {"model.score": "asymmetric_qknorm"}),
        ("capped_logits", {"model.cap": 15.0}),
        ("capped_answers", {"model.output_cap": 15.0}),
        ("keys", {"model.value": "keys"}),
        ("one_projection", {"model.value": "keys", "model.score": "tied"}),
        ("one_key_and_value", {"model.G": 1}),
        ("relu_squared", {"model.mlp": "relu_squared"}),
        ("swiglu", {"model.mlp": "swiglu", "model.F": round(2 * F / 3)}),
        ("gated", {"model.value": "gated"}),
        ("exclusive", {"model.value": "exclusive"}),
        ("nonlinear_query", {"model.score": "nonlinear_query"}),
        ("ema", {"study.tune": [["optim.ema", [0.9, 0.97, 0.99]]]}),
        ("plain", {}),
    ]


def get_config():
    config = base.get_config("ablation", of="language")
    config.study.update(arms=arms(1536), seeds=[*range(10)], tune_seeds=[1000])
    config.study.tune = [["optim.learning_rate", [5e-4, 1e-3, 2e-3]]]
    config.study.conditions = [("four_layers", {"model.M": 4}), ("eight_layers", {"model.M": 8})]
    config.log = ["tensorboard"]
    config.text.update(source="stdlib", N=256)
    config.model.update(D=384, H=6, norm="rms", mlp="relu", bias="none", position="none")
    config.model.update(relative_position="rotary_halves", compute_dtype="bfloat16")
    config.optim.update(name="muon", schedule="linear:0", betas=[0.9, 0.95])
    config.train.update(steps=1000, log_every=50, evaluate_every=500)
    return config
