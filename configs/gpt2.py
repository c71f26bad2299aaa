"""GPT-2 with 124 M parameters in bfloat16 on one TPU chip, trained from a text or from OpenAI's weights.

hf download openai-community/gpt2 tokenizer.json config.json model.safetensors --local-dir gpt2
python launch.py --config configs/gpt2.py --config.text.source=TEXT
python launch.py --config configs/gpt2.py --config.text.source=TEXT --config.init_from=gpt2
TEXT is a file or a folder. The default is Python's own sources. Without init_from, only tokenizer.json is needed.

Not measured on a chip. The compiler's estimate for one v5e chip is 575 ms for a step of 65,536 tokens.
This is 50 % of the peak FLOP/s. The step needs 11.2 of 15.75 GiB.
Source: `python -m benchmarks.tpu_estimate configs/gpt2.py v5e-1` with jax 0.12.0.1 and libtpu 0.0.50.1.
The estimate assumes that attention kernels reach 50 % of the peak.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.update(M=12, D=768, H=12, mlp="gelu_tanh", compute_dtype="bfloat16", remat="products")
    config.text.update(tokenizer="gpt2/tokenizer.json", N=1024, head="tied")
    config.optim.update(learning_rate=6e-4, betas=[0.9, 0.95])
    config.train.update(steps=1000, batch_size=64, accumulation=2)
    return config
