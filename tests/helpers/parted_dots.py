"""The experiment of dots.py with more points and a third split, on which settings are tuned."""

import dots
import numpy as np
import tiny

from experiments.model import splits

config = dots.config
TRAIN, HELD_OUT = 640, 29


def prepare(settings, devices):
    work, rng = dots.prepare(settings, devices), np.random.default_rng(1)
    x_BD = rng.standard_normal((TRAIN + HELD_OUT, tiny.D)).astype(np.float32)
    label_B = rng.integers(0, tiny.C, TRAIN + HELD_OUT).astype(np.int32)

    def fetch(index_B, rng):
        return {"x_BD": x_BD[index_B], "label_B": label_B[index_B], "weight_B": np.ones(len(index_B), np.float32)}

    held_out = (lambda index_B, rng: fetch(index_B + TRAIN, rng), HELD_OUT)
    parts = splits.make_splits(settings, (fetch, TRAIN), held_out, tokens=1)
    return work._replace(task=work.task._replace(**parts))
