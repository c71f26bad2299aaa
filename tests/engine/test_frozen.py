"""Parameters that stay as they begin (optim.frozen): the others are trained as if there were no more."""

import frozen_task
import jax
import numpy as np
import optax
import pytest
import tiny
from errors import raises

from experiments.engine import errors, freeze, mesh, optim, run_plan, summary as summaries, train_step as steps
from experiments.studies import programs, study
from tfm import layout as layouts, shapes

WAYS = {
    "adamw": dict(frozen=["embed/W_?P", "blocks/norm"], optim__clip=0.1),
    "muon": dict(frozen=["*", "!*/W_*", "!head"], optim__name="muon", train__accumulation=2),
}


def others(tree, frozen):
    """The tree with None, which is no leaf, in the places of what is frozen."""
    return jax.tree.map(lambda x, own: x if own else None, tree, freeze.select_trained(tree, frozen))


@pytest.mark.parametrize("name", WAYS)
def test_what_is_frozen_stays_and_the_rest_is_trained_without_it(name):
    """On devices that share the weights too: no decay, no state, and it counts nothing in the gradient's norm."""
    changes = {key: value for key, value in WAYS[name].items() if key != "frozen"}
    settings, frozen, task = tiny.settings("vision", **changes), WAYS[name]["frozen"], frozen_task.small_task()
    devices = mesh.make(data=2, fsdp=2) if name == "muon" else mesh.make(data=1)
    shared = task._replace(layout=layouts.Layout(batch=mesh.BATCH, fsdp="fsdp" if name == "muon" else None))
    plan = run_plan.make_plan(settings.replace({"optim.frozen": frozen}), shared, devices)
    state = steps.initial_state(plan.task, plan.optimiser, seed=0, mesh=devices)
    begun, batch = jax.device_get(state.params), plan.task.train[0]

    @jax.jit
    def by_hand(params):
        def mean(own):
            every = jax.tree.map(lambda x, y: x if y is None else y, params, own)
            total, count = task.loss(every, batch)[0]["loss"]
            return total / count

        own, (_, rule) = others(params, frozen), optim.make_optimiser(settings)
        gradient = jax.grad(mean)(own)
        updates, _ = rule.update(gradient, rule.init(own), own)
        return optax.apply_updates(own, updates), optax.tree.norm(gradient)

    expected, norm = by_hand(begun)
    remembered = shapes.flat(state.opt_state)
    state, metrics = plan.step(state, mesh.place_batch(devices, batch), True)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
    found, expected = (shapes.flat(jax.device_get(tree)) for tree in (state.params, expected))
    for path, leaf in shapes.flat(begun).items():
        assert (path in expected) == any(one.endswith(path) for one in remembered)
        if path in expected:
            np.testing.assert_allclose(found[path], expected[path], rtol=1e-4, atol=1e-5)
        assert (path in expected) == (found[path] != leaf).any()


@pytest.mark.parametrize(
    ("frozen", "words"),
    [(["embed/W_PD"], ['"embed/W_PD"', '"embed/W_DP"']), ([3], ['"3"']), (["*"], [])],
)
def test_what_cannot_be_frozen(frozen, words):
    params = {"embed": {"W_DP": np.zeros((2, 3))}, "head": {"b_C": np.zeros(3)}}
    with raises(errors.UserError, "optim.frozen", *words):
        freeze.check_frozen(frozen, params)


def test_the_table_marks_what_is_frozen():
    params = {"embed": {"W_DP": np.zeros((2, 3))}, "head": {"b_C": np.zeros(3)}}
    lines = summaries.format_table(params, freeze.find_frozen(params, ["*", "!head"])).splitlines()
    assert (
        lines[0].endswith(" 6  frozen") and lines[1].endswith(" 3") and lines[-1].endswith(" 9, of which 3 are trained")
    )


def test_a_study_freezes_too():
    arms = [["fixed", {"optim.frozen": ["embed"]}], ["free", {}]]
    made = tiny.settings("ablation", study__experiment="vision", study__arms=arms, study__seeds=[1, 2])
    program, devices = study.programs(study.runs(made, study.read(made)))[0], mesh.make(data=1)
    ready = programs.prepare(program, devices)
    assert ready.vmapped.task.frozen == ["embed"] and ready.vmapped.task is ready.plan.task


@pytest.mark.parametrize(
    ("frozen", "before", "wrong"),
    [
        (["!head"], [], "!head"),
        (["embed", "!head"], [], "!head"),
        (["!*"], [], "!*"),
        (["*", "!head", "!head/G_CD"], [], "!head/G_CD"),
        (["embed", "embed/W_DP"], [], "embed/W_DP"),
        (["blocks"], ["blocks"], "blocks"),
    ],
)
def test_a_pattern_that_changes_nothing_is_refused(frozen, before, wrong):
    params = jax.eval_shape(frozen_task.small_task().init, jax.random.key(0))
    with raises(errors.UserError, "optim.frozen", f'"{wrong}"'):
        freeze.check_frozen(frozen, params, before)
    freeze.check_frozen(["*", "!head"], params)
