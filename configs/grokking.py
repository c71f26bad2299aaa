"""Grokking (Power et al. 2022): addition modulo 59, of which the model first learns only the training pairs by heart.

python launch.py --config configs/grokking.py
57 s of processor time, seeds 0-4: 100 % accuracy in training after 100 steps, 95 % on held-out pairs after 850 to 950
steps, 100.0 % at the end (the most frequent sum: 2.2 %). figures/accuracy.png shows both accuracies.
With --config.optim.weight_decay=0.0, 32.2 % of held-out pairs are right at the end (seed 0).
40 % of the 3,481 pairs (a, b) are for training. Held-out accuracy first stays near 38 %, because a + b = b + a: after
400 steps (seed 0, with a constant rate) 94.8 % of held-out pairs are right if (b, a) is a training pair, else 0.2 %.
"""

from configs import base


def get_config():
    config = base.get_config("synthetic")
    config.synthetic.task = "modular_addition:59"
    config.model.update(M=1, H=4, D=128)
    config.optim.update(learning_rate=2e-3, schedule="wsd", betas=[0.9, 0.98], warmup_steps=10, weight_decay=1.0)
    config.train.update(steps=2000, batch_size=256, log_every=50, evaluate_every=50)
    return config
