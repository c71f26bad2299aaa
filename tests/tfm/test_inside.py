"""Functions that look inside a model equal loops over single runs, which edit by hand."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
from cases import B, H, M, N, W

import tfm
from tfm import inside, symmetry

K = 3
MESSAGE = "Finished XLA compilation of jit(<lambda>)"  # of jax.log_compiles
INIT, APPLY = tfm.language_model(W=W, M=M, D=H * K, H=H, N=N)
CLEAN_BN, CORRUPTED_BN = cases.draw_token_ids(1), cases.draw_token_ids(2)


def draw() -> dict:
    return cases.draw_params(INIT)


def bind(w_BN):
    return inside.bind(APPLY, draw(), w_BN)


def measure(edit):
    """Return a number of the corrupted run that depends on the last tokens only."""
    return jnp.sin(bind(CORRUPTED_BN)(edit=edit)[0][:, -1]).sum()


def at(m, i, x_M, axis):
    """Return the edit by hand: index i of the axis in layer m is replaced."""

    def edit(x, layer):
        place = [slice(None)] * x.ndim
        place[axis] = i
        return jnp.where(layer == m, x.at[tuple(place)].set(x_M[m][tuple(place)]), x)

    return edit


@cases.float64()
def test_a_grid_of_patches_equals_single_runs():
    _, clean = bind(CLEAN_BN)(look=("hidden", "y", "A"))
    for name, size in (("hidden", N), ("y", H), ("A", H)):
        grid_MI = inside.patch(measure, name, clean[name], batch=5)
        edit_and_measure = jax.jit(lambda m, i, name=name: measure({name: at(m, i, clean[name], 1)}))
        expected_MI = [[edit_and_measure(m, i) for i in range(size)] for m in range(M)]
        cases.assert_close(grid_MI, np.array(expected_MI))
        assert np.ptp(grid_MI) > 1e-3, name
    assert inside.patch(lambda edit: jnp.stack([measure(edit)] * 2), "y", clean["y"]).shape == (M, H, 2)


def test_a_grid_of_patches_is_one_compilation(caplog):
    _, clean = bind(CLEAN_BN)(look=("hidden",))
    with jax.log_compiles():
        inside.patch(measure, "hidden", clean["hidden"])
    compiled = [
        record.message for record in caplog.records if "Finished XLA compilation of jit(<lambda>)" in record.message
    ]
    assert len(compiled) == 1, [record.message for record in caplog.records]


@cases.float64()
def test_attribution_is_the_patch_of_a_small_difference():
    _, clean = bind(CLEAN_BN)(look=("hidden", "y"))
    _, corrupted = bind(CORRUPTED_BN)(look=("hidden", "y"))
    plain = measure({})
    for name in ("hidden", "y"):
        x_M = corrupted[name] + 1e-5 * (clean[name] - corrupted[name])
        effect = inside.attribute(measure, name, x_M, corrupted[name])
        by_index_MI = effect.sum(1) if name == "hidden" else effect.sum((1, 3))
        patched_MI = inside.patch(measure, name, x_M) - plain
        cases.assert_close(by_index_MI / 1e-5, patched_MI / 1e-5, 1e-3)


@cases.float64()
def test_ablations_replace_what_they_name():
    run, where_M = bind(CLEAN_BN), (jnp.arange(M) == 1)[:, None, None, None, None] & (jnp.arange(H) == 2)[:, None, None]
    _, plain = run(look=("y",))
    means = plain["y"][1, :, 2].mean((0, 1))
    for edit, expected_1 in ((inside.zero(where_M), 0), (inside.mean(plain["y"], where_M), means)):
        _, edited = run(edit={"y": edit}, look=("y",))
        others = np.arange(H) != 2
        cases.assert_close(edited["y"][1][:, others], plain["y"][1][:, others])
        cases.assert_close(edited["y"][1][:, 2], np.broadcast_to(expected_1, (B, N, K)))
        cases.assert_close(edited["y"][0], plain["y"][0])


@cases.float64()
def test_lenses_read_tokens_with_the_models_last_norm_and_head():
    run = bind(CLEAN_BN)
    logits_BNW, look = run(look=("hidden",))
    params = draw()
    lens = inside.logit_lens(run, look["hidden"])
    x_MBND = np.asarray(look["hidden"])
    centred = x_MBND - x_MBND.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    expected = (normed * params["norm"]["gain_D"] + params["norm"]["shift_D"]) @ params["head"]["G_WD"].T
    cases.assert_close(lens, expected, 1e-6)  # logits are float32
    cases.assert_close(lens[-1], logits_BNW, 1e-6)


@cases.float64()
def test_the_jacobian_lens_reads_the_first_order_effect():
    """The derivative along x is compared with differences of runs whose tokens after layer m are longer."""
    run = bind(CLEAN_BN)
    x_MBND = run(look=("hidden",))[1]["hidden"]

    def last(factor, m):
        edit = {"hidden": lambda x, layer: jnp.where(layer == m, factor * x, x)}
        return run(edit=edit, look=("hidden",))[1]["hidden"][-1]

    last = jax.jit(last)
    effect_MBND = jnp.stack([(last(1 + 1e-6, m) - last(1 - 1e-6, m)) / 2e-6 for m in range(M)])
    cases.assert_close(inside.jacobian_lens(run, x_MBND), inside.logit_lens(run, effect_MBND), 1e-5)


def test_head_scores_find_heads_made_by_hand():
    """Each head attends to one token: the one before, the same one a period earlier, the next of that; or to all."""
    period = 4
    N = 2 * period
    n = np.arange(N)
    A_HNN = np.zeros((4, N, N))
    for h, shift in enumerate((1, period, period - 1)):
        A_HNN[h, n, np.where(n >= shift, n - shift, n)] = 1
    A_HNN[3] = 1 / N
    scores = jax.device_get(inside.head_scores(jnp.asarray(np.stack([A_HNN, A_HNN])[None]), period=period))
    for h, name in enumerate(("previous", "duplicate", "induction")):
        np.testing.assert_allclose(scores[name][0], [float(h == 0), float(h == 1), float(h == 2), 1 / N])
    np.testing.assert_allclose(scores["entropy"][0], [0, 0, 0, np.log(N)], atol=1e-6)
    w_BN = np.asarray(inside.draw_repeated(jax.random.key(0), W=50, B=3, period=period, first=10))
    np.testing.assert_array_equal(w_BN[:, :period], w_BN[:, period:])
    assert w_BN.min() >= 10 and len(np.unique(w_BN)) > period


@cases.float64()
def test_the_rank_of_the_skew_part_equals_that_of_its_singular_values():
    for K, D in ((4, 9), (6, 7)):  # 2 K below and above D
        Uq_HKD, Uk_HKD = cases.normal(1, 3, K, D), cases.normal(2, 3, K, D)
        M_HDD = np.asarray(Uq_HKD).transpose(0, 2, 1) @ np.asarray(Uk_HKD)
        s_HK = np.linalg.svd((M_HDD - M_HDD.transpose(0, 2, 1)) / 2, compute_uv=False)
        held_HK = np.cumsum(s_HK**2, axis=-1) / (s_HK**2).sum(-1, keepdims=True)
        for share in (0.5, 0.9, 0.999):
            rank_H = (held_HK < share).sum(-1) + 1
            np.testing.assert_array_equal(symmetry.skew_rank(Uq_HKD, Uk_HKD, share), rank_H + rank_H % 2)
        np.testing.assert_array_equal(symmetry.skew_rank(Uq_HKD, Uq_HKD), 0)
    one_H1D = (cases.normal(3, 2, 1, 9), cases.normal(4, 2, 1, 9))
    np.testing.assert_array_equal(functools.partial(symmetry.skew_rank, share=0.999)(*one_H1D), 2)
