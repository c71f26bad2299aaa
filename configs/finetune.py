"""Fine-tuning: stories260K, a Llama of 260,000 parameters trained on children's stories, continues with another text.

python launch.py --config configs/finetune.py --config.init_from=DIR/stories260K.bin --config.text.source=TEXT

DIR has this file and tok512.bin of https://github.com/karpathy/llama2.c; TEXT is a file or a folder.
Another model works in the same way: a run's folder, or one with config.json, model.safetensors and tokenizer.json.
49 s on two cores: 2.84 nats per token of Shakespeare's last tenth, 30.3 % accuracy.
From random weights: 4.13 nats and 17.3 %.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.text.N = 128
    config.optim.learning_rate = 3e-4
    config.train.update(steps=200, batch_size=16)
    return config
