"""Masked image modelling on Fashion-MNIST (60,000 + 10,000 images): predict three quarters of the 49 patches.

python launch.py --config configs/masked_image_fashion.py
234 s on two cores: squared error 0.184 per masked pixel of test images, 73.5 % less than with the average image.
Put the four IDX files into a folder `fashion-mnist` in $TFM_DATA or ~/.cache/tfm.
"""

from configs import base


def get_config():
    config = base.get_config("masked_image")
    config.model.D = 64
    config.image.update(source="fashion_mnist", patch=4)
    config.optim.learning_rate = 2e-3
    config.train.update(steps=3000, evaluate_every=1000, save_every=1000)
    return config
