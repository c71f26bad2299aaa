"""Look inside a model: ablate and patch its activations, read its tokens early, and score its heads.

All functions work on any model of this library. `run(edit={...}, look=(...)) -> (logits, {name: activation})` is a
model with its inputs, for example `functools.partial(model.run, inputs)` of a model from experiments.pretrained, or
`bind(apply, params, w_BN)`. Functions take `run`, or a `measure`: a function of edits that calls `run`. An edit is a
function (x, m) -> x of an activation x and its layer m; block.Order lists the names. Activations of all layers have a
leading axis of M layers.

_, activations = run(look=("hidden",))  # of the clean text
effect_MN = patch(lambda edit: other_run(edit=edit)[0][0, -1, answer], "hidden", activations["hidden"])

Here `other_run` is the run of a corrupted text, and `answer` the token id whose logit is measured.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

Run = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
Measure = Callable[[dict[str, Partial]], jax.Array]  # {name: edit} -> a number or array, from a run with these edits


def bind(apply: Callable, params: Any, inputs: Any) -> Run:
    """Return run(edit={...}, look=(...)) -> (logits, {name: activation}) for these parameters and inputs.

    apply: the second function that a constructor in tfm.models returns, such as language_model. edit: {name: (x, m) ->
    x}, for the activation x of layer m. look: the names of the activations to return.
    """

    def run(edit: dict | tuple[()] = (), look: tuple[str, ...] = ()) -> tuple[jax.Array, dict[str, jax.Array]]:
        result = apply(params, inputs, edit=edit, look=look)
        return result if look else (result, {})

    return run


def compute(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Return function(*arrays), compiled, with the arrays that the function closes over as further arguments.

    As constants of the program, parameters would be stored twice, and XLA would transpose them while it compiles.
    """
    closed = jax.make_jaxpr(function)(*arrays)
    program = jax.jit(lambda closed_over, *arrays: jax.core.eval_jaxpr(closed.jaxpr, closed_over, *arrays))
    return program(closed.consts, *arrays)[0]


def replace(x_M: jax.Array, where_M: jax.Array) -> Partial:
    """Return the edit x -> x_M[m] where where_M[m] is True, else x.

    x_M and where_M have a leading axis of layers. Their other axes follow those of the activation and may have size
    one: to choose heads of `y`, pass where_MH[:, None, :, None, None]. As a Partial, the edit is an argument of
    compiled functions: another x_M or where_M does not compile them again.
    """
    return Partial(_replace, jnp.asarray(x_M), jnp.asarray(where_M))


def _replace(x_M: jax.Array, where_M: jax.Array, x: jax.Array, m: jax.Array) -> jax.Array:
    return jnp.where(where_M[m], x_M[m], x)


def zero(where_M: jax.Array) -> Partial:
    """Return the edit x -> 0 where where_M[m] is True, else x (zero ablation)."""
    return replace(jnp.zeros(len(where_M)), where_M)


def mean(x_M: jax.Array, where_M: jax.Array) -> Partial:
    """Return the edit x -> mean where where_M[m] is True, else x (mean ablation).

    The mean of x_M is over sequences b and tokens n, also padding: x_M is (M, B, N, D), or (M, B, H, N, V) with a mean
    of each head. Do not use it for the weights `A`, whose mean over queries would see later tokens.
    """
    return replace(jnp.mean(x_M, axis=(1, -2), keepdims=True), where_M)


def patch(measure: Measure, name: str, x_M: jax.Array, *, batch: int = 64) -> jax.Array:
    """Return value_MI: `measure` with the activation `name`, at layer m and index i only, replaced by that of x_M.

    The index i is axis 2 of x_M: it counts tokens of `hidden`, `attention` and `mlp` (M, B, N, D), and heads of `y`,
    `q`, `k`, `v` and `A` (M, B, H, N, ...). If `measure` runs the model on a corrupted text, and x_M is of the clean
    one, this is activation patching (Vig et al. 2020; Meng et al. 2022). If x_M is the mean of `y` over texts and
    tokens, this is the mean ablation of each head. Axes of x_M other than those of layers and of the index may have
    size one, and then broadcast. All values are computed by one program, compiled at each call, for `batch` pairs m, i
    at a time. measure: a function of {name: edit}, which returns a number, or an array whose axes follow M and I.
    """
    M, size = x_M.shape[0], x_M.shape[2]

    def measure_all(x_M: jax.Array, place_P2: jax.Array) -> jax.Array:
        def measure_place(place: jax.Array) -> jax.Array:
            where_MI = (jnp.arange(M) == place[0])[:, None] & (jnp.arange(size) == place[1])
            where_M = where_MI.reshape(M, 1, size, *[1] * (x_M.ndim - 3))
            return measure({name: replace(x_M, where_M)})

        value_P = jax.lax.map(measure_place, place_P2, batch_size=min(batch, len(place_P2)))
        return value_P.reshape(M, size, *value_P.shape[1:])

    return compute(measure_all, x_M, np.indices((M, size)).reshape(2, -1).T)


def attribute(measure: Measure, name: str, x_M: jax.Array, other_M: jax.Array) -> jax.Array:
    """Return what `patch` adds to `measure`, to first order, at each place: sum_d (x_M - other_M)_d dmeasure/dx_d.

    other_M: the activations of the run that `measure` makes without edits, where the gradient is taken; x_M: those that
    would replace them. The sum is over the last axis: the result is (M, B, N) for tokens, (M, B, H, N) for heads.
    `measure` must return a number (attribution patching; Nanda 2023).
    """

    def measure_shifted(shift_M: jax.Array) -> jax.Array:
        return measure({name: Partial(_add, shift_M)})

    gradient_M = compute(jax.grad(measure_shifted), jnp.zeros_like(other_M))
    return jnp.sum((x_M - other_M) * gradient_M, axis=-1)


def _add(shift_M: jax.Array, x: jax.Array, m: jax.Array) -> jax.Array:
    return x + shift_M[m]


def logit_lens(run: Run, x_MBND: jax.Array) -> jax.Array:
    """Return the logits (M, ...) of the tokens after each layer, as if this layer were the last (nostalgebraist 2020).

    x_MBND: the activation `hidden`, or other tokens of its shape. They replace the tokens after the last layer, so the
    model's own last norm and head read them. Each layer costs a call of `run` (see `bind`).
    """

    def read(x_BND: jax.Array) -> jax.Array:
        return run(edit={"hidden": Partial(_replace_layer, len(x_MBND) - 1, x_BND)})[0]

    return compute(lambda x_MBND: jax.lax.map(read, x_MBND), x_MBND)


def jacobian_lens(run: Run, x_MBND: jax.Array) -> jax.Array:
    """Return the logits (M, ...) of J_m x^(m): the first-order effect of layer m's tokens on the last layer's tokens.

    J_m is the derivative of the tokens after the last layer with respect to the tokens after layer m. x_MBND must be
    the activation `hidden` of `run` without edits. Gurnee et al. (2026) average J_m over a corpus.
    """

    def transport(m_and_x: tuple[jax.Array, jax.Array]) -> jax.Array:
        m, x_BND = m_and_x

        def finish(x_BND: jax.Array) -> jax.Array:
            return run(edit={"hidden": Partial(_replace_layer, m, x_BND)}, look=("hidden",))[1]["hidden"][-1]

        y_BND, pull_back = jax.vjp(finish, x_BND)  # products of this library have no rule for jax.jvp (platform.py),
        _, push = jax.vjp(lambda u_BND: pull_back(u_BND)[0], jnp.zeros_like(y_BND))  # but u -> u J is linear in u
        return push(x_BND)[0]

    return logit_lens(run, compute(lambda *pairs: jax.lax.map(transport, pairs), jnp.arange(len(x_MBND)), x_MBND))


def _replace_layer(layer: jax.Array, new: jax.Array, x: jax.Array, m: jax.Array) -> jax.Array:
    return jnp.where(m == layer, new, x)


def draw_repeated(key: jax.Array, *, W: int, B: int, period: int, first: int = 0) -> jax.Array:
    """Return w_BN: `period` random token ids from first ... W - 1, and the same ids again (N = 2 period)."""
    w_BT = jax.random.randint(key, (B, period), first, W)
    return jnp.concatenate([w_BT, w_BT], axis=1)


def head_scores(A_MBHNN: jax.Array, *, period: int) -> dict[str, jax.Array]:
    """Return {name: score (M, H)} of the weights on texts that repeat with this period (Olsson et al. 2022).

    Each of the scores previous, duplicate and induction is the mean weight that query n gives to one key s, over all
    texts and all n for which s is defined. It is 1 if the head always attends to this key only.

    * previous: s = n - 1, the token before
    * duplicate: s = n - period, the same token, one period earlier
    * induction: s = n - period + 1 for n >= period, the token after the duplicate
    * entropy: -sum_s A_ns ln A_ns, in nats, the mean over all queries
    """
    firsts = {"previous": (1, 1), "duplicate": (period, period), "induction": (period, period - 1)}  # n, n - s
    A_MBHNN = A_MBHNN.astype(jnp.float32)
    scores = {
        name: jnp.diagonal(A_MBHNN[..., n:, :], offset=n - shift, axis1=-2, axis2=-1).mean((1, -1))
        for name, (n, shift) in firsts.items()
    }
    entropy_MBHN = -jnp.sum(jax.scipy.special.xlogy(A_MBHNN, A_MBHNN), axis=-1)
    return scores | {"entropy": entropy_MBHN.mean((1, -1))}
