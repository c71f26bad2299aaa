"""Learning rates, AdamW, Muon, averages and frozen parameters, compared with formulas in NumPy."""

import math

import frozen_task
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.devices import mesh as meshes
from experiments.engine import freeze, optim, run_plan, summary as summaries, train_step
from experiments.studies import programs, study as studies
from tfm import layout as layouts, shapes

ADAM = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3}
M, H, K, D, F = 2, 3, 5, 7, 11
SIZES = {"M": M, "H": H, "K": K, "D": D, "F": F, "N": 13}
MATRIX_NAMES = ["score/Uq_HKD", "score/P_HKK", "value/Uo_HDK", "value/V_HDD", "mlp/W1_FD", "mlp/W2_DF", "mlp/Wh_FF"]
ADAMW_NAMES = ["blocks/norm1/gain_D", "blocks/value/bo_D", "embed/E_ND", "head/G_ND"]
ALL_NAMES = [f"blocks/{name}" for name in MATRIX_NAMES] + ADAMW_NAMES
RATE, MATRIX_RATE, MOMENTUM, DECAY, ROUNDS = 0.1, 3.0, 0.8, 0.5, 5


def draw_params(seed, names=ALL_NAMES):
    rng, tree = np.random.default_rng(seed), {}
    for name in names:
        *parents, last = name.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = np.float32(rng.standard_normal([SIZES[letter] for letter in shapes.letters(name)]))
    return tree


def newton_schulz(x_RC):
    """Compute Newton-Schulz iterations (Jordan et al. 2024) in float64, with the smaller of the two products."""
    x_RC = np.asarray(x_RC, np.float64)
    if x_RC.shape[0] > x_RC.shape[1]:
        return newton_schulz(x_RC.T).T
    x_RC = x_RC / np.sqrt(np.sum(x_RC * x_RC))
    for _ in range(ROUNDS):
        square_RR = x_RC @ x_RC.T
        x_RC = 3.4445 * x_RC - 4.7750 * square_RR @ x_RC + 2.0315 * square_RR @ square_RR @ x_RC
    return x_RC


def matrix_step(name, x):
    """Return one layer's step. Each parameter is reshaped into its matrices by hand."""
    if name.endswith("Uq_HKD"):  # a matrix from D to the stacked features of all heads
        return np.sqrt(H * K / D) * newton_schulz(x.reshape(H * K, D)).reshape(H, K, D)
    if name.endswith(("Uo_HDK", "V_HDD")):  # the matrices of all heads, concatenated along columns
        return np.stack(np.split(newton_schulz(np.concatenate(list(x), axis=1)), H, axis=1))
    if name.endswith("P_HKK"):  # one matrix for each head
        return np.stack([newton_schulz(P_KK) for P_KK in x])
    return newton_schulz(x) * np.sqrt(max(1, x.shape[0] / x.shape[1]))


SOME_NAMES = ["blocks/score/Uq_HKD", "blocks/score/P_HKK", "blocks/mlp/W2_DF", "embed/E_ND"]


def take_steps(optimiser, params, gradients):
    """Return the parameters after one step for each gradient."""

    def step(carry, gradient):
        params, state = carry
        updates, state = optimiser.update(gradient, state, params)
        return (jax.tree.map(jnp.add, params, updates), state), None

    @jax.jit
    def run(params, gradients):
        gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)
        return jax.lax.scan(step, (params, optimiser.init(params)), gradients)[0][0]

    return run(params, gradients)


def compare_rules(rules, params, gradients):
    """Return the parameters after these steps of each rule, computed by one program."""
    return jax.jit(lambda *arguments: [take_steps(rule, *arguments) for rule in rules])(params, gradients)


def assert_near(result, expected, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), result, expected)


PEAK, STEPS, WARMUP, FINAL = 0.6, 200, 40, 0.1


def rate(name, **changes):
    sizes = {"peak": PEAK, "steps": STEPS, "warmup_steps": WARMUP}
    return optim.schedule(name, **(sizes | changes))


def expected_rate(name, step, final):
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    fraction = (step - WARMUP) / (STEPS - WARMUP)
    fall = {"constant": 0, "linear": fraction, "cosine": (1 - math.cos(math.pi * fraction)) / 2}
    fall["wsd"] = max(0, (step - (STEPS - 40)) / 40)
    return PEAK * (1 - (1 - final) * fall[name])


def test_schedules_equal_their_formulas():
    """A schedule has a final fraction, 0.1 unless its name has another. The first step without warm-up has the peak."""
    steps = np.array([0, 1, 19, WARMUP - 1, WARMUP, WARMUP + 1, 120, 159, 160, 161, 175, STEPS - 1, STEPS])
    names, falling = ("constant", "linear", "cosine", "wsd"), ("linear", "cosine", "wsd")
    rates = {name: rate(name) for name in names} | {f"{name}:0.3": rate(f"{name}:0.3") for name in falling}
    early_rates = {f"{name} {warmup}": rate(name, warmup_steps=warmup) for name in names for warmup in (0, 1)}
    result = jax.jit(jax.vmap(lambda step: {name: one(step) for name, one in (rates | early_rates).items()}))(steps)
    for name in rates:
        kind, _, final = name.partition(":")
        expected = [expected_rate(kind, step, float(final or FINAL)) for step in steps]
        np.testing.assert_allclose(result[name], expected, rtol=1e-5, err_msg=name)
    assert [float(result[name][0]) for name in early_rates] == pytest.approx([PEAK] * 8)


@pytest.mark.parametrize(("steps", "warmup", "first"), [(2, 0, 1), (200, 190, 190)])
def test_wsd_falls_over_a_fifth_of_all_steps_or_the_steps_after_the_warm_up(steps, warmup, first):
    schedule = rate("wsd", steps=steps, warmup_steps=warmup)
    stable, falling, last = jax.jit(jax.vmap(schedule))(np.array([first, first + 1, steps])).tolist()
    assert stable == pytest.approx(PEAK) and falling < stable and last == pytest.approx(PEAK * FINAL)


def test_decay_is_for_matrices_only():
    """The model has biases, gains and a class token."""
    task = tiny.task_of(tiny.settings("vision", image__patch=4, image__head="class_token"))
    leaves = shapes.flat(optim.matrices(jax.eval_shape(task.init, jax.random.key(0))))
    assert {name for name, decays in leaves.items() if decays} == {
        "embed/W_DP",
        "position/P_ND",
        *(f"blocks/{name}" for name in ("score/Uq_HKD", "score/Uk_HKD", "value/Uv_HKD", "value/Uo_HDK")),
        *(f"blocks/{name}" for name in ("mlp/W1_FD", "mlp/W2_DF")),
        "head/G_CD",
    }
    assert {"class/c_D", "head/b_C", "norm/gain_D", "blocks/norm1/shift_D", "blocks/mlp/b2_D"} < leaves.keys()


def adamw_by_hand(params, gradients, *, rate, weight_decay, beta1, beta2, eps):
    """Compute AdamW (Loshchilov and Hutter 2019, algorithm 2) in float64. Names of two letters decay."""
    result = {}
    for name, theta in params.items():
        theta, m, v = np.asarray(theta, np.float64), 0.0, 0.0
        for t, gradient in enumerate(gradients, 1):
            g = np.asarray(gradient[name], np.float64)
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            step = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
            decay = weight_decay * theta if len(name.split("_")[1]) == 2 else 0
            theta = theta - rate(t - 1) * (step + decay)
        result[name] = theta
    return result


def draw_small(seed):
    rng = np.random.default_rng(seed)
    sizes = {"W_FD": (3, 5), "b_F": (3,)}
    return {name: np.float32(rng.standard_normal(shape)) for name, shape in sizes.items()}


def test_adamw_equals_its_formula_with_gradients_clipped_over_all_leaves():
    """The first gradient is shorter than `clip`. eps is large, because AdamW hardly depends on a gradient's scale."""
    params, gradients = draw_small(0), [draw_small(seed) for seed in (1, 2, 3)]
    lengths = [math.sqrt(sum(float(np.sum(np.square(x))) for x in one.values())) for one in gradients]
    gradients[0] = {name: x * 0.5 / lengths[0] for name, x in gradients[0].items()}
    assert min(lengths[1:]) > 2.0
    shorter = [{name: x * min(1, 2.0 / n) for name, x in g.items()} for g, n in zip(gradients, lengths, strict=True)]
    options, rate = ADAM | {"eps": 1.0, "weight_decay": 0.5}, lambda step: 0.1 * (step + 1)
    results = compare_rules([optim.adamw(rate, clip=clip, **options) for clip in (0.0, 2.0)], params, gradients)
    for result, clipped_gradients in zip(results, (gradients, [gradients[0], *shorter[1:]]), strict=True):
        assert_near(result, adamw_by_hand(params, clipped_gradients, rate=rate, **options))


def matrices_by_hand(name, value, gradients):
    """Take the steps of Muon in float64, one layer after the other."""
    layers = np.asarray(value, np.float64)
    for m in range(M):
        W, mean = layers[m], 0.0
        for gradient in gradients:
            g = np.asarray(gradient[m], np.float64)
            mean = MOMENTUM * mean + g
            u = matrix_step(name, MOMENTUM * mean + g)
            W = W - MATRIX_RATE * RATE * (u + DECAY * W)
        layers[m] = W
    return layers


def matrix_rule(rate=RATE, **changes):
    options = {"muon_lr_multiplier": MATRIX_RATE, "momentum": MOMENTUM, "weight_decay": DECAY}
    return optim.muon(lambda step: rate, **ADAM | options | {"clip": 0.0} | changes)


def test_matrices_take_the_steps_of_the_formula_and_other_parameters_those_of_adamw():
    params, *gradients = (draw_params(seed, ALL_NAMES) for seed in range(3))
    adamw = optim.adamw(lambda step: RATE, weight_decay=DECAY, clip=0.0, **ADAM)
    result, adamw_result = map(shapes.flat, compare_rules([matrix_rule(), adamw], params, gradients))
    for name, leaf in shapes.flat(params).items():
        if name in ADAMW_NAMES:
            assert_near(result[name], adamw_result[name], rtol=1e-6)
        else:
            expected = matrices_by_hand(name, leaf, [shapes.flat(gradient)[name] for gradient in gradients])
            assert_near(result[name], expected, rtol=1e-4, atol=2e-5)


def test_a_gradient_of_zeros_moves_no_matrix():
    params = draw_params(0, SOME_NAMES[:1])
    assert_near(compare_rules([matrix_rule(weight_decay=0.0)], params, [jax.tree.map(np.zeros_like, params)]), [params])


def test_the_gradient_of_muon_is_clipped_over_all_leaves():
    """The norm of a gradient changes only AdamW's steps, not those of a matrix."""
    params, gradient = draw_params(0, SOME_NAMES[2:]), draw_params(1, SOME_NAMES[2:])
    norm = np.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(gradient)))
    step = jax.jit(lambda gradient: take_steps(matrix_rule(), params, [gradient]))
    result = take_steps(matrix_rule(clip=2.0), params, [gradient])
    assert_near(result, step(jax.tree.map(lambda x: x * 2.0 / norm, gradient)))
    assert not np.allclose(result["embed"]["E_ND"], step(gradient)["embed"]["E_ND"], rtol=1e-3)


def test_vmapped_rows_of_a_study_take_the_same_steps_as_alone():
    params, gradient = (draw_params(seed, SOME_NAMES) for seed in (0, 1))
    step = jax.jit(lambda rate, *trees: take_steps(matrix_rule(rate), trees[0], trees[1:]))
    rates = np.float32([0.1, 0.02])
    single_results = [step(rate, params, gradient) for rate in rates]
    rows = jax.vmap(step, (0, None, None))(rates, params, gradient)
    assert_near(rows, jax.tree.map(lambda *leaves: np.stack(leaves), *single_results), rtol=1e-4, atol=1e-5)


def root_schedule(step, steps):
    return 1 - jnp.sqrt(step / steps)


def pair_schedule(step, steps):
    return jnp.stack([step, step])


def sign_rule(rate, *, weight_decay, slope=1.0):
    """Return a user's rule without a step counter: sign descent with weight decay."""
    state = optax.EmptyState()

    def update(gradient, state, params):
        step = jax.tree.map(lambda g, p: -slope * rate(0) * (jnp.sign(g) + weight_decay * p), gradient, params)
        return step, state

    return optax.GradientTransformation(lambda params: state, update)


def transpose_updates(rate):
    return optax.stateless(lambda gradient, params: jax.tree.map(jnp.transpose, gradient))


def fail_in_update(rate):
    return optax.stateless(lambda gradient, params: gradient["nothing"])


def make_settings(**changes):
    return tiny.settings("language", **{f"optim__{name}": value for name, value in changes.items()})


def test_a_users_schedule_is_its_fraction_of_the_peak_after_the_warm_up():
    result = rate("test_optim:root_schedule")
    steps = np.array([0, WARMUP - 1, WARMUP, 100, STEPS])
    expected = [PEAK / WARMUP, PEAK, PEAK, PEAK * (1 - math.sqrt(60 / 160)), 0]
    np.testing.assert_allclose(jax.jit(jax.vmap(result))(steps), expected, rtol=1e-5, atol=1e-7)


def test_a_users_rule_gets_the_settings_of_its_arguments_and_its_steps_are_counted():
    """Lion decays matrices only, after clipping. Settings that are not arguments of the rule count as unused."""
    params, gradient = draw_small(0), draw_small(1)
    same = dict(schedule="constant", warmup_steps=0, weight_decay=0.5)
    settings = make_settings(name="optax:lion", betas=[0.8, 0.9], clip=1e-3, **same)
    _, lion = optim.make_optimiser(settings)
    by_hand = optax.lion(1e-3, b1=0.8, b2=0.9, weight_decay=0.5, mask=optim.matrices)
    assert_near(*compare_rules([lion, by_hand], params, [gradient, gradient]))
    settings = make_settings(name="test_optim:sign_rule", momentum=0.5, betas=[0.5, 0.5], **same)
    _, rule = optim.make_optimiser(settings)
    take_step = jax.jit(lambda gradient, params: rule.update(gradient, rule.init(params), params))
    updates, state = take_step(gradient, params)
    assert_near(updates, jax.tree.map(lambda g, p: -1e-3 * (np.sign(g) + 0.5 * p), gradient, params))
    assert train_step.count_updates(state) == 1
    with raises(errors.UserError, "optim.betas, optim.momentum, train"):
        settings.refuse_unused()


def test_a_users_rule_must_fit_the_parameters():
    for name, words in (("transpose_updates", ["shapes"]), ("fail_in_update", ["test_optim.py, line", "KeyError"])):
        with raises(errors.UserError, f"optim.name = test_optim:{name}", *words):
            settings = make_settings(name=f"test_optim:{name}")
            params = jax.eval_shape(lambda: draw_small(0))
            optim.check_updates(settings.optim.name, optim.make_optimiser(settings)[1], params)


def test_ema_evaluates_the_average_and_does_not_change_training():
    """a_t = d a_{t-1} + (1 - d) w_t, where w_t are the parameters of a run without the average.

    Clipping, a frozen parameter and train.nan = skip are on in both runs.
    """
    changes = {"optim__frozen": ["b_C"], "train__nan": "skip", "model": False, "optim__clip": 0.5}
    devices, task, decay = meshes.make(data=1), tiny.linear_task(), 0.7

    def trajectory(**extra):
        plan = run_plan.make_plan(tiny.settings("vision", **changes | extra), task, devices)
        state = train_step.initial_state(plan.task, plan.optimiser, seed=0, mesh=devices)
        states, losses = [jax.device_get(state.params)], []
        for i in range(4):
            state, metrics = plan.step(state, meshes.place_batch(devices, task.train[i]), True)
            states.append(jax.device_get(state.params))
            losses.append(float(metrics["loss"]))
        return states, losses, jax.device_get(optim.training_params(state.params, state.opt_state))

    trained_params, losses, training_params = trajectory()
    result, ema_losses, ema_training_params = trajectory(optim__ema=decay)
    assert_near(ema_losses, losses)
    assert_near(ema_training_params, trained_params[-1]), assert_near(training_params, trained_params[-1])
    expected = trained_params[0]
    for params, a in zip(trained_params[1:], result[1:], strict=True):
        expected = jax.tree.map(lambda a, x: decay * a + (1 - decay) * x, expected, params)
        assert_near(a, expected)
    assert np.abs(result[-1]["G_CD"] - trained_params[-1]["G_CD"]).max() > 1e-3


def test_an_average_passes_extra_arguments_to_its_rule():
    rule = optim.average(optax.sgd(0.1), 0.5)
    updates, state = rule.update({"x": np.float32(2)}, rule.init({"x": np.float32(1)}), {"x": np.float32(1)}, value=3.0)
    assert float(updates["x"]) == pytest.approx(-0.1) == float(state.ahead["x"])


def select_trained_leaves(tree, frozen):
    """Return the tree with None, which is not a leaf, in place of frozen parameters."""
    return jax.tree.map(lambda x, is_trained: x if is_trained else None, tree, freeze.select_trained(tree, frozen))


@pytest.mark.parametrize(
    ("frozen", "changes"),
    [
        (["embed/W_?P", "blocks/norm"], {"optim__clip": 0.1}),
        (["*", "!*/W_*", "!head"], {"optim__name": "muon", "train__accumulation": 2}),
    ],
    ids=["adamw", "muon"],
)
def test_frozen_parameters_do_not_change_and_the_others_train_without_them(frozen, changes):
    """A frozen parameter has no decay and no optimiser state, and its gradient is not part of the norm.

    In the case `muon`, the weights are sharded.
    """
    settings, task, is_sharded = tiny.settings("vision", **changes), frozen_task.small_task(), "optim__name" in changes
    devices = meshes.make(data=2, fsdp=2) if is_sharded else meshes.make(data=1)
    sharded_task = task._replace(layout=layouts.Layout(batch=meshes.BATCH, fsdp="fsdp" if is_sharded else None))
    plan = run_plan.make_plan(settings.replace({"optim.frozen": frozen}), sharded_task, devices)
    state = train_step.initial_state(plan.task, plan.optimiser, seed=0, mesh=devices)
    initial, batch = jax.device_get(state.params), plan.task.train[0]

    @jax.jit
    def by_hand(params):
        def mean(trained):
            all_params = jax.tree.map(lambda x, y: x if y is None else y, params, trained)
            total, count = task.loss(all_params, batch)[0]["loss"]
            return total / count

        trained, (_, rule) = select_trained_leaves(params, frozen), optim.make_optimiser(settings)
        gradient = jax.grad(mean)(trained)
        updates, _ = rule.update(gradient, rule.init(trained), trained)
        return optax.apply_updates(trained, updates), optax.tree.norm(gradient)

    expected, norm = by_hand(initial)
    opt_state = shapes.flat(state.opt_state)
    state, metrics = plan.step(state, meshes.place_batch(devices, batch), True)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
    result, expected = (shapes.flat(jax.device_get(tree)) for tree in (state.params, expected))
    for path, leaf in shapes.flat(initial).items():
        assert (path in expected) == any(one.endswith(path) for one in opt_state)
        if path in expected:
            np.testing.assert_allclose(result[path], expected[path], rtol=1e-4, atol=1e-5)
        assert (path in expected) == (result[path] != leaf).any()


def test_the_parameter_table_marks_frozen_parameters():
    params = {"embed": {"W_DP": np.zeros((2, 3))}, "head": {"b_C": np.zeros(3)}}
    lines = summaries.format_table(params, freeze.find_frozen(params, ["*", "!head"])).splitlines()
    assert lines[0].endswith(" 6  frozen") and lines[1].endswith(" 3")
    assert lines[-1].endswith(" 9, of which 3 are trained")


def test_a_study_can_freeze_parameters():
    arms = [["fixed", {"optim.frozen": ["embed"]}], ["free", {}]]
    settings = tiny.settings("ablation", study__experiment="vision", study__arms=arms, study__seeds=[1, 2])
    program, devices = studies.programs(studies.runs(settings, studies.read(settings)))[0], meshes.make(data=1)
    prepared = programs.prepare(programs.Checked(program, lines=[], steps=1, params=1, flops=1), devices)
    assert prepared.vmapped.task.frozen == ["embed"] and prepared.vmapped.task is prepared.plan.task


@pytest.mark.parametrize(
    ("frozen", "before", "words"),
    [
        (["embed/W_PD"], [], ['"embed/W_PD"', '"embed/W_DP"']),
        ([3], [], ['"3"']),
        (["*"], [], []),
        (["!head"], [], ['"!head"']),
        (["embed", "!head"], [], ['"!head"']),
        (["!*"], [], ['"!*"']),
        (["*", "!head", "!head/G_CD"], [], ['"!head/G_CD"']),
        (["embed", "embed/W_DP"], [], ['"embed/W_DP"']),
        (["blocks"], ["blocks"], ['"blocks"']),
    ],
)
def test_a_pattern_that_matches_or_changes_nothing_or_freezes_all_is_refused(frozen, before, words):
    params = jax.eval_shape(frozen_task.small_task().init, jax.random.key(0))
    with raises(errors.UserError, "optim.frozen", *words):
        freeze.check_frozen(frozen, params, before)
    freeze.check_frozen(["*", "!head"], params)
