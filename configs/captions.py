"""Images and text in one sequence: the patches of a digit, then its name, spelled letter by letter.

python launch.py --config configs/captions.py
60 s on two busy cores: 96.4 % of the names of 334 held-out digits have no error; 99.3 % of the letters are correct.
"""

from configs import base


def get_config():
    config = base.get_config("captions")
    config.model.update(M=2, D=64)
    config.image.augment = ["shift:0.5"]
    config.train.update(steps=600, evaluate_every=200)
    return config
