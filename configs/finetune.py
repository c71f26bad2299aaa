"""Fine-tuning: stories260K, a Llama of 260,000 parameters that tells children's stories, goes on with another text.

python launch.py --config configs/finetune.py --config.init_from=DIR/stories260K.bin
    --config.text.tokenizer=DIR/tok512.bin --config.text.source=TEXT

DIR has these two files of https://github.com/karpathy/llama2.c, TEXT is a file or a folder. For another model (a folder
with config.json, model.safetensors and tokenizer.json, or a run's folder) set the fields that the refusal names.
49 s on two cores: 2.84 nats per token of Shakespeare's last tenth, 30.3 % right; without init_from 4.13 and 17.3 %.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.update(M=5, D=64, H=8, G=4, F=172, norm="rms", mlp="swiglu", position="none")
    config.model.update(relative_position="rotary", bias=False)
    config.text.update(N=128, tied_output=True)
    config.optim.learning_rate = 3e-4
    config.train.update(steps=200, batch_size=16)
    return config
