"""CIFAR-10 (50,000 + 10,000 colour images of 32 x 32 pixels in ten classes), classified from 64 patches.

python launch.py --config configs/vit_cifar.py
15 minutes on two cores: 74.6 % accuracy on the test split, seed 0.
The settings were chosen on 5,000 images of the training split.
The images are downloaded from the Hugging Face hub once, which needs `pip install -e ".[hub]"`.
For your images, set --config.image.source to a folder with train/CLASS/*.png and test/CLASS/*.png, or to an .npz with
x_train, y_train, x_test, y_test.
"""

from configs import base


def get_config():
    config = base.get_config("vision")
    config.model.update(M=4, D=64, relative_position="relative", attention="explicit")
    config.image.update(source="hub:uoft-cs/cifar10", patch=4, augment=["flip", "crop:2"])
    config.optim.update(name="muon", learning_rate=6e-3, muon_lr_multiplier=6.0)
    config.train.update(steps=9000, evaluate_every=3000, save_every=3000)
    return config
