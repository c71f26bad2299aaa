"""Fine-tuning: train a language model on another text.

python launch.py --config configs/finetune.py --config.init_from=DIR --config.text.source=TEXT

DIR is the folder of a run, or a folder with config.json, model.safetensors and tokenizer.json.
TEXT is a file or a folder.
With stories260K, a Llama with 260,000 parameters for children's stories, and Shakespeare as TEXT:
49 s on two cores, 2.84 nats per token of the last tenth, 30.3 % accuracy.
Training from random parameters reaches 4.13 nats and 17.3 %.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.text.N = 128
    config.optim.learning_rate = 3e-4
    config.train.update(steps=200, batch_size=16)
    return config
