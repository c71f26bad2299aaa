"""A language model of 160 M parameters for one v5e chip of Colab: four query heads, one key head, of 256 features.

hf download openai-community/gpt2 tokenizer.json --local-dir gpt2
python launch.py --config configs/colab_v5e.py --config.text.source=TEXT
TEXT is a file or a folder. The default is Python's own sources.

Not measured on a chip. The compiler's estimate is 1.40 s for a step of 131,072 tokens, 57 % of the peak FLOP/s.
The step needs 8.0 of 15.75 GiB. With heads of 128 features it is 2 % slower, in tokens per second.
Source: `python -m benchmarks.tpu_estimate configs/colab_v5e.py v5e-1` with jax 0.12.0.1 and libtpu 0.0.50.1.
The estimate assumes that attention kernels reach 50 % of the peak.
"""

from configs import base


def get_config():
    config = base.get_config("language")
    config.model.update(M=9, D=1024, H=4, G=1, F=3072, norm="rms", mlp="swiglu", bias="none")
    config.model.update(position="none", relative_position="rotary_halves", compute_dtype="bfloat16", remat="products")
    config.text.update(tokenizer="gpt2/tokenizer.json", N=2048, head="tied")
    config.optim.update(learning_rate=1e-3, betas=[0.9, 0.95])
    config.train.update(steps=1000, batch_size=64, accumulation=8)
    return config
