"""Grokking (Power et al. 2022): addition modulo a prime, whose training pairs are learned long before the others.

python launch.py --config configs/grokking.py
"""

from configs import base


def get_config():
    config = base.get_config("synthetic")
    config.synthetic.task = "modular_addition:59"
    config.model.update(M=1, H=4, D=128)
    config.optim.update(learning_rate=2e-3, schedule="wsd", betas=[0.9, 0.98], warmup_steps=10, weight_decay=1.0)
    config.train.update(steps=2000, batch_size=256, log_every=50, evaluate_every=50)
    return config
