"""Fine-tuning: stories260K, a Llama of 260,000 parameters that tells children's stories, goes on with another text.

python launch.py --config configs/finetune.py --config.init_from=DIR/stories260K.bin
    --config.text.tokenizer=DIR/tok512.bin --config.text.source=TEXT

DIR has these two files of https://github.com/karpathy/llama2.c, TEXT is a file or a folder. For another model (a folder
with config.json, model.safetensors and tokenizer.json, or a run's folder) set the fields that the refusal names.
Without init_from the same model begins with random numbers.

Two CPU cores: 49 s with start and compilation. Shakespeare (TEXT a file of tinyshakespeare's), its last tenth, seed 0:
2.83 nats per token and 30.5 % of the tokens, where 200 steps from random numbers reach 4.15 and 17.3 %.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.M = 5
    config.model.D = 64
    config.model.H = 8
    config.model.F = 172
    config.model.norm = "rms"
    config.model.mlp = "swiglu"
    config.model.position = "none"
    config.model.relative_position = "rotary"
    config.model.bias = False
    config.text.N = 128
    config.text.tied_output = True
    config.optim.learning_rate = 3e-4
    config.train.steps = 200
    config.train.batch_size = 16
    return config
