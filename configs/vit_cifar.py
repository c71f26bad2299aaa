"""CIFAR-10 (50,000 + 10,000 colour images of 32 x 32 pixels in ten classes) classified from 64 patches.

python launch.py --config configs/vit_cifar.py --config.image.source=DIR
DIR has the images in DIR/train/CLASS/*.png and DIR/test/CLASS/*.png; cifar10.npz, made as below, is read at once.
The "binary version" of https://www.cs.toronto.edu/~kriz/cifar.html becomes that file by

    names = [f"cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
    rows = np.concatenate([np.fromfile(name, np.uint8).reshape(-1, 3073) for name in names])
    x, y = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0]
    np.savez("cifar10.npz", x_train=x[:50000], y_train=y[:50000], x_test=x[50000:], y_test=y[50000:])

Settings were chosen on 5,000 images of the training part.
"""

from configs import base


def get_config():
    config = base.get_config("vision")
    config.model.update(M=4, D=64, relative_position="relative", attention="explicit")
    config.image.update(source="cifar10.npz", patch=4, augment=["flip", "crop:2"])
    config.optim.update(name="muon", learning_rate=6e-3, muon_lr_multiplier=6.0)
    config.train.update(steps=12000, evaluate_every=2000, save_every=2000)
    return config
