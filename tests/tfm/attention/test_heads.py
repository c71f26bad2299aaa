"""Heads: self-attention and cross-attention (E8-E11, E26) against the slow reference, also without self-attention.

test_groups.py has devices that share heads, features and tokens; test_kv_cache.py has one token after the other.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_positions
import reference_scores
import tiny
import translate
from cases import MASKS, B, N, S, paper_allowed
from errors import raises
from score_cases import SCORES, D, H, K, drawn

from experiments.build import model as models
from experiments.engine import errors
from tfm import platform, shapes
from tfm.attention import explicit, mask, relative_position, score, spec, value


def parameters(name: str, bias: bool = True) -> dict:
    values = cases.drawn(lambda key: value.low_rank.init(key, H=H, K=K, D=D, M=1, bias=bias), seed=1)
    return {"score": drawn(name, bias), "value": values, "relative_position": {}}


def parts_of(name: str, *, attend_to_self: bool | None = None, **changes) -> spec.Spec:
    own = SCORES[name] if attend_to_self is None else SCORES[name]._replace(attend_to_self=attend_to_self)
    return cases.spec(**dict(score=own, H=H) | changes).attention


@pytest.mark.parametrize(
    ("name", "bias", "where", "scale", "features", "cap"),
    [
        ("asymmetric", True, "both", "1/sqrt(K)", K, 0.0),
        ("asymmetric", False, "causal", "1/sqrt(D)", K, 0.3),
        ("tied", True, "padding", "1", K, 0.0),
        ("none", True, "none", "1/sqrt(K)", D, 2.0),
        ("tied_wide", False, "none", "1/sqrt(K)", 2 * K, 0.0),
        ("l2_tied", True, "causal", "1/sqrt(K)", K + 4, 0.0),
    ],
)
@cases.float64()
def test_tokens_of_another_sequence_are_attended_to_as_in_the_reference(name, bias, where, scale, features, cap):
    """Queries are of one sequence, keys of another (E26), whose keys and values may come from an earlier call."""
    params, x_BND, x_BSD = parameters(name, bias), cases.normal(1, B, N, D), cases.normal(2, B, S, D)
    run = functools.partial(cases.cross_attention, spec=parts_of(name, scale=score.SCALES[scale], cap=cap))
    attend = jax.jit(functools.partial(run, memory=spec.Memory(x_BSD, MASKS[where])))
    y_BND, A_BHNS, cache = jax.device_get(attend(params, x_BND))
    p = {leaf: np.asarray(numbers) for leaf, numbers in params["value"].items()}
    for b in range(B):
        X, A = (translate.columns(x_BSD[b]), translate.columns(x_BND[b])), []
        for h in range(H):
            L = reference.naive_logits(*X) if name == "none" else reference_scores.logits(name, params["score"], *X, h)
            L = reference.scaled(L, scale, K=features, D=D)
            A += [reference.attention_matrix(cap * np.tanh(L / cap) if cap else L, paper_allowed(where, b))]
            cases.close(A_BHNS[b, 0 if name == "none" else h], A[h].T)
        Y = reference.low_rank_multi_head(X[0], p["Uo_HDK"], p["Uv_HKD"], A, p.get("bv_HK"), p.get("bo_D"))
        cases.close(y_BND[b], Y.T)
    if where == "none":
        from_cache = jax.jit(functools.partial(run, memory=spec.Memory(None, None), cache=cache))
        cases.close(from_cache(params, x_BND[:, 3:4])[0], y_BND[:, 3:4])


@cases.float64()
def test_multi_head_attention_equals_the_reference_in_rows():
    """The textbook convention has tokens as rows: softmax(Q K^T) V, and the heads concatenated times O."""
    params, x_BND = parameters("asymmetric", False), cases.normal(1, 1, N, D)
    p = jax.device_get(params["score"] | params["value"])

    @jax.jit
    def both(params, x_BND):
        qk = score.asymmetric.apply(params["score"], x_BND, x_BND)
        averages = explicit.attention(*qk, value.low_rank.apply(params["value"], x_BND), mask=None, scale=1.0)
        return cases.self_attention(params, x_BND, spec=parts_of("asymmetric"), mask=None)[0], averages[0]

    y_BND, y_BHNK = jax.device_get(both(params, x_BND))
    Q, K_, V = ([U.T for U in p[leaf]] for leaf in ("Uq_HKD", "Uk_HKD", "Uv_HKD"))
    O = np.concatenate(list(p["Uo_HDK"]), axis=1)
    cases.close(y_BND[0], reference.row_multi_head(np.asarray(x_BND[0]), Q, K_, V, O))
    for h in range(H):
        cases.close(y_BHNK[0, h], reference.row_attention(np.asarray(x_BND[0]), Q[h], K_[h], V[h]))


TOKEN_BS = np.arange(N) < np.array([[N], [1]])  # the second sequence is one token and padding
NEAR = {"none": None, "window of one": mask.window(1), "causal padding": mask.both(mask.causal, mask.padding(TOKEN_BS))}


@pytest.mark.parametrize(("name", "variant"), [("tied", "none"), ("asymmetric", "alibi")])
@cases.float64()
def test_weights_are_those_of_the_other_tokens(name, variant):
    """Scores are those of model.score = tied_noself and asymmetric_noself. Diagonals are exactly 0 and 1."""
    params, x_BND = parameters(name), cases.normal(1, B, N, D)
    made = parts_of(name, attend_to_self=False, relative_position=getattr(relative_position, variant))
    every = jax.jit(lambda: [cases.self_attention(params, x_BND, spec=made, mask=m)[1] for m in NEAR.values()])
    n, other = np.arange(N)[None, :], np.arange(N)[:, None]
    for where, A_BHNN in zip(NEAR, jax.device_get(every()), strict=True):
        for b, h in [(0, 0), (1, 2)]:
            seen = {"none": other >= 0, "window of one": other == n}
            seen |= {"causal padding": (other <= n) & TOKEN_BS[b][:, None]}
            allowed = reference_scores.without_itself(np.broadcast_to(seen[where], (N, N)))
            X = np.asarray(x_BND[b]).T
            L = reference.scaled(reference_scores.logits(name, params["score"], X, X, h), "1/sqrt(K)", K=K, D=D)
            if variant == "alibi":
                slope = reference_positions.alibi_slopes(H)[h]
                L = L + reference_positions.biases(lambda offset, slope=slope: -slope * abs(offset), range(N), range(N))
            cases.close(A_BHNN[b, h], reference.attention_matrix(L, allowed).T, 1e-7)  # slopes are float32
            np.testing.assert_array_equal(A_BHNN[b, h].diagonal(), allowed.diagonal())


def test_a_token_is_written_at_its_position_and_not_past_the_end():
    rng = np.random.default_rng(0)
    cache_BHSK, new_BHNK = np.float32(rng.standard_normal((3, 2, 5, 7))), np.float32(rng.standard_normal((3, 2, 1, 7)))
    expected = cache_BHSK.copy()
    expected[0, :, 4], expected[2, :, 1] = new_BHNK[0, :, 0], new_BHNK[2, :, 0]
    write = jax.jit(platform.write_cache)
    np.testing.assert_array_equal(write(cache_BHSK, new_BHNK, jnp.array([[4], [5], [1]])), expected)
    np.testing.assert_array_equal(write(cache_BHSK, new_BHNK, jnp.full((3, 1), 5)), cache_BHSK)


def test_the_config_and_the_score_say_who_attends_to_itself():
    def parts(**changes) -> spec.Spec:
        return models.make_block_spec(tiny.settings("vision", **changes).model).attention

    assert parts(model__cap=9.0).cap == 9
    for name, of in SCORES.items():
        plain, others = parts(model__score=name), parts(model__score=f"{name}_noself")
        assert plain.score.attend_to_self == of.attend_to_self and not others.score.attend_to_self
        assert others.score.factors == plain.score.factors
    with raises(errors.UserError, "tide", "tied"):
        parts(model__score="tide_noself")
    with raises(errors.UserError, "rms_noself"):
        parts(model__norm="rms_noself")


def test_the_config_and_each_of_several_runs_say_how_scores_and_outputs_begin():
    def begun(numbers: dict, **changes: float) -> dict:
        m = tiny.settings("vision", **changes).model
        model = models.build_vision_model(m, output="pooled", Y=4, X=4, Z=1, patch=2, C=3)
        return jax.device_get(shapes.flat(model.init(jax.random.key(0), **numbers)))

    usual = begun({})
    of_scores, of_outputs = {"Uq_HKD", "Uk_HKD"}, {"Uo_HDK", "W2_DF"}
    for found, leaves, factor in [
        (begun({"score_std": 2.0}, model__score_std=0.5), of_scores, 2.0),
        (begun({}, model__output_std=0.5), of_outputs, 0.5),
    ]:
        for path, leaf in usual.items():
            scaled = path.split("/")[-1] in leaves
            np.testing.assert_array_equal(found[path], factor * leaf if scaled else leaf)
            assert np.any(leaf) or not scaled
    for field in ("score_std", "output_std"):
        with raises(errors.UserError, f"model.{field} = -1"):
            models.make_block_spec(tiny.settings("vision", **{f"model.{field}": -1.0}).model)
