"""Arms are compared by pairs: within a seed all of them get the same batches, and begin with the same numbers."""

import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np
import pytest
import tiny_study

from experiments.engine import loop, train_step as steps
from experiments.studies import programs, runs as finished, vmapped_runs
from tfm import shapes

SEEDS, STEPS = (3, 5), 3
# Two programs; the last two arms are rows of that of `asymmetric`: other numbers, the same model.
ARMS = [[name, {"model.score": name}] for name in ("tied", "asymmetric")]
ARMS += [["fast", {"optim.learning_rate": 1e-2}], ["wide", {"model.score_std": 2.0}]]
SMALL = {"study__experiment": "language", "train__steps": STEPS, "train__evaluate_every": 0, "model__M": 1}


class Seen(NamedTuple):
    """What the training of one run got."""

    params: dict[str, np.ndarray]  # of step 0, by the paths of their names
    key: np.ndarray  # from which its dropout follows
    batches: list[dict[str, np.ndarray]]  # of every step


def copied(tree, r: int):
    """Row r, on the host: the step is to have the state's memory."""
    return jax.tree.map(lambda x: np.asarray(x)[r].copy(), tree)


def idle(state, batch, alive, numbers):
    """A step that trains nothing."""
    return state.replace(step=state.step + alive), {steps.LOSS: 0.0 * alive, "alive": alive}


def watched(folder: pathlib.Path, **changes) -> dict[tuple[str, int], Seen]:
    """A study, and what the step of each run really got, by arm and seed. Compiling others takes seconds."""
    seen, now, run, train = {}, [], programs.train, loop.train

    def run_and_tell(one, *arguments, **options):
        now[:] = one.program.runs
        run(one, *arguments, **options)

    def watching(beside, step, state, batches, **options):
        for r, one in enumerate(now):
            leaves = jax.tree_util.tree_leaves_with_path(copied(state.params, r))
            params = {"/".join(shapes.names(path)): leaf for path, leaf in leaves}
            seen[one.arm, one.seed] = Seen(params, copied(jax.random.key_data(state.key), r), [])

        def step_and_tell(state, batch, alive):
            for r, one in enumerate(now):
                seen[one.arm, one.seed].batches.append(copied(batch, r))
            return step(state, batch, alive)

        return train(beside, step_and_tell, state, batches, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "train", run_and_tell)
        patch.setattr(loop, "train", watching)
        patch.setattr(vmapped_runs, "step", lambda of: jax.jit(idle))
        zeros = {"loss": np.zeros(len(SEEDS) * len(ARMS))}
        patch.setattr(vmapped_runs, "evaluator", lambda of: lambda *_: zeros)
        outcome = tiny_study.run(folder, **(SMALL | changes))
    assert (outcome.code, outcome.err) == (0, "")
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Of all arms; each step draws the words that it hides."""
    return watched(tmp_path_factory.mktemp("pairs"), study__arms=ARMS, text__objective="masked")


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray], names: Iterable[str]) -> None:
    for name in names:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def drawn(params: dict[str, np.ndarray]) -> list[str]:
    """What is not all zeros or all ones."""
    return [name for name, leaf in params.items() if np.ptp(leaf) > 0]


def test_within_a_seed_all_arms_get_the_same_batches_and_begin_with_the_same_values(seen):
    for seed in SEEDS:
        first, *others = [one for (_, of), one in seen.items() if of == seed]
        assert len(others) >= 2
        for one in others:
            assert len(one.batches) == len(first.batches) == STEPS
            for mine, right in zip(one.batches, first.batches, strict=True):
                assert mine.keys() == right.keys() >= {"w_BN", "target_BN", "weight_BN", "example_B"}
                assert_same(mine, right, right)
            common = {name for name in one.params.keys() & first.params.keys() if "/score/" not in name}
            found = {name.split("/")[-1] for name in common & set(drawn(first.params))}
            assert found >= {"E_WD", "P_ND", "Uv_HKD", "Uo_HDK", "W1_FD", "W2_DF", "G_WD"}
            assert_same(one.params, first.params, common)
            np.testing.assert_array_equal(one.key, first.key)
        examples = np.concatenate([batch["example_B"] for batch in first.batches])
        assert len(set(examples.tolist())) == STEPS * tiny_study.TRAIN["train__batch_size"]  # other ones in every step


def test_seeds_differ_in_batches_and_in_all_that_is_drawn(seen):
    for arm in {arm for arm, _ in seen}:
        one, other = (seen[arm, seed] for seed in SEEDS)
        assert not np.array_equal(one.key, other.key)
        for mine, its in zip(one.batches, other.batches, strict=True):
            assert not np.array_equal(mine["example_B"], its["example_B"])
        for name in drawn(one.params):
            assert not np.array_equal(one.params[name], other.params[name]), name


def test_scores_with_the_same_matrices_begin_with_the_same(seen):
    for seed in SEEDS:
        of = {arm: {name.split("/")[-1]: x for name, x in seen[arm, seed].params.items()} for arm, _ in ARMS}
        usual, both = of["asymmetric"], ["Uq_HKD", "Uk_HKD"]
        assert_same(usual, of["fast"], both)
        assert_same({name: 2 * usual[name] for name in both}, of["wide"], both)
        assert not np.array_equal(usual["Uq_HKD"], usual["Uk_HKD"])


def test_any_other_initial_value_is_seen_and_a_scale_is_not():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 7)).astype(np.float32)
    others = {"last": x.copy(), "moved": np.roll(x, finished.SUMS)}
    others |= {"turned": x[:, ::-1], "drawn": rng.standard_normal(x.shape)}
    others["last"][-1, -1, -1] += 0.01
    scaled = {"same": x, "twice": 2 * x, "minus": -0.3 * x, "zero": 0 * x, "rounded": x * np.float32(1 + 1e-6) + 1e-7}
    sketch = {name: finished.sketches({"U_HKD": y[None]})[0] for name, y in (others | scaled).items()}
    for name, one in sketch.items():
        assert finished.unpaired_weights(one, sketch["same"]) == (["U_HKD"] if name in others else []), name
    assert (
        finished.unpaired_weights(finished.sketches({"U_HKD": x[None, :2]})[0], sketch["same"]) == []
    )  # of another shape
    assert finished.sketches({"U_HKD": np.stack([x, np.nan * x])}) == [sketch["same"], {}]
