"""Arms are paired by seed: within a seed, all arms have the same batches and initial values."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_study

from experiments.engine import loop, train_step
from experiments.studies import programs, runs as study_runs, vmapped_runs
from tfm import shapes

SEEDS, STEPS = (3, 5), 3
# Two programs: the last two arms, which differ in numbers only, are rows of the program of `asymmetric`.
ARMS = [[name, {"model.score": name}] for name in ("tied", "asymmetric")]
ARMS += [["fast", {"optim.learning_rate": 1e-2}], ["wide", {"model.score_std": 2.0}]]
SMALL = {"study__experiment": "language", "train__steps": STEPS, "train__evaluate_every": 0, "model__M": 1}
SMALL |= {"study__arms": ARMS, "text__objective": "masked"}


class Inputs(NamedTuple):
    """The inputs of the training of one run."""

    params: dict[str, np.ndarray]  # {path: leaf} at step 0
    key: np.ndarray  # the key of dropout
    batches: list[dict[str, np.ndarray]]  # one for every step


def copy_row(tree, r: int):
    """Copy row r to the host, because the step takes the state's memory."""
    return jax.tree.map(lambda x: np.asarray(x)[r].copy(), tree)


def count_step(state, batch, alive, numbers):
    """Count a step without training."""
    return state.replace(step=state.step + alive), {train_step.LOSS: 0.0 * alive, "alive": alive}


def waves(key, shape=(), dtype=np.float32):
    """Return numbers that depend on the key and compile faster than normal ones."""
    start, frequency = (jax.random.key_data(key) % 8191).astype(dtype)
    return jnp.sin(start + frequency * jnp.arange(math.prod(shape), dtype=dtype)).reshape(shape)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return {(arm, seed): Inputs} of a study with masked tokens. Its steps are not compiled or trained."""
    inputs, current, train_program, train = {}, [], programs.train, loop.train

    def record_program(job, *arguments):
        current[:] = job.program.runs
        train_program(job, *arguments)

    def record_state(training, step, state, batches, **options):
        for r, run in enumerate(current):
            leaves = jax.tree_util.tree_leaves_with_path(copy_row(state.params, r))
            params = {"/".join(shapes.names(path)): leaf for path, leaf in leaves}
            inputs[run.arm, run.seed] = Inputs(params, copy_row(jax.random.key_data(state.key), r), [])

        def record_batch(state, batch, alive):
            for r, run in enumerate(current):
                inputs[run.arm, run.seed].batches.append(copy_row(batch, r))
            return step(state, batch, alive)

        end = train(training, record_batch, state, batches, **options)
        # On the host, results of rows are read without compiled programs.
        return end.replace(**jax.device_get({name: getattr(end, name) for name in ("params", "opt_state")}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "train", record_program)
        patch.setattr(loop, "train", record_state)
        patch.setattr(vmapped_runs, "step", lambda _: jax.jit(count_step))
        patch.setattr(vmapped_runs, "evaluator", lambda _: lambda *_: {"loss": np.zeros(len(SEEDS) * len(ARMS))})
        patch.setattr(jax.random, "normal", waves)
        patch.setattr(programs, "_write_results", lambda *_: None)
        outcome = tiny_study.run(tmp_path_factory.mktemp("pairs"), **SMALL)
    assert (outcome.code, outcome.err) == (0, "")
    return inputs


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray], names: Iterable[str]) -> None:
    for name in names:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def random_names(params: dict[str, np.ndarray]) -> list[str]:
    """Return the names of the parameters that are not constant."""
    return [name for name, leaf in params.items() if np.ptp(leaf) > 0]


def test_within_a_seed_all_arms_have_the_same_batches_and_initial_values(inputs):
    for seed in SEEDS:
        first, *rest = [run for (_, run_seed), run in inputs.items() if run_seed == seed]
        assert len(rest) >= 2
        for run in rest:
            assert len(run.batches) == len(first.batches) == STEPS
            for batch, expected in zip(run.batches, first.batches, strict=True):
                assert batch.keys() == expected.keys() >= {"w_BN", "target_BN", "weight_BN", "example_B"}
                assert_same(batch, expected, expected)
            common = {name for name in run.params.keys() & first.params.keys() if "/score/" not in name}
            names = {name.split("/")[-1] for name in common & set(random_names(first.params))}
            assert names >= {"E_WD", "P_ND", "Uv_HKD", "Uo_HDK", "W1_FD", "W2_DF", "G_WD"}
            assert_same(run.params, first.params, common)
            np.testing.assert_array_equal(run.key, first.key)
        examples = np.concatenate([batch["example_B"] for batch in first.batches])
        assert len(set(examples.tolist())) == STEPS * tiny_study.TRAIN["train__batch_size"]  # no example twice


def test_seeds_differ_in_batches_and_in_all_random_values(inputs):
    for arm, _ in ARMS:
        a, b = (inputs[arm, seed] for seed in SEEDS)
        assert not np.array_equal(a.key, b.key)
        for batches in zip(a.batches, b.batches, strict=True):
            assert not np.array_equal(*(batch["example_B"] for batch in batches))
        for name in random_names(a.params):
            assert not np.array_equal(a.params[name], b.params[name]), name


def test_scores_with_the_same_matrices_have_the_same_initial_values(inputs):
    for seed in SEEDS:
        params = {arm: {name.split("/")[-1]: x for name, x in inputs[arm, seed].params.items()} for arm, _ in ARMS}
        base, names = params["asymmetric"], ["Uq_HKD", "Uk_HKD"]
        assert_same(base, params["fast"], names)
        assert_same({name: 2 * base[name] for name in names}, params["wide"], names)
        assert not np.array_equal(base["Uq_HKD"], base["Uk_HKD"])


def test_sketches_detect_other_initial_values_but_not_another_scale():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 7)).astype(np.float32)
    different = {"last": x.copy(), "rolled": np.roll(x, study_runs.SUMS)}
    different |= {"reversed": x[:, ::-1], "random": rng.standard_normal(x.shape)}
    different["last"][-1, -1, -1] += 0.01
    similar = {"same": x, "twice": 2 * x, "minus": -0.3 * x, "zero": 0 * x, "rounded": x * np.float32(1 + 1e-6) + 1e-7}
    sketches = {name: study_runs.sketches({"U_HKD": y[None]})[0] for name, y in (different | similar).items()}
    sketches["another shape"] = study_runs.sketches({"U_HKD": x[None, :2]})[0]
    for name, sketch in sketches.items():
        assert study_runs.unpaired_weights(sketch, sketches["same"]) == (["U_HKD"] if name in different else []), name
    assert study_runs.sketches({"U_HKD": np.stack([x, np.nan * x])}) == [sketches["same"], {}]
