"""Text from a trained model: a run made here, or a published GPT-2, Llama or llama2.c model.

python launch.py --config configs/sample.py --config.checkpoint=DIR --config.prompt='Once upon a time'

DIR is a run's folder, a folder with config.json, model.safetensors and tokenizer.json, or stories260K.bin with
tok512.bin beside it. Nothing is written unless --workdir is given. --config.prompts='["One", "Two"]' goes on with
several texts at once.

Two CPU cores: 4 s with start and compilation for 200 words of stories260K.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.experiment = "sample"
    config.sample.max_new_tokens = 0
    return config
