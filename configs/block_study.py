"""A study of norms, residual connections and biases: seven blocks x 3 seeds on handwritten digits.

python launch.py --config configs/block_study.py --workdir runs/block
670 s on two busy cores. Loss in nats per held-out digit, and accuracy:
neither          1.040, 63.3 %
no_norm          0.338, 90.0 %
no_residual      0.108, 96.8 %
layer_sequence   0.074, 97.7 %
usual            0.068, 98.2 %
bias_of_mlp      0.064, 98.4 %
batch_features   0.061, 98.5 %
With three seeds only `neither` is significantly worse than `usual` (95 % interval: by 0.03 to 1.91 nats).
"""

from configs import base


def get_config():
    config = base.get_config("ablation", of="vision")
    config.study.arms = [
        ("no_norm", {"model.norm": "none", "model.outer_norm": "none"}),
        ("no_residual", {"model.block": "plain"}),
        ("neither", {"model.norm": "none", "model.outer_norm": "none", "model.block": "plain"}),
        ("batch_features", {"model.norm": "batch_features"}),
        ("layer_sequence", {"model.norm": "layer_sequence"}),
        ("bias_of_mlp", {"model.bias": "mlp"}),
        ("usual", {}),
    ]
    config.study.update(seeds=[0, 1, 2], threshold=0.2)
    config.model.update(M=3, D=64)
    config.train.update(steps=400, evaluate_every=100)
    return config
