"""A user's score, value, norm, position, relative position or MLP: a plain tuple is enough, and mistakes are refused
before anything is computed."""

import collections
import functools
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from errors import raises

from experiments.config import by_name, errors, files as config_files
from experiments.model import build, variants
from tfm import head as heads, initial, mlp, models, norm, position, shapes
from tfm.attention import mask as masks, relative_position, score, value

D, H, K = 12, 2, 6


def settings(**changes):
    return tiny.settings("language", **({"model__D": D, "model__H": H, "model__K": K} | changes)).model


def build_model(m, *, cross=False) -> models.Model:
    if cross:
        return build.encoder_decoder(m, W=7, N=8, tied_output=True)
    return build.language_model(m, head=heads.next_word, W=7, N=8)


def refusal(*, cross=False, **changes) -> str:
    with pytest.raises(errors.UserError) as caught:
        build_model(settings(**changes), cross=cross)
    return str(caught.value)


# Rotary positions


def gaussian_init(key, *, H, K, D, bias):
    return score.tied.init(key, H=H, K=K, D=D, bias=False)


def gaussian(params, x_BND, x_BSD):
    """Return queries and keys whose product is -|U x_n - U x_s|^2 / 2. The squared norms must not be rotated."""
    q, k = score.tied.apply(params, x_BND, x_BSD)
    a, b = (-(u * u).sum(-1, keepdims=True) / 2 for u in (q, k))
    return jnp.concatenate([q, a, 1 + 0 * a], -1), jnp.concatenate([k, 1 + 0 * b, b], -1)


pair = gaussian_init, gaussian
rotatable = score.Score(gaussian_init, score.tied.apply, supports_rope=True)
odd = score.Score(lambda key, *, H, K, D, bias: {}, lambda params, x, y: (x[:, None, :, 1:],) * 2, supports_rope=True)


def test_rotary_positions_need_a_score_with_supports_rope():
    message = refusal(model__score="test_variants:pair", model__relative_position="rotary")
    assert "model.relative_position = rotary" in message and "model.score = test_variants:pair" in message
    assert "supports_rope=True" in message
    assert build.make_block_spec(settings(model__score="test_variants:pair")).attention.score.apply is gaussian
    for relation_name in variants.ROTARY:
        m = settings(model__score="test_variants:rotatable", model__relative_position=relation_name)
        assert build.make_block_spec(m).attention.score is rotatable
    assert "11 features" in refusal(model__score="test_variants:odd", model__relative_position="rotary")


def test_all_scores_of_the_project_support_rope_except_constant_and_l2_tied():
    assert {name for name, one in by_name.candidates(score).items() if not one.supports_rope} == {"constant", "l2_tied"}


# A plain tuple is enough

mlp_pair = (mlp.relu.init, mlp.relu.apply)
norm_pair = (norm.rms.init, norm.rms.apply)
norm_three = tuple(norm.batch)
position_pair = tuple(position.learned)
value_three, relation_three = tuple(value.low_rank), tuple(relative_position.relative)
named_pair = collections.namedtuple("Mine", "first second")(*score.tied[:2])
object_pair = types.SimpleNamespace(init=score.tied.init, apply=score.tied.apply)
score_three = (score.tied.init, score.tied.apply, score.tied.factors)


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("score", "pair"),
        ("score", "score_three"),
        ("score", "named_pair"),
        ("score", "object_pair"),
        ("value", "value_three"),
        ("norm", "norm_pair"),
        ("norm", "norm_three"),
        ("position", "position_pair"),
        ("mlp", "mlp_pair"),
        ("relative_position", "relation_three"),
    ],
)
def test_a_plain_tuple_becomes_a_variant_of_its_stage(stage, name):
    m, plain = settings(**{f"model__{stage}": f"test_variants:{name}"}), globals()[name]
    variant = by_name.choose(stage, getattr(m, stage), by_name.candidates(variants.MODULES[stage]))
    assert type(variant) is type(next(iter(by_name.candidates(variants.MODULES[stage]).values())))
    plain = (plain.init, plain.apply) if stage == "score" and not isinstance(plain, tuple) else plain
    assert tuple(variant[: len(plain)]) == plain


def test_a_norm_of_the_users_with_running_averages_is_a_batch_norm():
    values = tiny.settings("language", model__norm="test_variants:norm_three", train__accumulation=2)
    with raises(errors.UserError, "text.head = linear+gelu", "model.norm = test_variants:norm_three"):
        build.language_model(values.model, head=heads.masked_word, W=7, N=8, output="linear+gelu")
    with raises(errors.UserError, "train.accumulation = 2"):
        tiny.task_of(values)


def test_a_tuple_with_too_few_parts_is_refused():
    words = refusal(model__value="test_variants:mlp_pair")
    assert "must be a tuple (init, " in words and "an object" in words


# Variants that do not fit


def change_queries_and_keys(move, init=score.tied.init):
    return score.Score(init, lambda params, x, y: move(*score.tied.apply(params, x, y)))


swapped_queries = change_queries_and_keys(lambda q, k: (q.swapaxes(1, 2), k))
swapped_keys = change_queries_and_keys(lambda q, k: (q, k.swapaxes(2, 3)))
one_head = change_queries_and_keys(lambda q, k: (q[:, :1], k[:, :1]))
narrow = change_queries_and_keys(lambda q, k: (q, k[..., 1:]))
single = change_queries_and_keys(lambda q, k: q)
number_as_keys = change_queries_and_keys(lambda q, k: (q, 3))
compared_with_itself = score.Score(score.tied.init, lambda params, x, y: score.tied.apply(params, x, x))
swapped_letters = score.Score(lambda key, *, H, K, D, bias: {"U_HKD": jnp.zeros((K, H, D))}, score.tied.apply)
missing_letters = score.Score(lambda key, *, H, K, D, bias: {"U": jnp.zeros((H, K, D))}, score.tied.apply)
empty = score.Score(lambda key, **_: {}, lambda params, x_BND, x_BSD: (x_BND[:, None, :, :0], x_BSD[:, None, :, :0]))


def raise_error(params, x_BND, x_BSD):
    raise RuntimeError("I know nothing\nof such tokens")


def apply_numpy(params, x_BND, x_BSD):
    return score.tied.apply(params, np.sqrt(x_BND), x_BSD)


narrower = (lambda key, *, D: {}, score.tied.apply)
raising, numpyish = (score.tied.init, raise_error), (score.tied.init, apply_numpy)
value_swapped = value.low_rank._replace(apply=lambda params, x: value.low_rank.apply(params, x).swapaxes(1, 2))
value_without_output = value.low_rank._replace(out_proj=lambda params, y, *, layout: y)
norm_flat = (norm.rms.init, lambda params, x, *, eps: x.mean(-1))
mlp_wide = (mlp.relu.init, lambda params, x: jnp.concatenate([x, x], -1))
position_long = (position.none.init, lambda params, x, n=None: jnp.concatenate([x, x], 1))
narrow_rotation = relative_position.relative._replace(rotate=lambda params, q, k, n: (q[..., :2], k))
swapped_bias = relative_position.relative._replace(bias=lambda params, n, s, *, H: jnp.zeros((len(n), H, len(s))))
HERE = str(pathlib.Path(__file__))


@pytest.mark.parametrize(
    ("stage", "name", "part"),
    [
        ("score", "swapped_queries", "its queries have the shape (2, 3, 2, 6)"),
        ("score", "swapped_keys", "(2, 2, 6, 3)"),
        ("score", "narrow", ""),
        ("score", "single", ""),
        ("score", "number_as_keys", ""),
        ("score", "swapped_letters", "H"),
        ("score", "missing_letters", "U"),
        ("score", "empty", "0 features"),
        ("score", "narrower", "unexpected keyword argument 'H'"),
        ("score", "raising", f"{HERE}, line {raise_error.__code__.co_firstlineno + 1}: RuntimeError: I know nothing"),
        ("score", "numpyish", f"{HERE}, line {apply_numpy.__code__.co_firstlineno + 1}: TracerArrayConversionError: "),
        ("value", "value_swapped", ""),
        ("value", "value_without_output", ""),
        ("norm", "norm_flat", ""),
        ("mlp", "mlp_wide", ""),
        ("position", "position_long", "(2, 6, 12), not (2, 3, 12)"),
        ("relative_position", "narrow_rotation", ""),
        ("relative_position", "swapped_bias", ""),
    ],
)
def test_a_variant_that_does_not_fit_is_refused_in_one_sentence(stage, name, part):
    words = refusal(**{f"model__{stage}": f"test_variants:{name}"})
    assert words.startswith(f"model.{stage} = test_variants:{name}: ") and part in words and "\n" not in words


@pytest.mark.parametrize(("name", "cross"), [("one_head", False), ("compared_with_itself", False), ("rotatable", True)])
def test_a_score_may_have_one_head_or_compare_queries_with_themselves_in_self_attention(name, cross):
    assert build_model(settings(model__score=f"test_variants:{name}"), cross=cross)


def test_variants_of_the_project_are_not_checked(monkeypatch):
    monkeypatch.setattr(shapes, "check", None)
    build_model(settings())


L = 20  # features of the latent vector, which every head reads as keys and values (multi-head latent attention)


def latent_init(key, *, H, K, D, bias):
    return initial.normal(key, "U_LD", D**-0.5, L=L, D=D) | initial.normal(key, "Uq_HLD", D**-0.5, H=H, L=L, D=D)


latent_score = (
    latent_init,
    lambda params, x, y: (
        jnp.einsum("hld,bnd->bhnl", params["Uq_HLD"], x),
        jnp.einsum("ld,bsd->bsl", params["U_LD"], y)[:, None],
    ),
)
latent_value = value.Value(
    lambda key, *, H, K, D, M, bias: initial.normal(key, "Uo_HDL", L**-0.5, H=H, D=D, L=L),
    lambda params, k: k,
    lambda params, y: jnp.einsum("hdl,bhnl->bnd", params["Uo_HDL"], y),
    from_keys=True,
)


def test_values_of_the_user_take_keys_of_any_width_also_with_a_cache():
    m = settings(model__score="test_variants:latent_score", model__value="test_variants:latent_value")
    model, w_BN, causal = build_model(m), jnp.arange(8).reshape(2, 4) % 7, masks.causal
    params = jax.jit(model.init)(jax.random.key(0))
    expected = jax.jit(lambda params: model.apply(params, w_BN, mask=causal)[0])(params)
    length_B = jnp.full(2, 3)
    _, cache = model.start(params, w_BN[:, :3], length_B, capacity=4, mask=causal)
    logits_BW, _ = model.step(model.by_layer(params), cache, w_BN[:, 3], length_B, mask=causal)
    np.testing.assert_allclose(logits_BW, expected[:, 3], atol=1e-5)
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(cache) if leaf.ndim == 4} == {L}
    assert "model.K = 6" in refusal(model__score="test_variants:latent_score", model__value="keys")


# Folders in which variants are searched


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Return (working directory, folder with a config next to it)."""
    working, config_folder = tmp_path / "here", tmp_path / "beside"
    for folder in (working, config_folder):
        folder.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    yield working, config_folder
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


OWN = "from tfm.attention import score\n\nmine = score.tied._replace(init={!r})\n"
find = functools.partial(by_name.choose, "score", allowed=by_name.candidates(score))


def test_a_variant_is_imported_from_the_working_directory_or_else_the_folder_of_the_config(folders, capsys):
    (folders[1] / "own_beside.py").write_text(OWN.format("beside"))
    for folder in folders:
        (folder / "own_twice.py").write_text(OWN.format(folder.name))
    config_files.load(tiny.config_file(folders[1], "vision"))
    assert find("own_beside:mine").init == "beside" and capsys.readouterr().out == ""
    assert find("own_twice:mine").init == "here"


def test_the_folder_of_a_json_config_is_not_searched(folders):
    _, foreign = folders
    (foreign / "own_foreign.py").write_text("raise SystemExit('run')")
    (foreign / "config.json").write_text('{"experiment": "vision", "model": {"score": "own_foreign:mine"}}')
    outcome = tiny.run("--config", str(foreign / "config.json"), "--config.model.score=own_foreign:mine", "--dry_run")
    assert outcome.code == 2 and "there is no own_foreign.py in" in outcome.err


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("import nothing_at_all\n", "own_faulty.py, line 1: ModuleNotFoundError: No module named 'nothing_at_all'"),
        ("x = 1\ny = x.z\n", "own_faulty.py, line 2: AttributeError: 'int' object has no attribute 'z'"),
        ("def f(:\n", "SyntaxError: "),
        ("raise RuntimeError('no')\n", "own_faulty.py, line 1: RuntimeError: no"),
        ("def f():\n    raise RuntimeError('no')\nf()\n", "own_faulty.py, line 2: RuntimeError: no"),
        ("mine = 1\n", "must be a tuple (init, apply)"),
        ("mine = (len,) * 99\n", "must be a tuple (init, apply)"),
        ("yours = 1\n", "own_faulty.py has no mine"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_its_line(folders, content, part):
    working, _ = folders
    (working / "own_faulty.py").write_text(content)
    with raises(errors.UserError, part) as caught:
        find("own_faulty:mine")
    assert "\n" not in str(caught.value)


mixed_score = (
    lambda key, *, H, K, D, bias: {"U_HKD": jnp.ones((H, K, D)), "A_HKD": jnp.ones((H, K, D))},
    score.tied.apply,
)


@pytest.mark.parametrize(
    ("setting", "stage", "variant", "leaf"),
    [
        ("score_std", "score", "test_variants:unscaled_score", "A_HKD"),
        ("score_std", "score", "test_variants:mixed_score", "A_HKD"),
        ("score_std", "score", "constant", "matrix"),
        ("output_std", "mlp", "test_variants:own_mlp", "A_DD"),
    ],
)
def test_a_scale_that_misses_matrices_of_a_variant_is_refused(setting, stage, variant, leaf):
    def init(**changes):
        m = settings(**{f"model__{stage}": variant} | changes)
        return jax.eval_shape(build_model(m).init, jax.random.key(0))

    init()
    with raises(errors.UserError, f"model.{setting}", variant, leaf):
        init(**{f"model__{setting}": 2.0})


unscaled_score = (
    lambda key, *, H, K, D, bias: {"A_HKD": jnp.ones((H, K, D))},
    lambda params, x, y: score.tied.apply({"U_HKD": params["A_HKD"]}, x, y),
)
own_mlp = lambda key, *, D, F, M, bias: {"A_DD": jnp.eye(D)}, lambda params, x_BND: x_BND @ params["A_DD"].T


def test_a_scale_reaches_matrices_of_a_users_score_that_begin_with_u():
    networks = [build_model(settings(model__score="test_variants:pair", model__score_std=std)) for std in (2.0, 1.0)]
    draw = jax.jit(lambda key: [one.init(key)["blocks"]["score"]["U_HKD"] for one in networks])
    changed, default = draw(jax.random.key(0))
    np.testing.assert_allclose(changed, 2 * default)


def test_a_number_after_the_norm_none_is_refused_if_nothing_uses_it():
    for name in ("none:3", "none:1e-6", "none:0"):
        assert f"model.norm = {name}" in refusal(model__norm=name)
    build_model(settings(model__norm="none:1e-6", model__score="asymmetric_qknorm"))


def test_a_window_as_long_as_the_context_is_accepted_without_learned_positions():
    """Longer texts need this window. tests/engine/test_bad_input.py has windows that are refused."""
    build_model(settings(model__window=8, model__position="none"))
