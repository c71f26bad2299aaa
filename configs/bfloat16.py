"""Mixed precision: matrix products and tokens in bfloat16; parameters, softmax, norms, logits and loss in float32.

python launch.py --config configs/bfloat16.py
16 s on two cores: 97.9 % accuracy on 334 held-out digits.
"""

from configs import base


def get_config():
    config = base.get_config("vision")
    config.model.update(M=2, D=64, compute_dtype="bfloat16")
    config.image.augment = ["shift:0.5"]
    config.train.steps = 400
    return config
