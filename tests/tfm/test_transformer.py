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
from tfm.attention import mask, relative_position, score, spec as attentions, value
from tfm.decode import kv_cache

WHOLE = {
    "the default, class token": dict(class_token=True),
    "tied score, pooled": dict(score="tied", head="pooled"),
    "no score, scale or position": dict(score="none", scale="1", position="none", final_norm=False),
    "post-norm, ReLU, causal": dict(order="post_norm", mlp="relu", causal=True, final_norm=False),
    "plain norm without eps, tied output, no bias, sinusoids, causal": dict(norm="token_plain", eps=0.0, causal=True)
    | dict(tied_output=True, bias=False, position="sinusoidal", scale="1/sqrt(D)"),
}


@pytest.mark.parametrize("name", WHOLE)
@cases.float64()
def test_transformers_equal_the_reference(name):
    chosen = dict(WHOLE[name])
    output_head = "class_token" if "class_token" in chosen else chosen.pop("head", "next_word")
    causal = chosen.pop("causal", False)
    variants = {key: vars(module) for key, module in dict(score=score, mlp=mlp, position=position, norm=norm).items()}
    variants |= dict(order=block.ORDERS, scale=score.SCALES)
    functions = {key: variants[key][name] if key in variants else name for key, name in chosen.items()}
    outputs = {"W": W} if output_head == "next_word" else {"C": C}
    sizes = dict(N=N + 1) if "class_token" in chosen else {}
    model = cases.model(**functions, head=getattr(head, output_head), outputs=outputs, sizes=sizes)
    params, w_BN = cases.drawn(model.init, std=0.4), cases.words()
    fast = translate.log_probabilities(model.apply(params, w_BN, mask=mask.causal if causal else None))
    names = {key: chosen[key] for key in ("score", "order", "mlp", "scale", "eps", "position") if key in chosen}
    slow = dict(next_word=reference.next_word, pooled=reference.pooled_class, class_token=reference.class_token_class)
    for b in range(B):
        X = translate.representation(params, np.asarray(w_BN[b]), causal=causal, **names)
        p = {key: np.asarray(leaf) for key, leaf in (params["head"] or {"G_WD": params["embed"]["E_WD"]}).items()}
        cases.close(
            fast[b], np.log(slow[output_head](X, *(p[key] for key in ("G_WD", "G_CD", "b_C") if key in p))), 1e-9
        )


def test_the_precision_of_products_and_of_what_is_never_narrow():
    """float32 is close to float64, and bfloat16 to float32; softmax, logits and gradients always have 32 bits."""
    model = cases.model(class_token=True, sizes={"N": N + 1})
    params, w_BN = cases.drawn(model.init, std=0.2), cases.words()

    def run(params, dtype=None):
        call = dict(mask=mask.causal, maps=True, keep=True)
        return cases.apply_model(params, w_BN, spec=model.spec._replace(dtype=dtype), **call)

    narrow, narrower = (jax.jit(functools.partial(run, dtype=dtype))(params) for dtype in (None, jnp.bfloat16))
    with cases.float64():
        wide, _ = jax.jit(run)(cases.wide(params))
    assert wide.dtype == np.float64 and narrow[0].dtype == narrower[0].dtype == np.float32
    cases.close(narrow[0], wide, 2e-5)
    cases.close(narrower[0], narrow[0], 5e-2)
    assert (narrower[0] != narrow[0]).any()
    assert narrower[1]["A_MBHNS"].dtype == np.float32 and narrower[1]["cache"]["self"]["k_BHSK"].dtype == jnp.bfloat16
    grads = jax.eval_shape(jax.grad(lambda params: run(params, jnp.bfloat16)[0].sum()), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_running_statistics_and_biases_of_logits_keep_their_precision():
    wide, narrow = ("mean_D", "var_D", "b_HR"), ("gain_D", "Uq_HKD")
    tree = {name: jnp.ones(3) for name in wide + narrow} | {"count": np.arange(3)}
    found = transformer.cast({"norm": tree}, jnp.bfloat16)["norm"]
    assert {name for name, leaf in found.items() if leaf.dtype == jnp.float32} == set(wide)
    assert {name for name, leaf in found.items() if leaf.dtype == jnp.bfloat16} == set(narrow)
    assert isinstance(found["count"], jax.Array) and found["count"].dtype == jnp.int32


def stack_of(params, x_BND, *, unroll=1, remat="none", maps=False, **parts):
    spec = transformer.Spec(None, None, cases.spec(**parts), None, unroll=unroll, remat=remat)
    y_BND, aux = transformer.stack(params, x_BND, spec, attentions.Call(mask=mask.causal, maps=maps))
    return y_BND, aux.get("A", {}).get("self")


def layers(depth: int = M, **changes) -> dict:
    return cases.drawn(cases.model(sizes=dict(M=depth), **changes).init)["blocks"]


def test_maps_are_the_weights_of_every_layer():
    params, x_BND = jax.device_get(layers()), cases.normal(1, B, N, D)
    maps = jax.jit(functools.partial(stack_of, maps=True))
    y_BND, A_MBHNS = jax.device_get(maps(params, x_BND))
    assert A_MBHNS.shape == (M, B, H, N, N)
    assert jax.eval_shape(stack_of, params, x_BND)[1] is None
    for m in range(M):
        x_BND, A_1BHNS = maps(jax.tree.map(lambda leaf, m=m: leaf[m : m + 1], params), x_BND)
        cases.close(A_1BHNS[0], A_MBHNS[m], 1e-5)
    cases.close(x_BND, y_BND, 1e-5)


def loss_of(**settings):
    return lambda params, x_BND: jnp.sum(jnp.sin(stack_of(params, x_BND, **settings)[0]))


@cases.float64()
def test_scan_unrolled_and_remat_are_equal():
    given = layers(2, bias=False), cases.normal(1, 1, N, D)
    ways = [dict(unroll=True), *(dict(remat=r) for r in transformer.REMAT if r != "none")]
    plain, *others = (jax.jit(jax.value_and_grad(loss_of(mlp=mlp.relu, **how), (0, 1)))(*given) for how in ways)
    for other in others:
        cases.agree(other, plain, 1e-12)


@cases.float64()
def test_layers_that_share_parameters_are_as_many_with_copies_of_them():
    """They agree in logits, maps, the zeros of dropout, and token by token."""
    share, model, w_BN = 2, cases.model(sizes={"M": 4}, share=2, dropout=0.3), cases.words()
    params = cases.drawn(model.init)
    copies = params | {"blocks": jax.tree.map(lambda leaf: np.repeat(leaf, share, axis=0), params["blocks"])}

    @functools.partial(jax.jit, static_argnames="share")
    def run(params, *, share):
        options = dict(mask=mask.causal, maps=True, spec=model.spec._replace(share=share))
        keys = None, jax.random.split(jax.random.key(0), B)
        return [cases.apply_model(params, w_BN, key_B=key_B, **options) for key_B in keys]

    (full_BNW, _), (dropout_BNW, _) = results = jax.device_get(run(params, share=share))
    cases.agree(results, run(copies, share=1))
    assert (full_BNW != dropout_BNW).any()

    @jax.jit
    def token_by_token(params):
        options = dict(call=attentions.Call(mask=mask.causal), spec=model.spec._replace(share=share))
        n_B = jnp.full(B, 2)
        first_BW, cache = kv_cache.start(params, w_BN[:, :2], n_B, capacity=N, **options)
        return first_BW, kv_cache.step(kv_cache.by_layer(params), cache, w_BN[:, 2], n_B, **options)[0]

    cases.agree(token_by_token(params), (full_BNW[:, 1], full_BNW[:, 2]))


@cases.float64()
def test_tokens_of_fewer_features_are_those_of_an_embedding_that_is_a_product():
    """A token is W (e_w + p_n) + b, with e_w and p_n of E features."""
    model, w_BN = cases.model(E=3), cases.words()
    params = cases.drawn(model.init)
    E_WE, P_NE, up = params["embed"]["E_WE"], params["position"]["P_NE"], params["embed"]["up"]
    embed, position = {"E_WD": E_WE @ up["W_DE"].T + up["b_D"]}, {"P_ND": P_NE @ up["W_DE"].T}
    product = params | {"embed": embed, "position": position}
    cases.close(model.apply(params, w_BN), model.apply(product, w_BN))
    begun = cases.model(sizes={"D": 400, "H": 1, "K": 2, "M": 2}, E=100).init(jax.random.key(0))["embed"]["up"]["W_DE"]
    assert float(begun.std()) == pytest.approx(100**-0.5, rel=0.02)  # of 40,000 numbers


def primitives(jaxpr) -> list[str]:
    """Return the names of all primitives, including those inside others."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation.primitive.name)
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            found += primitives(inner) if hasattr(inner, "eqns") else []
    return found


def test_the_settings_really_make_different_programs():
    """The setting decides what a loop saves for the backward pass: "full" repeats products and "products" does not.

    Both repeat the activation of an MLP. Unrolled layers are not a loop.
    """
    params, x_BND = layers(), cases.normal(1, 5, 7, D)  # of few tokens a product would be two, for CPU and others

    def names(**settings) -> list[str]:
        return primitives(jax.make_jaxpr(jax.grad(loss_of(**settings)))(params, x_BND).jaxpr)

    def count(**settings) -> int:
        return names(**settings).count("dot_general")

    def loops(**settings) -> int:
        return jax.jit(loss_of(**settings)).lower(params, x_BND).as_text().count("stablehlo.while")

    # Logits, average, W_1, W_2: the gradient has two for each; those of q, k, v and the output stand in branches.
    forward, plain = 4, 4 + 2 * 4
    assert count(unroll=1) == count(unroll=1, remat="products") == plain
    again = count(unroll=1, remat="full") - plain
    assert again == forward - 1  # the last product, W_2 h, is not needed again
    erfs = [names(unroll=1, remat=remat).count("erf") for remat in transformer.REMAT]
    assert erfs[0] + 1 == erfs[1] == erfs[2]
    assert (loops(unroll=True), loops(unroll=1), loops(unroll=M)) == (0, 1, 0)


def test_alibi_has_a_slope_for_each_head_even_if_all_heads_are_otherwise_equal():
    own = cases.spec(score=score.constant, value=value.identity, relative_position=relative_position.alibi).attention
    params, x_BND = {"score": {}, "value": {}, "relative_position": {}}, cases.normal(1, 1, N, D)
    attend = jax.jit(functools.partial(cases.self_attention, spec=own, mask=None))
    _, A_BHNS, _ = attend(params, x_BND)
    assert A_BHNS.shape == (1, H, N, N) and len({float(a) for a in A_BHNS[0, :, 0, 0]}) == H


def test_every_layer_and_every_stage_draws_its_own_zeros_of_dropout():
    """All weights are 0, and stage s adds 2^s everywhere, or twice that at the rate 1/2.

    So the binary digits of the sum show which stages became zeros. Any two stages agree by chance only.
    """
    model = cases.model(position=position.none, final_norm=False, cross=True, dropout=0.5)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), jax.eval_shape(model.init, jax.random.key(0)))
    params["embed"]["E_WD"] += 1
    layers, stages = params["blocks"], 2.0 ** (1 + jnp.arange(3 * M).reshape(3, M, 1))
    for part, leaf, give in zip(("value", "value_cross", "mlp"), ("bo_D", "bo_D", "b2_D"), stages, strict=True):
        layers[part][leaf] += give
    call = dict(mask=None, memory=attentions.Memory(cases.normal(0, B, 3, D), None))
    key_B = jax.random.split(jax.random.key(1), B)
    call = attentions.Call(key_B=key_B, **call)
    x_BND, _ = jax.jit(lambda params: transformer.hidden(params, cases.words(), model.spec, call))(params)
    digits = np.int64(x_BND)[..., None] >> np.arange(1, 3 * M + 2) & 1
    assert (x_BND == digits @ 2 ** np.arange(1, 3 * M + 2)).all()
    kept = digits.reshape(B * N * D, 3 * M + 1)
    five_deviations = 2.5 / len(kept) ** 0.5
    for one, other in itertools.combinations(kept.T, 2):
        assert abs((one == other).mean() - 0.5) < five_deviations
