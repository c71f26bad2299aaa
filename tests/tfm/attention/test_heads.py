"""Heads: self-attention and cross-attention (E8-E11, E26) against the slow reference.

test_groups.py tests heads, features and tokens on several devices; test_kv_cache.py tests one token after the other.
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
from score_cases import SCORES, D, H, K, draw_params

from experiments.config import errors
from experiments.model import build
from tfm import platform, shapes
from tfm.attention import explicit, heads as attentions, mask as masks, relative_position, score, value


def parameters(name: str, bias: bool = True) -> dict:
    values = cases.draw_params(lambda key: value.low_rank.init(key, H=H, K=K, D=D, M=1, bias=bias), seed=1)
    return {"score": draw_params(name, bias), "value": values, "relative_position": {}}


def make_spec(name: str, *, attend_to_self: bool | None = None, **changes) -> attentions.Spec:
    variant = SCORES[name] if attend_to_self is None else SCORES[name]._replace(attend_to_self=attend_to_self)
    return cases.spec(**dict(score=variant, H=H) | changes).attention


@pytest.mark.parametrize(
    ("name", "bias", "mask_name", "scale", "features", "cap"),
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
def test_cross_attention_equals_the_reference(name, bias, mask_name, scale, features, cap):
    """Keys and values are from another sequence (E26), or from the cache of an earlier call."""
    params, x_BND, x_BSD = parameters(name, bias), cases.normal(1, B, N, D), cases.normal(2, B, S, D)
    attend_to = functools.partial(cases.cross_attention, spec=make_spec(name, scale=score.SCALES[scale], cap=cap))
    attend = jax.jit(functools.partial(attend_to, memory=attentions.Memory(x_BSD, MASKS[mask_name])))
    y_BND, A_BHNS, cache = jax.device_get(attend(params, x_BND))
    p = {leaf: np.asarray(numbers) for leaf, numbers in params["value"].items()}
    for b in range(B):
        X, A = (translate.columns(x_BSD[b]), translate.columns(x_BND[b])), []
        for h in range(H):
            L = reference.naive_logits(*X) if name == "none" else reference_scores.logits(name, params["score"], *X, h)
            L = reference.scaled(L, scale, K=features, D=D)
            A += [reference.attention_matrix(cap * np.tanh(L / cap) if cap else L, paper_allowed(mask_name, b))]
            cases.assert_close(A_BHNS[b, 0 if name == "none" else h], A[h].T)
        Y = reference.low_rank_multi_head(X[0], p["Uo_HDK"], p["Uv_HKD"], A, p.get("bv_HK"), p.get("bo_D"))
        cases.assert_close(y_BND[b], Y.T)
    if mask_name == "none":
        from_cache = jax.jit(functools.partial(attend_to, memory=attentions.Memory(None, None), cache=cache))
        cases.assert_close(from_cache(params, x_BND[:, 3:4])[0], y_BND[:, 3:4])


@cases.float64()
def test_multi_head_attention_equals_the_textbook_formula_with_tokens_as_rows():
    """The formula is softmax(Q K^T) V with tokens as rows; concatenated heads are multiplied by O."""
    params, x_BND = parameters("asymmetric", False), cases.normal(1, 1, N, D)
    p = jax.device_get(params["score"] | params["value"])

    @jax.jit
    def compute(params, x_BND):
        qk = score.asymmetric.apply(params["score"], x_BND, x_BND)
        averages = explicit.attention(*qk, value.low_rank.apply(params["value"], x_BND), mask=None, scale=1.0)
        return cases.self_attention(params, x_BND, spec=make_spec("asymmetric"), mask=None)[0], averages[0]

    y_BND, y_BHNK = jax.device_get(compute(params, x_BND))
    Q, K_, V = ([U.T for U in p[leaf]] for leaf in ("Uq_HKD", "Uk_HKD", "Uv_HKD"))
    O = np.concatenate(list(p["Uo_HDK"]), axis=1)
    cases.assert_close(y_BND[0], reference.row_multi_head(np.asarray(x_BND[0]), Q, K_, V, O))
    for h in range(H):
        cases.assert_close(y_BHNK[0, h], reference.row_attention(np.asarray(x_BND[0]), Q[h], K_[h], V[h]))


TOKEN_BS = np.arange(N) < np.array([[N], [1]])  # the second sequence has one token and padding
NEAR_MASKS = {
    "none": None,
    "window of one": masks.window(1),
    "causal padding": masks.both(masks.causal, masks.padding(TOKEN_BS)),
}


@pytest.mark.parametrize(("name", "variant"), [("tied", "none"), ("asymmetric", "alibi")])
@cases.float64()
def test_without_attention_to_itself_a_token_has_the_weights_of_the_other_tokens(name, variant):
    """The scores are tied_noself and asymmetric_noself. A diagonal weight is 0, or 1 if there is no other key."""
    params, x_BND = parameters(name), cases.normal(1, B, N, D)
    spec = make_spec(name, attend_to_self=False, relative_position=getattr(relative_position, variant))
    compute_all = jax.jit(
        lambda: [cases.self_attention(params, x_BND, spec=spec, mask=m)[1] for m in NEAR_MASKS.values()]
    )
    n, s = np.arange(N)[None, :], np.arange(N)[:, None]
    for mask_name, A_BHNN in zip(NEAR_MASKS, jax.device_get(compute_all()), strict=True):
        for b, h in [(0, 0), (1, 2)]:
            masks_by_name = {"none": s >= 0, "window of one": s == n}
            masks_by_name |= {"causal padding": (s <= n) & TOKEN_BS[b][:, None]}
            allowed = reference_scores.without_itself(np.broadcast_to(masks_by_name[mask_name], (N, N)))
            X = np.asarray(x_BND[b]).T
            L = reference.scaled(reference_scores.logits(name, params["score"], X, X, h), "1/sqrt(K)", K=K, D=D)
            if variant == "alibi":
                slope = reference_positions.alibi_slopes(H)[h]
                L = L + reference_positions.biases(lambda offset, slope=slope: -slope * abs(offset), range(N), range(N))
            cases.assert_close(A_BHNN[b, h], reference.attention_matrix(L, allowed).T, 1e-7)  # slopes are float32
            np.testing.assert_array_equal(A_BHNN[b, h].diagonal(), allowed.diagonal())


def test_a_token_is_written_at_its_position_and_not_past_the_end():
    rng = np.random.default_rng(0)
    cache_BHSK, new_BHNK = np.float32(rng.standard_normal((3, 2, 5, 7))), np.float32(rng.standard_normal((3, 2, 1, 7)))
    expected = cache_BHSK.copy()
    expected[0, :, 4], expected[2, :, 1] = new_BHNK[0, :, 0], new_BHNK[2, :, 0]
    write = jax.jit(platform.write_cache)
    np.testing.assert_array_equal(write(cache_BHSK, new_BHNK, jnp.array([[4], [5], [1]])), expected)
    np.testing.assert_array_equal(write(cache_BHSK, new_BHNK, jnp.full((3, 1), 5)), cache_BHSK)


def test_the_config_and_the_score_decide_if_a_token_attends_to_itself():
    def make_spec_of(**changes) -> attentions.Spec:
        return build.make_block_spec(tiny.settings("vision", **changes).model).attention

    assert make_spec_of(model__cap=9.0).cap == 9
    for name, variant in SCORES.items():
        plain, noself = make_spec_of(model__score=name), make_spec_of(model__score=f"{name}_noself")
        assert plain.score.attend_to_self == variant.attend_to_self and not noself.score.attend_to_self
        assert noself.score.factors == plain.score.factors
    skew = make_spec_of(model__score="sym_plus_skew:4_noself").score
    assert skew.apply is score.sym_plus_skew_of(4).apply and not skew.attend_to_self
    with raises(errors.UserError, "tide", "tied"):
        make_spec_of(model__score="tide_noself")
    with raises(errors.UserError, "rms_noself"):
        make_spec_of(model__norm="rms_noself")


def test_score_std_and_output_std_scale_initial_values_by_config_or_by_run():
    def initialise(numbers: dict, **changes: float) -> dict:
        m = tiny.settings("vision", **changes).model
        model = build.vision_model(m, output="pooled", Y=4, X=4, Z=1, patch=2, C=3)
        return jax.device_get(shapes.flat(model.init(jax.random.key(0), **numbers)))

    default = initialise({})
    score_leaves, output_leaves = {"Uq_HKD", "Uk_HKD"}, {"Uo_HDK", "W2_DF"}
    for result, leaves, factor in [
        (initialise({"score_std": 2.0}, model__score_std=0.5), score_leaves, 2.0),
        (initialise({}, model__output_std=0.5), output_leaves, 0.5),
    ]:
        for path, leaf in default.items():
            is_scaled = path.split("/")[-1] in leaves
            np.testing.assert_array_equal(result[path], factor * leaf if is_scaled else leaf)
            assert np.any(leaf) or not is_scaled
    for field in ("score_std", "output_std"):
        with raises(errors.UserError, f"model.{field} = -1"):
            build.make_block_spec(tiny.settings("vision", **{f"model.{field}": -1.0}).model)
