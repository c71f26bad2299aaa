"""Induction (Olsson et al. 2022): continue a text of random tokens that repeats, with two layers of attention.

python launch.py --config configs/induction.py
"""

from configs import base


def get_config():
    config = base.get_config("synthetic")
    config.synthetic.task = "induction:32"
    config.log = [*config.log, "symmetry"]  # and the scores of heads
    config.model.update(M=2, H=4, D=64, F=64, position="none", relative_position="rotary:100")
    config.optim.update(learning_rate=3e-3, warmup_steps=50, weight_decay=0.0)
    config.train.update(steps=800, batch_size=64, log_every=25, evaluate_every=25)
    return config
