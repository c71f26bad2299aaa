"""Fashion-MNIST (60,000 + 10,000 images of 28 x 28 pixels) classified from 49 patches.

python launch.py --config configs/vit_fashion.py

The four IDX files lie in a folder `fashion-mnist` under $TFM_DATA, --config.data_dir or ~/.cache/tfm.
Two CPU cores: @T. 10,000 test images, seed 0: @R.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "vision"
    config.model.M = 2
    config.model.D = 64
    config.image.source = "fashion_mnist"
    config.image.patch = 4
    config.optim.learning_rate = 2e-3
    config.train.steps = 8000
    config.train.evaluate_every = 2000
    config.train.save_every = 2000
    return config
