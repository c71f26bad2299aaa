"""A run whose batches grow (E30): what it logs and says, what it compiles, and that resuming changes nothing."""

import json

import jax
import pytest
import tiny

from configs import base
from experiments.engine import config as configs
from experiments.engine import errors, log
from experiments.engine import step as steps

GROWTH = [[3, 32], [6, 48], [8, 32]]
SIZES = [16] * 3 + [32] * 3 + [48] * 2 + [32] * 2
CHANGES = {
    "image.patch": 4,
    "model.M": 1,
    "model.D": 8,
    "model.H": 2,
    "model.dropout": 0.1,
    "image.shift": 1,
    "train.batch_size": 16,
    "train.growth": GROWTH,
    "train.steps": 10,
    "train.save_every": 2,
    "train.log_every": 1,
    "train.evaluate_batch": 64,
    "optim.warmup_steps": 1,
    "optim.learning_rate": 0.01,
    "optim.schedule": "constant",
    "optim.batch_rule": "sqrt",
}


@pytest.fixture(scope="module", autouse=True)
def quick():
    with tiny.without_figures():
        yield


def launched(folder, name, *more):
    file = tiny.config_file(folder, "vision", **CHANGES)
    return tiny.run("--config", file, "--workdir", str(folder / name), *more)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """(outcome, folder, what the live line counted, how often a step was traced and how often compiled)"""
    folder, counted, traced, compiled = tmp_path_factory.mktemp("run"), [], [], []
    made, compile = steps.update, jax.stages.Lowered.compile

    def counting(task, *arguments, **options):
        def loss_and_metrics(params, batch, *rest):
            traced.append(batch["example_B"].shape[0])
            return task.loss_and_metrics(params, batch, *rest)

        return made(task._replace(loss_and_metrics=loss_and_metrics), *arguments, **options)

    class Watched(log.Progress):
        def close(self):
            tokens = round(self.tokens_per_second() * self._pace.steps.seconds)
            counted.append((tokens, self._evaluations(1), self._evaluation, self._pace.evaluations.work))
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "update", counting)
        patch.setattr(log, "Progress", Watched)
        patch.setattr(jax.stages.Lowered, "compile", lambda self: compiled.append(compile(self)) or compiled[-1])
        outcome = launched(folder, "run")
    return outcome, folder / "run", counted, traced, len(compiled)


def test_a_run_whose_batches_grow(unbroken):
    outcome, folder, counted, traced, compiled = unbroken
    assert (outcome.code, outcome.err) == (0, "")
    assert sorted(traced) == [16 // 8, 32 // 8, 48 // 8] and compiled == 3  # on each of 8 devices; 32 comes twice
    rows = [row for row in log.read(folder) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([0.01 * (size / 16) ** 0.5 for size in SIZES])
    for words in ("16 examples, 64 tokens", "48 examples, 192 tokens, after step 6", "32 examples, 128 tokens, after"):
        assert words in outcome.out
    # Tokens without the first step's; the evaluation, once: 6 batches of 64, forward only, for steps of 16.
    assert counted == [(4 * sum(SIZES[1:]), 1, 8, 8)]


def test_throughput_counts_the_tokens_of_every_step(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(log.time, "perf_counter", lambda: now)
    progress = log.Progress(
        start=2, steps=10, tokens_per_step=64, flops_per_step=32, peak=64.0, work=lambda n: sum(SIZES[:n]) / 16
    )
    for step in (3, 4, 5, 6, 7):  # 32 + 32 + 32 + 48 examples of 4 tokens in 16 s, behind 16 that do not count
        now += 4
        progress.advance(step, 1.5)
    assert progress.tokens_per_second() == 4 * 144 / 16
    said = capsys.readouterr().out.splitlines()[-1]  # after 12 s: 64 examples in 8 s; 192 to come
    assert said == "step 5/10: 00:24 left, loss 1.5000, 32 tokens/s, 25 % of matrix-product speed"


def test_a_run_resumes_across_a_change_of_size_bit_for_bit(unbroken, tmp_path, monkeypatch):
    def stopping(self, step, loss):
        if step == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(log.Progress, "advance", stopping)
        assert launched(tmp_path, "run").code == 130
    outcome = launched(tmp_path, "run")
    assert outcome.code == 0 and f"resuming {tmp_path / 'run'} at step 4" in outcome.out
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (unbroken[1], tmp_path / "run"))
    assert first["params_sha256"] == second["params_sha256"]
    assert log.read(unbroken[1]) == log.read(tmp_path / "run")


def test_a_dry_run_shows_the_memory_of_the_largest_batch(tmp_path):
    def temporary(*more):
        file = tiny.config_file(tmp_path, "vision", **CHANGES)
        outcome = tiny.run("--config", file, "--dry_run", "--config.optim.batch_rule=none", *more)
        assert outcome.code == 0, outcome.err
        return outcome.out.partition("XLA's memory analysis")[2]

    grown = temporary("--config.train.growth=[[3, 48], [6, 16]]")
    assert grown == temporary("--config.train.growth=[]", "--config.train.batch_size=48")
    assert grown != temporary("--config.train.growth=[]")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[500,128],[800,256]]", ""),
        ("[[500,128],[400,256]]", "the steps of train.growth must ascend"),
        (
            "[[500,12]]",
            "train.growth = 12 does not divide evenly over 8 devices: choose a multiple of 8, or fewer devices with "
            "mesh.data = 6",
        ),
        ("500,128", '"train.growth" must be of type list, as'),
        ("[500,128]", "train.growth holds 500, which is no pair"),
        ("[[500,128.5]]", "train.growth holds [500, 128.5], which is no pair"),
        ('{"500": 128}', '"train.growth" must be of type list'),
    ],
)
def test_growth_from_the_command_line(tmp_path, monkeypatch, text, said):
    monkeypatch.setattr(steps, "initial_state", stop)
    outcome = launched(tmp_path, "run", f"--config.train.growth={text}")
    assert outcome.code == 2 and (said or "so far, so good") in outcome.err


def stop(*arguments, **options):
    raise errors.UserError("so far, so good")


def test_a_rule_without_growth_is_refused_as_unused(tmp_path):
    outcome = launched(tmp_path, "run", "--config.train.growth=[]")
    assert outcome.code == 2 and "optim.batch_rule is set, but this experiment does not use it" in outcome.err


def test_pairs_may_be_tuples_in_a_config_file_and_are_lists_in_what_is_saved():
    config = base.get_config()
    config.train.growth = [(500, 128)]
    assert configs.flat(configs.values_of(config))["train.growth"] == [[500, 128]]
