"""The class of an image file, told by a trained model: a vision run made here, or a published ViT.

python launch.py --config configs/classify.py --config.checkpoint=DIR --config.file=digit.png

DIR is a run's folder, or a folder with config.json and model.safetensors. The image is made as many rows, columns and
channels as the model's own images have (a line says so; MNIST's digits are white on black). Prints the five likeliest
classes with their probabilities. Nothing is written unless --workdir is given.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "classify"
    return config
