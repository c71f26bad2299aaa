"""Fine-tuning: train stories260K, a Llama with 260,000 parameters for children's stories, on another text.

python launch.py --config configs/finetune.py --config.init_from=DIR/stories260K.bin --config.text.source=TEXT

DIR has stories260K.bin and tok512.bin of https://github.com/karpathy/llama2.c. TEXT is a file or a folder.
Other models work as well: the folder of a run, or a folder with config.json, model.safetensors and tokenizer.json.
With Shakespeare as TEXT: 49 s on two cores, 2.84 nats per token of the last tenth, 30.3 % accuracy.
Training from random parameters reaches 4.13 nats and 17.3 %.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.text.N = 128
    config.optim.learning_rate = 3e-4
    config.train.update(steps=200, batch_size=16)
    return config
