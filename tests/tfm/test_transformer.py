"""Whole transformers (E20) against the slow reference, and their properties."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import translate
from cases import B, C, D, H, M, N, W

from tfm import block, head, mlp, norm, position, transformer
from tfm.attention import heads as multihead
from tfm.attention import mask, relative_position, score, value

# ------------------------------------------------------------------------------------------------ against the reference


WHOLE = {
    "the default": {},
    "tied score, causal": dict(score="tied", causal=True),
    "no score, no scale": dict(score="none", scale="1"),
    "post-norm, ReLU, causal": dict(order="post_norm", mlp="relu", causal=True, final_norm=False),
    "plain norm without eps": dict(norm="token_plain", eps=0.0),
    "no bias, sinusoids": dict(bias=False, position="sinusoidal", scale="1/sqrt(D)"),
    "no position": dict(position="none", final_norm=False),
    "tied output": dict(tied_output=True, causal=True),
    "class token": dict(class_token=True),
    "pooled": dict(head="pooled"),
}


@pytest.mark.parametrize("name", WHOLE)
@cases.float64()
def test_transformers_equal_the_reference(name):
    chosen = dict(WHOLE[name])
    answers = "class_token" if "class_token" in chosen else chosen.pop("head", "next_word")
    causal = chosen.pop("causal", False)
    rooms = dict(score=score, mlp=mlp, position=position, norm=norm, order=block)
    functions = {key: getattr(rooms[key], pick) if key in rooms else pick for key, pick in chosen.items()}
    if "scale" in chosen:
        functions["scale"] = score.SCALES[chosen["scale"]]
    outputs = {"W": W} if answers == "next_word" else {"C": C}
    sizes = dict(N=N + 1) if "class_token" in chosen else {}
    model = cases.model(**functions, head=getattr(head, answers), outputs=outputs, sizes=sizes)
    params, w_BN = cases.drawn(model.init, std=0.4), cases.words()
    fast = translate.log_probabilities(model.apply(params, w_BN, mask=mask.causal if causal else None))
    described = {
        key: pick for key, pick in chosen.items() if key in ("score", "order", "mlp", "scale", "eps", "position")
    }
    for b in range(B):
        X = translate.representation(params, np.asarray(w_BN[b]), causal=causal, **described)
        p = {key: np.asarray(leaf) for key, leaf in (params["head"] or {"G_WD": params["embed"]["E_WD"]}).items()}
        slow = {"next_word": reference.next_word, "pooled": reference.pooled_class}.get(
            answers, reference.class_token_class
        )
        cases.close(fast[b], np.log(slow(X, *p.values() if "b_C" not in p else (p["G_CD"], p["b_C"]))), 1e-9)


def test_float32_is_close_to_float64_and_bfloat16_to_float32():
    model = cases.model()
    params, w_BN = cases.drawn(model.init, std=0.2), cases.words()
    narrow = model.apply(params, w_BN, mask=mask.causal)
    narrower = model.apply(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), w_BN, mask=mask.causal)
    with cases.float64():
        wide = model.apply(cases.wide(params), w_BN, mask=mask.causal)
    assert (narrower.dtype, narrow.dtype, wide.dtype) == (np.float32, np.float32, np.float64)
    cases.close(narrow, wide, 2e-5)
    cases.close(narrower, narrow, 5e-2)


# ------------------------------------------------------------------------------------------------------------ symmetry


@cases.float64()
def test_without_positions_a_transformer_is_permutation_equivariant_and_with_them_it_is_not():
    """'herbivores eat plants' and 'plants eat herbivores' (seed 003): the same representations, permuted."""
    herbivores_eat_plants, plants_eat_herbivores = jnp.array([[3, 14, 15]]), jnp.array([[15, 14, 3]])
    for name in ("learned", "none"):
        model = cases.model(position=cases.POSITIONS[name], sizes=dict(N=3, M=2))
        params = cases.drawn(model.init)
        one, other = (model.apply(params, w_BN) for w_BN in (herbivores_eat_plants, plants_eat_herbivores))
        difference = np.abs(one - other[:, ::-1]).max()
        assert difference < 1e-12 if name == "none" else difference > 1e-2, name


@cases.float64()
def test_pooled_classification_is_permutation_invariant_without_positions():
    w_BN, order = cases.words(), np.random.default_rng(1).permutation(N)
    for name in ("learned", "none"):
        model = cases.model(position=cases.POSITIONS[name], head=head.pooled, outputs={"C": C})
        params = cases.drawn(model.init)
        difference = np.abs(model.apply(params, w_BN) - model.apply(params, w_BN[:, order])).max()
        assert difference < 1e-12 if name == "none" else difference > 1e-3, name


# ----------------------------------------------------------------------------------------------------------- causality


def stack_of(params, x_BND, *, the_mask=mask.causal, unroll=True, remat=False, maps=False, **parts):
    y_BND, seen = transformer.stack(
        params, x_BND, mask=the_mask, parts=cases.parts(**parts), unroll=unroll, remat=remat, maps=maps
    )
    return y_BND, seen.get("A")


def layers(depth: int = M, chosen=score.asymmetric, std: float = 0.3) -> dict:
    return cases.drawn(cases.model(score=chosen, sizes=dict(M=depth)).init, std=std)["blocks"]


@pytest.mark.parametrize(
    ("order", "name"), [("post_norm", "asymmetric"), *(("pre_norm", name) for name in cases.SCORES)]
)
def test_the_gradient_with_respect_to_later_inputs_is_exactly_zero(order, name):
    params, x_ND = layers(2, cases.SCORES[name]), cases.normal(1, N, D)
    settings = dict(order=block.ORDERS[order], score=cases.SCORES[name])
    jacobian = jax.jit(jax.jacobian(lambda x_ND: stack_of(params, x_ND[None], unroll=1, **settings)[0][0]))(x_ND)
    reached_NS = np.abs(jacobian).sum((1, 3)) > 0
    np.testing.assert_array_equal(reached_NS, np.tril(np.ones((N, N))))


@pytest.mark.parametrize("order", block.ORDERS)
def test_nan_in_the_last_token_leaves_earlier_logits_as_they_were(order):
    model = cases.model(order=block.ORDERS[order])
    params, w_BN = cases.drawn(model.init), jnp.arange(N)[None]
    logits = model.apply(params, w_BN, mask=mask.causal)
    params["embed"]["E_WD"] = params["embed"]["E_WD"].at[N - 1].set(jnp.nan)
    dirty = model.apply(params, w_BN, mask=mask.causal)
    np.testing.assert_array_equal(dirty[:, :-1], logits[:, :-1])
    assert np.isnan(dirty[:, -1]).all()
    assert np.isnan(model.apply(params, w_BN)).all()


@cases.float64()
def test_the_first_tokens_are_those_of_the_shorter_sequence():
    """E23: X^(n) is the first n columns of X^(n+1), with the causal mask only."""
    model = cases.model()
    params, w_BN = cases.drawn(model.init), cases.words()
    short, whole = (model.apply(params, w_BN[:, :n], mask=mask.causal) for n in (4, N))
    cases.close(short, whole[:, :4], 1e-12)
    assert np.abs(model.apply(params, w_BN[:, :4]) - model.apply(params, w_BN)[:, :4]).max() > 0.1


@cases.float64()
def test_padding_does_not_matter_to_the_words():
    """Two sentences of 4 and 7 words in one batch: the 4 words are as they are alone, whatever pads them."""
    model, valid_BN = cases.model(), jnp.arange(N)[None, :] < jnp.array([4, N])[:, None]
    params, w_BN = cases.drawn(model.init), cases.words()
    padded, otherwise, unmasked = (
        model.apply(params, w_BN.at[0, 4:].set(pad), mask=the_mask)
        for pad, the_mask in ((0, mask.padding(valid_BN)), (5, mask.padding(valid_BN)), (0, None))
    )
    np.testing.assert_array_equal(padded[valid_BN], otherwise[valid_BN])
    cases.close(padded[0, :4], model.apply(params, w_BN[:1, :4])[0], 1e-12)
    cases.close(padded[1], unmasked[1], 1e-12)
    assert np.abs(padded[0, :4] - unmasked[0, :4]).max() > 0.1


def test_maps_are_the_weights_of_every_layer():
    params, x_BND = layers(), cases.normal(1, B, N, D)
    y_BND, A_MBHNS = stack_of(params, x_BND, maps=True)
    assert A_MBHNS.shape == (M, B, H, N, N)
    assert stack_of(params, x_BND)[1] is None
    for m in range(M):
        x_BND, A_1BHNS = stack_of(jax.tree.map(lambda leaf, m=m: leaf[m : m + 1], params), x_BND, maps=True)
        cases.close(A_1BHNS[0], A_MBHNS[m], 1e-5)
    cases.close(x_BND, y_BND, 1e-5)


# ------------------------------------------------------------------------------------- one result, several programs


@cases.float64()
def test_eager_equals_jit():
    model = cases.model(sizes=dict(M=1))
    params, w_BN = cases.drawn(model.init), cases.words(b=1, n=3)

    with jax.disable_jit():
        eager = model.apply(params, w_BN, mask=mask.causal)
    cases.close(eager, model.apply(params, w_BN, mask=mask.causal), 1e-12)


PROGRAMS = {
    "unrolled": dict(unroll=True),
    "scan": dict(unroll=1),
    "remat and scan": dict(remat=True, unroll=1),
}


def loss_of(**settings):
    def loss(params, x_BND):
        return jnp.sum(jnp.sin(stack_of(params, x_BND, **settings)[0]))

    return loss


@functools.cache
def value_and_gradient(name: str) -> list[np.ndarray]:
    with cases.float64():
        both = jax.jit(jax.value_and_grad(loss_of(**PROGRAMS[name]), argnums=(0, 1)))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(both(layers(), cases.normal(1, B, N, D)))]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "unrolled"])
def test_scan_unrolled_and_remat_are_equal(name):
    for one, other in zip(value_and_gradient(name), value_and_gradient("unrolled"), strict=True):
        assert one.dtype == np.float64
        cases.close(one, other, 1e-12)


def primitives(jaxpr) -> list[str]:
    """The names of all primitives, also inside of others."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation.primitive.name)
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            found += primitives(inner) if hasattr(inner, "eqns") else []
    return found


def test_the_settings_really_make_different_programs():
    """Rematerialisation repeats the forward products in the backward pass; unrolled layers are no loop."""
    params, x_BND = layers(), cases.normal(1, 5, 7, D)  # of few tokens a product would be two, for CPU and others

    def count(primitive: str, **settings) -> int:
        return primitives(jax.make_jaxpr(jax.grad(loss_of(**settings)))(params, x_BND).jaxpr).count(primitive)

    def loops(**settings) -> int:
        return jax.jit(loss_of(**settings)).lower(params, x_BND).as_text().count("stablehlo.while")

    forward, plain = 8, 8 + 2 * 8  # q, k, v, logits, average, output, W_1, W_2: the gradient has two for each
    assert count("dot_general", unroll=1) == plain
    again = count("dot_general", unroll=1, remat=True) - plain
    assert forward - 2 <= again <= forward  # the last product, W_2 h, is not needed again
    assert (loops(unroll=True), loops(unroll=1), loops(unroll=M)) == (0, 1, 0)


# ------------------------------------------------------------------------------------------------- mixed precision


def test_bfloat16_narrows_products_and_tokens_and_nothing_else():
    model = cases.model()
    params, w_BN = cases.drawn(model.init, std=0.2), cases.words()
    kept = functools.partial(transformer.apply, mask=mask.causal, unroll=1, maps=True, keep=True, parts=model.parts)
    logits, seen = jax.eval_shape(functools.partial(kept, dtype=jnp.bfloat16), params, w_BN)
    assert logits.dtype == jnp.float32 and seen["A_MBHNS"].dtype == jnp.float32
    assert seen["cache"]["self"]["k_BHSK"].dtype == jnp.bfloat16

    def loss(params, dtype):
        logits, _ = transformer.apply(params, w_BN, mask=mask.causal, unroll=1, dtype=dtype, parts=model.parts)
        return jnp.square(logits).mean()

    wide, narrow = (
        jax.jit(jax.value_and_grad(functools.partial(loss, dtype=dtype)))(params) for dtype in (None, jnp.bfloat16)
    )
    assert 0 < abs(float(wide[0] - narrow[0])) < 0.02 * float(wide[0])
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow[1])} == {jnp.dtype("float32")}
    norm = np.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(wide[1])))
    apart = jax.tree.map(lambda a, b: float(jnp.square(a - b).sum()), *(pair[1] for pair in (wide, narrow)))
    assert np.sqrt(sum(jax.tree.leaves(apart))) < 0.05 * norm


def test_running_statistics_and_biases_of_logits_keep_their_precision():
    wide, narrow = ("mean_D", "var_D", "b_HR"), ("gain_D", "Uq_HKD")
    found = transformer.cast({"norm": {name: jnp.ones(3) for name in wide + narrow}}, jnp.bfloat16)["norm"]
    assert {name for name, leaf in found.items() if leaf.dtype == jnp.float32} == set(wide)
    assert {name for name, leaf in found.items() if leaf.dtype == jnp.bfloat16} == set(narrow)


def test_alibi_has_a_slope_for_each_head_also_where_nothing_else_tells_the_heads_apart():
    own = cases.parts(score=score.constant, value=value.identity, relative_position=relative_position.alibi).attention
    x_BND = cases.normal(1, 1, N, D)
    _, A_BHNS, _ = multihead.self_attention(
        {"score": {}, "value": {}, "relative_position": {}}, x_BND, parts=own, mask=None
    )
    assert A_BHNS.shape == (1, H, N, N) and len({float(a) for a in A_BHNS[0, :, 0, 0]}) == H


def test_the_zeros_of_dropout_are_every_layers_and_every_stages_own():
    """They agree by chance only. All weights are 0 and stage s gives 2^s at every place, so the sum of all tells which
    of them were replaced by zeros: the others are twice as large at the rate 1/2, and its binary digits are the stages.
    """
    made = cases.model(position=position.none, final_norm=False, cross=True, dropout=0.5)
    params = jax.tree.map(jnp.zeros_like, made.init(jax.random.key(0)))
    params["embed"]["E_WD"] += 1
    layers, stages = params["blocks"], 2.0 ** (1 + jnp.arange(3 * M).reshape(3, M, 1))
    for part, leaf, give in zip(("value", "value_cross", "mlp"), ("bo_D", "bo_D", "b2_D"), stages, strict=True):
        layers[part][leaf] += give
    call = dict(parts=made.parts, mask=None, memory=block.Memory(cases.normal(0, B, 3, D), None))
    key_B = jax.random.split(jax.random.key(1), B)
    x_BND, _ = transformer.hidden_states(params, cases.words(), key_B=key_B, unroll=1, **call)
    digits = np.int64(x_BND)[..., None] >> np.arange(1, 3 * M + 2) & 1
    assert (x_BND == digits @ 2 ** np.arange(1, 3 * M + 2)).all()
    kept = digits.reshape(B * N * D, 3 * M + 1)
    five_deviations = 2.5 / len(kept) ** 0.5
    for one, other in itertools.combinations(kept.T, 2):
        assert abs((one == other).mean() - 0.5) < five_deviations
