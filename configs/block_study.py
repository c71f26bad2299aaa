"""What do norm, residual connections and biases do? Seven blocks x 3 seeds on handwritten digits.

python launch.py --config configs/block_study.py --workdir runs/block
"""

from configs import base


def get_config():
    config = base.get_config("ablation", of="vision")
    config.study.arms = [
        ("no_norm", {"model.norm": "none", "model.final_norm": False}),
        ("no_residual", {"model.block": "plain"}),
        ("neither", {"model.norm": "none", "model.final_norm": False, "model.block": "plain"}),
        ("batch_features", {"model.norm": "batch_features"}),
        ("layer_sequence", {"model.norm": "layer_sequence"}),
        ("bias_of_mlp", {"model.bias": "mlp"}),
        ("usual", {}),
    ]
    config.study.seeds = [0, 1, 2]
    config.study.threshold = 0.2
    config.model.update(M=3, D=64)
    config.train.update(steps=400, evaluate_every=100)
    return config
