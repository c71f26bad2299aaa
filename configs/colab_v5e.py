"""160 M parameters for one v5e chip, as Colab has: four heads of 256 features, and keys and values of one.

hf download openai-community/gpt2 tokenizer.json --local-dir gpt2
python launch.py --config configs/colab_v5e.py --config.text.source=TEXT

TEXT is a file or a folder; without it, Python's own sources.

Compiler's estimate (jax 0.12.0.1, libtpu 0.0.50.1; not measured; attention's kernels at 50 % of the peak): 1.40 s for a
step of 131,072 tokens, 57 % of the peak, 8.0 of 15.75 GiB. Heads of 128 features: 2 % fewer tokens per second. Made by
`python -m benchmarks.tpu_estimate configs/colab_v5e.py v5e-1`.
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
