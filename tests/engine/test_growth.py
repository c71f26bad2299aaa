"""A run whose batches grow (E30): what it logs and says, what it compiles, and that resuming changes nothing."""

import re

import jax
import numpy as np
import pytest
from resuming import alike, break_off, run

from configs import base
from experiments.engine import compilation, config as configs, log

GROWTH = [[3, 16], [6, 8]]
SIZES = [8] * 3 + [16] * 3 + [8] * 4
CHANGES = {"train__growth": GROWTH, "train__steps": 10, "train__save_every": 2, "train__evaluate_every": 0}
CHANGES |= {"optim__schedule": "constant", "optim__learning_rate": 0.01}
CHANGES |= {"optim__warmup_steps": 1}


def test_a_run_whose_batches_grow_and_that_is_resumed_across_a_change_of_size(tmp_path, monkeypatch, capsys):
    compiled, compile = [], jax.stages.Lowered.compile
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda self: compiled.append(compile(self)) or compiled[-1])
        run(tmp_path / "whole", **CHANGES)
    assert len(compiled) == 2  # sizes, of which one comes twice
    told = capsys.readouterr().out
    for words in ("8 examples, 8 tokens", "16 examples, 16 tokens, after step 3", "8 examples, 8 tokens, after"):
        assert words in told
    assert re.findall(r"([\d.]+ \w+) per step", told) == ["720 FLOP", "1.44 kFLOP", "720 FLOP"]  # of twice the examples
    rows = [row for row in log.read(tmp_path / "whole") if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([0.01] * len(SIZES))
    break_off(tmp_path / "parts", 6, **CHANGES)
    run(tmp_path / "parts", **CHANGES)
    assert f"resuming {tmp_path / 'parts'} at step 4" in capsys.readouterr().out
    assert alike(tmp_path / "parts", tmp_path / "whole")


def test_the_step_of_a_batch_is_that_of_its_size_and_the_memory_is_that_of_the_largest():
    compiled = compilation.Compiled({n: lambda state, batch, n=n: (n, state, batch) for n in (3, 5, 4)})
    for n in (3, 5):
        batch = {"x_B": np.ones(n)}
        assert compiled("state", batch) == (n, "state", batch)
    assert compiled.largest() is compiled[5]


def test_pairs_may_be_tuples_in_a_config_file_and_are_lists_in_what_is_saved():
    config = base.get_config()
    config.train.growth = [(500, 128)]
    assert configs.flat(configs.values_of(config))["train.growth"] == [[500, 128]]
