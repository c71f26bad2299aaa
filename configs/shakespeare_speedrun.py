"""The next character of Shakespeare, as soon as possible: below 1.898 nats, which nanoGPT's CPU recipe reaches in 88 s.

python launch.py --config configs/shakespeare_speedrun.py

140,672 parameters, 400 steps of 12 x 64 characters. Whole validation part (111,540 characters, windows of 64), seeds
0-4: 1.875, 1.853, 1.876, 1.868, 1.850 nats per character, on average 1.864; with `--config.mesh.data=2`, a device for
each of two cores, 1.870, 1.857, 1.876, 1.863, 1.849. Seconds are in docs/configs.md.

All was chosen on a held-out part of the training part, never on the validation part. `configs/speedrun_study.py` leaves
one choice out at a time.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.text.source = "tinyshakespeare"
    config.text.tokenizer = "characters"
    config.model.D = 64
    config.model.H = 2
    config.model.F = 128
    config.model.mlp = "relu"
    config.model.position = "none"
    config.model.relative_position = "rotary_halves"
    config.model.embed_norm = True
    config.model.output_std = 0.0
    config.model.bias = False
    config.optim.name = "muon"
    config.optim.learning_rate = 1e-2
    config.optim.muon_lr_multiplier = 4.5
    config.optim.momentum = 0.85
    config.optim.beta1 = 0.8
    config.optim.weight_decay = 0.0
    config.optim.clip = 0.0
    config.optim.schedule = "linear"
    config.optim.warmup_steps = 0
    config.optim.final_fraction = 0.0
    config.train.steps = 400
    config.train.batch_size = 12
    config.sample.max_new_tokens = 200
    return config
