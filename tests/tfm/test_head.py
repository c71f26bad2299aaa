"""Heads (E24, E25, E27) against the slow reference."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import translate
from cases import B, C, D, N, W

from tfm import head


@cases.float64()
def test_next_word_equals_the_reference():
    params, x_BND = cases.drawn(lambda key: head.next_word.init(key, W=W, D=D)), cases.normal(1, B, N, D)
    log_p = translate.log_probabilities(head.next_word.apply(params, x_BND))
    for b in range(B):
        slow = reference.next_word(translate.columns(x_BND[b]), np.asarray(params["G_WD"]))
        cases.close(log_p[b], np.log(slow))


@cases.float64()
def test_masked_word_equals_the_reference():
    params, x_BND = cases.drawn(lambda key: head.masked_word.init(key, W=W, D=D)), cases.normal(1, B, N, D)
    log_p = translate.log_probabilities(head.masked_word.apply(params, x_BND))
    for b in range(B):
        slow = reference.masked_word(translate.columns(x_BND[b]), np.asarray(params["G_WD"]), hidden=[1, 4, 6])
        for n in slow:
            cases.close(log_p[b, n], np.log(slow[n]))


@pytest.mark.parametrize("name", ["pooled", "class_token"])
@cases.float64()
def test_classification_equals_the_reference(name):
    variant = getattr(head, name)
    params, x_BND = cases.drawn(lambda key: variant.init(key, C=C, D=D)), cases.normal(1, B, N, D)
    log_p = translate.log_probabilities(variant.apply(params, x_BND))
    slow = {"pooled": reference.pooled_class, "class_token": reference.class_token_class}[name]
    for b in range(B):
        p = slow(translate.columns(x_BND[b]), np.asarray(params["G_CD"]), np.asarray(params["b_C"]))
        cases.close(log_p[b], np.log(p))


@pytest.mark.parametrize("name", ["next_word", "masked_word", "pooled", "class_token"])
def test_logits_are_float32(name):
    variant, sizes = getattr(head, name), {"W": W} if "word" in name else {"C": C}
    params = cases.drawn(lambda key: variant.init(key, D=D, **sizes))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x_BND = cases.normal(1, B, N, D).astype(jnp.bfloat16)
    narrow = variant.apply(params, x_BND)
    assert narrow.dtype == jnp.float32
    with cases.float64():
        wide = variant.apply(*cases.wide((params, x_BND)))
    assert wide.dtype == np.float64
    cases.close(narrow, wide, 2e-2)
