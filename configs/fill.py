"""Hidden words filled in by a trained model: a masked run made here, or a published BERT.

python launch.py --config configs/fill.py --config.checkpoint=DIR --config.prompt='The [MASK] sat on the mat.'

DIR is a run's folder (text.objective = masked), or a folder with config.json, model.safetensors and tokenizer.json.
Prints the text with the likeliest words in it, and for each [MASK] the five likeliest with their probabilities.
Nothing is written unless --workdir is given.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "fill"
    return config
