"""A language model of 170 M parameters for one v6e chip: five query heads and one key head of 256 features.

The matrix units of the chip multiply 256 x 256 numbers, so 256 features fill them.

hf download openai-community/gpt2 tokenizer.json --local-dir gpt2
python launch.py --config configs/colab_v6e.py --config.text.source=TEXT
TEXT is a file or a folder. The default is Python's own sources.

Not measured on a chip. The compiler's estimate is 583 ms for a step of 131,072 tokens, 30 % of the peak FLOP/s.
The step needs 6.4 of 31.2 GiB. With nine layers of 1,024 features it is 7 % slower, in tokens per second.
Source: `python -m benchmarks.tpu_estimate configs/colab_v6e.py v6e-1` with jax 0.12.0.1 and libtpu 0.0.50.1.
The estimate assumes that attention kernels reach 50 % of the peak.
"""

from configs import colab_v5e


def get_config():
    config = colab_v5e.get_config()
    config.model.update(M=6, D=1280, H=5, F=3584)
    config.train.accumulation = 16
    return config
