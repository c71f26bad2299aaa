"""A user's own score, value, norm, position, relation or MLP: a plain tuple is enough, and what is wrong is said before
anything is computed."""

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

from experiments.build import model as models, variants
from experiments.engine import by_name, config_file, errors
from tfm import head, mlp, norm, position, shapes
from tfm.attention import relative_position, score, value

D, H, K = 12, 2, 6


def settings(**changes):
    return tiny.settings("language", **({"model__D": D, "model__H": H, "model__K": K} | changes)).model


def build(m, *, cross=False) -> models.Model:
    if cross:
        return models.build_encoder_decoder(m, W=7, N=8, tied_output=True)
    return models.build_language_model(m, head=head.next_word, W=7, N=8)


def refused(*, cross=False, **changes) -> str:
    with pytest.raises(errors.UserError) as caught:
        build(settings(**changes), cross=cross)
    return str(caught.value)


# What may be turned


def gaussian_init(key, *, H, K, D, bias):
    return score.tied.init(key, H=H, K=K, D=D, bias=False)


def gaussian(params, x_BND, x_BSD):
    """-|U x_n - U x_s|^2 / 2 as a product, whose squares are no features that a position could turn."""
    q, k = score.tied.apply(params, x_BND, x_BSD)
    a, b = (-(u * u).sum(-1, keepdims=True) / 2 for u in (q, k))
    return jnp.concatenate([q, a, 1 + 0 * a], -1), jnp.concatenate([k, 1 + 0 * b, b], -1)


pair = gaussian_init, gaussian
declared = score.Score(gaussian_init, score.tied.apply, supports_rope=True)
odd = score.Score(lambda key, *, H, K, D, bias: {}, lambda params, x, y: (x[:, None, :, 1:],) * 2, supports_rope=True)


def test_a_score_is_turned_only_where_it_declares_that_it_can_be():
    said = refused(model__score="test_variants:pair", model__relative_position="rotary")
    assert "model.relative_position = rotary" in said and "model.score = test_variants:pair" in said
    assert "supports_rope=True" in said
    assert models.make_block_spec(settings(model__score="test_variants:pair")).attention.score.apply is gaussian
    for relation_name in variants.ROTARY:
        m = settings(model__score="test_variants:declared", model__relative_position=relation_name)
        assert models.make_block_spec(m).attention.score is declared
    assert "11 features" in refused(model__score="test_variants:odd", model__relative_position="rotary")


def test_of_our_scores_those_of_products_are_turned():
    assert {name for name, one in by_name.candidates(score).items() if not one.supports_rope} == {
        "constant",
        "l2_tied",
    }


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
    ("room", "name"),
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
def test_a_plain_tuple_is_a_variant_of_its_room(room, name):
    m, plain = settings(**{f"model__{room}": f"test_variants:{name}"}), globals()[name]
    made = by_name.choose(room, getattr(m, room), by_name.candidates(variants.MODULES[room]))
    assert type(made) is type(next(iter(by_name.candidates(variants.MODULES[room]).values())))
    plain = (plain.init, plain.apply) if room == "score" and not isinstance(plain, tuple) else plain
    assert tuple(made[: len(plain)]) == plain


def test_a_tuple_with_too_few_parts_is_refused():
    words = refused(model__value="test_variants:mlp_pair")
    assert "must be a tuple (init, " in words and "an object" in words


# What does not fit


def with_axes(move, init=score.tied.init):
    return score.Score(init, lambda params, x, y: move(*score.tied.apply(params, x, y)))


swapped = with_axes(lambda q, k: (q.swapaxes(1, 2), k))
swapped_keys = with_axes(lambda q, k: (q, k.swapaxes(2, 3)))
one_head = with_axes(lambda q, k: (q[:, :1], k[:, :1]))
narrow = with_axes(lambda q, k: (q, k[..., 1:]))
single = with_axes(lambda q, k: q)
nothing = with_axes(lambda q, k: (q, 3))
itself = score.Score(score.tied.init, lambda params, x, y: score.tied.apply(params, x, x))
named = score.Score(lambda key, *, H, K, D, bias: {"U_HKD": jnp.zeros((K, H, D))}, score.tied.apply)
unnamed = score.Score(lambda key, *, H, K, D, bias: {"U": jnp.zeros((H, K, D))}, score.tied.apply)
empty = score.Score(lambda key, **_: {}, lambda params, x_BND, x_BSD: (x_BND[:, None, :, :0], x_BSD[:, None, :, :0]))


def raises(params, x_BND, x_BSD):
    raise RuntimeError("I know nothing\nof such tokens")


def of_numpy(params, x_BND, x_BSD):
    return score.tied.apply(params, np.sqrt(x_BND), x_BSD)


narrower = (lambda key, *, D: {}, score.tied.apply)
raising, numpyish = (score.tied.init, raises), (score.tied.init, of_numpy)
value_swapped = value.low_rank._replace(apply=lambda params, x: value.low_rank.apply(params, x).swapaxes(1, 2))
value_kept = value.low_rank._replace(out_proj=lambda params, y, *, layout: y)
norm_flat = (norm.rms.init, lambda params, x, *, eps: x.mean(-1))
mlp_wide = (mlp.relu.init, lambda params, x: jnp.concatenate([x, x], -1))
position_long = (position.none.init, lambda params, x, n=None: jnp.concatenate([x, x], 1))
turned_off = relative_position.relative._replace(rotate=lambda params, q, k, n: (q[..., :2], k))
biased = relative_position.relative._replace(bias=lambda params, n, s, *, H: jnp.zeros((len(n), H, len(s))))
HERE = str(pathlib.Path(__file__))


@pytest.mark.parametrize(
    ("room", "name", "says"),
    [
        ("score", "swapped", "its queries have the shape (2, 3, 2, 6)"),
        ("score", "swapped_keys", "(2, 2, 6, 3)"),
        ("score", "narrow", ""),
        ("score", "single", ""),
        ("score", "nothing", ""),
        ("score", "named", "H"),
        ("score", "unnamed", "U"),
        ("score", "empty", "0 features"),
        ("score", "narrower", "unexpected keyword argument 'H'"),
        ("score", "raising", f"{HERE}, line {raises.__code__.co_firstlineno + 1}: RuntimeError: I know nothing"),
        ("score", "numpyish", f"{HERE}, line {of_numpy.__code__.co_firstlineno + 1}: TracerArrayConversionError: "),
        ("value", "value_swapped", ""),
        ("value", "value_kept", ""),
        ("norm", "norm_flat", ""),
        ("mlp", "mlp_wide", ""),
        ("position", "position_long", "(2, 6, 12), not (2, 3, 12)"),
        ("relative_position", "turned_off", ""),
        ("relative_position", "biased", ""),
    ],
)
def test_what_does_not_fit_is_one_sentence_that_names_it(room, name, says):
    words = refused(**{f"model__{room}": f"test_variants:{name}"})
    assert words.startswith(f"model.{room} = test_variants:{name}: ") and says in words and "\n" not in words


@pytest.mark.parametrize(("name", "cross"), [("one_head", False), ("itself", False), ("declared", True)])
def test_heads_may_share_a_map_and_in_self_attention_tokens_are_compared_with_themselves(name, cross):
    assert build(settings(model__score=f"test_variants:{name}"), cross=cross)


def test_our_own_are_not_rehearsed(monkeypatch):
    monkeypatch.setattr(shapes, "check", None)
    build(settings())


# Where it is found


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The working directory, and a folder beside it with a config."""
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    yield here, beside
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


OWN = "from tfm.attention import score\n\nmine = score.tied._replace(init={!r})\n"
find = functools.partial(by_name.choose, "score", allowed=by_name.candidates(score))


def test_a_variant_lies_beside_the_config(places, capsys):
    _, beside = places
    (beside / "own_beside.py").write_text(OWN.format("beside"))
    config_file.load(tiny.config_file(beside, "vision"), base=tiny.base.get_config)
    assert find("own_beside:mine").init == "beside" and capsys.readouterr().out == ""


def test_the_working_directory_comes_first(places):
    here, beside = places
    for folder in places:
        (folder / "own_twice.py").write_text(OWN.format(folder.name))
    config_file.load(tiny.config_file(beside, "vision"), base=tiny.base.get_config)
    assert find("own_twice:mine").init == "here"


def test_beside_a_json_nothing_is_looked_for(places):
    _, foreign = places
    (foreign / "own_foreign.py").write_text("raise SystemExit('run')")
    (foreign / "config.json").write_text('{"experiment": "vision", "model": {"score": "own_foreign:mine"}}')
    told = tiny.run("--config", str(foreign / "config.json"), "--config.model.score=own_foreign:mine", "--dry_run")
    assert told.code == 2 and "there is no own_foreign.py in" in told.err


@pytest.mark.parametrize(
    ("content", "says"),
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
def test_a_file_that_cannot_be_imported_is_told_with_its_line(places, content, says):
    here, _ = places
    (here / "own_faulty.py").write_text(content)
    with pytest.raises(errors.UserError) as caught:
        find("own_faulty:mine")
    assert says in str(caught.value) and "\n" not in str(caught.value)


mixed_score = (
    lambda key, *, H, K, D, bias: {"U_HKD": jnp.ones((H, K, D)), "A_HKD": jnp.ones((H, K, D))},
    score.tied.apply,
)


@pytest.mark.parametrize(
    ("setting", "room", "variant", "leaf"),
    [
        ("score_std", "score", "test_variants:renamed", "A_HKD"),
        ("score_std", "score", "test_variants:mixed_score", "A_HKD"),
        ("score_std", "score", "constant", "matrix"),
        ("output_std", "mlp", "test_variants:own_mlp", "A_DD"),
    ],
)
def test_a_scale_that_misses_matrices_of_a_variant_is_refused(setting, room, variant, leaf):
    def init(**changes):
        m = settings(**{f"model__{room}": variant} | changes)
        network = models.build_language_model(m, head=head.next_word, W=7, N=8)
        return jax.eval_shape(network.init, jax.random.key(0))

    init()
    with pytest.raises(errors.UserError) as caught:
        init(**{f"model__{setting}": 2.0})
    assert f"model.{setting}" in str(caught.value) and variant in str(caught.value) and leaf in str(caught.value)


renamed = (
    lambda key, *, H, K, D, bias: {"A_HKD": jnp.ones((H, K, D))},
    lambda params, x, y: score.tied.apply({"U_HKD": params["A_HKD"]}, x, y),
)
own_mlp = lambda key, *, D, F, M, bias: {"A_DD": jnp.eye(D)}, lambda params, x_BND: x_BND @ params["A_DD"].T


def test_a_scale_reaches_matrices_of_a_users_score_that_begin_with_u():
    m = settings(model__score="test_variants:pair", model__score_std=2.0)
    one = settings(model__score="test_variants:pair")
    a, b = (models.build_language_model(x, head=head.next_word, W=7, N=8).init(jax.random.key(0)) for x in (m, one))
    np.testing.assert_allclose(a["blocks"]["score"]["U_HKD"], 2 * b["blocks"]["score"]["U_HKD"])


def test_a_number_after_the_norm_none_is_refused_if_nothing_uses_it():
    for wrong in ("none:3", "none:1e-6", "none:0"):
        assert f"model.norm = {wrong}" in refused(model__norm=wrong)
    build(settings(model__norm="none:1e-6", model__score="asymmetric_qknorm"))


@pytest.mark.parametrize(("window", "position"), [(8, "learned"), (9, "learned"), (9, "none"), (1000, "none")])
def test_a_window_that_hides_nothing_is_refused(window, position):
    m = settings(model__window=window, model__position=position)
    with pytest.raises(errors.UserError) as caught:
        models.build_language_model(m, head=head.next_word, W=7, N=8)
    assert f"model.window = {window}" in str(caught.value)
    m = settings(model__window=8, model__position="none")
    models.build_language_model(m, head=head.next_word, W=7, N=8)  # texts beyond the context are read with it
