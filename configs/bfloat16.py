"""Mixed precision: products and tokens in bfloat16, parameters, softmax, norms, logits and loss in float32.

python launch.py --config configs/bfloat16.py

RESULT
"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "vision"
    config.model.M = 2
    config.model.D = 64
    config.model.compute_dtype = "bfloat16"
    config.image.shift = 0.5
    config.train.steps = 400
    return config
