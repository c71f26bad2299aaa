"""Whole transformers (E20) against the slow reference, and their properties."""

import functools
import itertools

import averages
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import translate
from cases import B, C, D, H, M, N, W

from experiments.data import windows
from tfm import block as blocks, head as heads, mlp, norm, position, transformer
from tfm.attention import explicit, flash, heads as attentions, mask as masks, relative_position, score, value

CAUSAL = attentions.Call(mask=masks.causal)
TRANSFORMERS = {
    "the default, class token": dict(class_token=True),
    "tied score, pooled": dict(score="tied", head="pooled"),
    "no score, scale or position": dict(score="none", scale="1", position="none", final_norm=False),
    "plain order, eps": dict(order="plain", eps=0.3),
    "post-norm, ReLU, causal": dict(order="post_norm", mlp="relu", causal=True, final_norm=False, eps=0.3),
    "plain norm without eps, tied output, no bias, sinusoids, causal": dict(norm="token_plain", eps=0.0, causal=True)
    | dict(tied_output=True, bias=False, position="sinusoidal", scale="1/sqrt(D)"),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
@cases.float64()
def test_transformers_equal_the_reference(name):
    chosen = dict(TRANSFORMERS[name])
    output_head = "class_token" if "class_token" in chosen else chosen.pop("head", "next_word")
    causal = chosen.pop("causal", False)
    variants = {key: vars(module) for key, module in dict(score=score, mlp=mlp, position=position, norm=norm).items()}
    variants |= dict(order=blocks.ORDERS, scale=score.SCALES)
    functions = {key: variants[key][name] if key in variants else name for key, name in chosen.items()}
    outputs = {"W": W} if output_head == "next_word" else {"C": C}
    sizes = dict(N=N + 1) if "class_token" in chosen else {}
    model = cases.model(**functions, head=getattr(heads, output_head), outputs=outputs, sizes=sizes)
    params, w_BN = jax.device_get((cases.draw_params(model.init, std=0.4), cases.draw_token_ids()))
    fast = translate.log_probabilities(model.apply(params, w_BN, mask=masks.causal if causal else None))
    names = {key: chosen[key] for key in ("score", "order", "mlp", "scale", "eps", "position") if key in chosen}
    slow = dict(next_word=reference.next_word, pooled=reference.pooled_class, class_token=reference.class_token_class)
    head = params["head"] or {"G_WD": params["embed"]["E_WD"]}
    for b in range(B):
        X = translate.representation(params, w_BN[b], causal=causal, **names)
        p = slow[output_head](X, *(head[key] for key in ("G_WD", "G_CD", "b_C") if key in head))
        cases.assert_close(fast[b], np.log(p), 1e-9)


def test_bfloat16_products_keep_softmax_logits_and_gradients_in_float32():
    """float32 is close to float64, and bfloat16 is close to float32."""
    model = cases.model(class_token=True, sizes={"N": N + 1})
    params, w_BN = cases.draw_params(model.init, std=0.2), cases.draw_token_ids()

    def compute(params, dtype=None):
        call = dict(mask=masks.causal, look=("A",), keep=True)
        return cases.apply_model(params, w_BN, spec=model.spec._replace(dtype=dtype), **call)

    single, half = jax.device_get(jax.jit(lambda params: [compute(params, t) for t in (None, jnp.bfloat16)])(params))
    with cases.float64():
        double, _ = jax.jit(compute)(cases.to_float64(params))
    assert double.dtype == np.float64 and single[0].dtype == half[0].dtype == np.float32
    cases.assert_close(single[0], double, 2e-5)
    cases.assert_close(half[0], single[0], 5e-2)
    assert (half[0] != single[0]).any()
    assert half[1]["look"]["A"].dtype == np.float32 and half[1]["cache"]["self"]["k_BHSK"].dtype == jnp.bfloat16
    grads = jax.eval_shape(jax.grad(lambda params: compute(params, jnp.bfloat16)[0].sum()), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_running_statistics_and_biases_of_logits_keep_their_precision():
    wide, narrow = ("mean_D", "var_D", "b_HR"), ("gain_D", "Uq_HKD")
    tree = {name: np.ones(3, np.float32) for name in wide + narrow} | {"count": np.arange(3)}
    result = transformer.cast({"norm": tree}, jnp.bfloat16)["norm"]
    assert {name for name, leaf in result.items() if leaf.dtype == jnp.float32} == set(wide)
    assert {name for name, leaf in result.items() if leaf.dtype == jnp.bfloat16} == set(narrow)
    assert isinstance(result["count"], jax.Array) and result["count"].dtype == jnp.int32


def loss_of(*, unroll=1, remat="none", **block_changes):
    """Return a function of (parameters of the layers, x_BND)."""
    spec, call = transformer.Spec(None, None, cases.spec(**block_changes), None, unroll=unroll, remat=remat), CAUSAL
    return lambda params, x_BND: jnp.sum(jnp.sin(transformer.stack(params, x_BND, spec, call)[0]))


def layers(depth: int = M, **changes) -> dict:
    return cases.draw_params(cases.model(sizes=dict(M=depth), **changes).init)["blocks"]


@cases.float64()
def test_scan_unrolled_and_remat_are_equal():
    settings = [dict(unroll=True), *(dict(remat=r) for r in transformer.REMAT if r != "none")]
    losses = [jax.value_and_grad(loss_of(mlp=mlp.relu, **options), (0, 1)) for options in settings]
    compute_all = jax.jit(lambda *arguments: [loss(*arguments) for loss in losses])
    expected, *results = jax.device_get(compute_all(layers(2, bias=False), cases.normal(1, 1, N, D)))
    for result in results:
        cases.assert_trees_close(result, expected, 1e-12)


def primitives(jaxpr) -> list[str]:
    """Return the names of all primitives in a jaxpr, including nested jaxprs."""
    result = []
    for equation in jaxpr.eqns:
        result.append(equation.primitive.name)
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            result += primitives(inner) if hasattr(inner, "eqns") else []
    return result


def test_unroll_and_remat_make_different_programs():
    """remat decides what a loop saves for the backward pass: "full" repeats products with a matrix, the others do not.

    All repeat the activation of an MLP. Unrolled layers have no loop, and repeat nothing.
    """
    params, x_BND = layers(), cases.normal(1, 5, 7, D)  # products of fewer tokens have two forms

    def count_loops(**settings) -> int:
        return jax.jit(loss_of(**settings)).lower(params, x_BND).as_text().count("stablehlo.while")

    gradients = [jax.grad(loss_of(unroll=1, remat=remat)) for remat in transformer.REMAT]
    gradients.append(jax.grad(loss_of(unroll=True)))
    names = [primitives(jax.make_jaxpr(gradient)(params, x_BND).jaxpr) for gradient in gradients]
    none, products, full, unrolled = (of_program.count("dot_general") for of_program in names)
    # Logits, average, W_1, W_2, of which the gradient has two each. Products of q, k, v and the output are in branches.
    assert none == products == 4 + 2 * 4 + 1  # the logits are computed again
    assert unrolled == none - 1
    assert full == none + 2  # the average and W_1 x too; the last product, W_2 h, is not needed again
    erfs = [of_program.count("erf") for of_program in names]
    assert erfs[0] == erfs[1] == erfs[2] == erfs[3] + 1
    assert [count_loops(unroll=unroll) for unroll in (True, 1, M)] == [0, 1, 0]


def test_alibi_has_a_slope_for_each_head_although_the_heads_have_no_parameters():
    spec = cases.spec(score=score.constant, value=value.identity, relative_position=relative_position.alibi).attention
    params, x_BND = {"score": {}, "value": {}, "relative_position": {}}, cases.normal(1, 1, N, D)
    attend = jax.jit(functools.partial(cases.self_attention, spec=spec, mask=None))
    _, A_BHNS, _ = attend(params, x_BND)
    assert A_BHNS.shape == (1, H, N, N) and len({float(a) for a in A_BHNS[0, :, 0, 0]}) == H


def test_every_layer_and_every_stage_draws_a_different_dropout_mask():
    """All weights are 0, and stage s adds 2^s everywhere, or twice that at the rate 1/2.

    Hence the binary digits of the sum show which stages became zeros. Any two stages must agree only by chance.
    """
    model = cases.model(position=position.none, final_norm=False, cross=True, dropout=0.5)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    params["embed"]["E_WD"] += 1
    layers, stages = params["blocks"], 2.0 ** (1 + np.arange(3 * M).reshape(3, M, 1))
    for part, leaf, value_D in zip(("value", "value_cross", "mlp"), ("bo_D", "bo_D", "b2_D"), stages, strict=True):
        layers[part][leaf] += value_D
    call = dict(mask=None, memory=attentions.Memory(cases.normal(0, B, 3, D), None))
    key_B = jax.random.split(jax.random.key(1), B)
    call = attentions.Call(key_B=key_B, **call)
    x_BND, _ = jax.jit(lambda params: transformer.hidden(params, cases.draw_token_ids(), model.spec, call))(params)
    digits = np.int64(x_BND)[..., None] >> np.arange(1, 3 * M + 2) & 1
    assert (x_BND == digits @ 2 ** np.arange(1, 3 * M + 2)).all()
    digits_of_stages = digits.reshape(B * N * D, 3 * M + 1)
    five_deviations = 2.5 / len(digits_of_stages) ** 0.5
    for first, second in itertools.combinations(digits_of_stages.T, 2):
        assert abs((first == second).mean() - 0.5) < five_deviations


# Documents packed into one window: each has the logits and the gradients that it has alone in a window.

START, LENGTHS, WINDOW = 0, (7, 11, 1, 13), 32  # a document's first token; the lengths of the documents in a window
BLOCKS = averages.in_blocks(8, 16)
PACKED = [  # a position code, a relative position, and an implementation
    (position.learned, relative_position.relative, BLOCKS),
    (position.sinusoidal, relative_position.rotary, flash.attention),
    (position.learned_concatenated, relative_position.buckets, explicit.attention),
]


@pytest.mark.parametrize(("code", "relation", "attend"), PACKED)
def test_packed_documents_equal_single_ones(code, relation, attend):
    """The gradient of a sum over documents is the sum of their gradients."""
    model = cases.model(position=code, relative_position=relation, sizes={"N": WINDOW, "K": 6, "M": 2, "H": 2})
    params, is_token_BN = cases.draw_params(model.init), np.arange(WINDOW) < np.array(LENGTHS)[:, None]
    w_N = np.random.default_rng(0).integers(1, W, WINDOW)
    w_N[np.cumsum((0, *LENGTHS[:-1]))] = START
    w_BN = np.zeros(is_token_BN.shape, int)  # each document, and padding, which a causal model does not see
    w_BN[is_token_BN] = w_N
    fetch, _ = windows.causal(np.append(w_N, START), N=WINDOW, document_start=START)
    numbers = fetch(np.array([0]), None)
    assert np.bincount(numbers["document_BN"][0])[1:].tolist() == list(LENGTHS)
    attention = model.spec.block.attention._replace(attend=attend)
    packed_spec = model.spec._replace(block=model.spec.block._replace(attention=attention))

    def packed(params: dict) -> jax.Array:
        mask = masks.both(masks.causal, masks.documents(numbers["document_BN"]))
        return cases.apply_model(params, w_N[None], spec=packed_spec, mask=mask, code_n=numbers["n_BN"])[0][0]

    def single(params: dict) -> jax.Array:
        return cases.apply_model(params, w_BN, spec=model.spec, mask=masks.causal)[0][is_token_BN]

    @jax.jit
    def with_gradients(params: dict) -> list:
        losses = [lambda params, f=f: (jnp.sum(jnp.sin(logits_NW := f(params))), logits_NW) for f in (packed, single)]
        return [jax.grad(loss, has_aux=True)(params) for loss in losses]

    cases.assert_trees_close(*with_gradients(params), 1e-5)
