"""Settings that make no sense together: one sentence, before anything runs or is written."""

import contextlib
import io

import pytest
import tiny

from experiments import model as models
from experiments.engine import by_name, errors, mesh, run
from tfm.attention import score

MODELS = {
    "model.window must be at least 0": dict(window=-1),
    "model.cap must be at least 0": dict(cap=-1.0),
    "model.output_cap must be at least 0": dict(output_cap=-1.0),
    "tied_wide.*model.K = 4 features, not 8": dict(value="keys", score="tied_wide"),
    "model.dropout must be less than 1": dict(dropout=1.0),
    "model.dropout must be at least 0": dict(dropout=-0.1),
    "model.score = asymmetric .*3 features.* pairs": dict(relative_position="rotary", K=3),
    "model.score = none .*9 features.* pairs": dict(relative_position="rotary_halves", score="none", D=9, H=3),
    "9:yarn:2 gives no angles: it must be rotary_halves:base:yarn:factor:N:fast:slow:length, in numbers": dict(
        relative_position="rotary_halves:9:yarn:2"
    ),
    "relative_position = rotary:9:linear:0 gives no angles": dict(relative_position="rotary:9:linear:0"),
    "rotary:0.5 gives no angles: it must be rotary:base, in numbers, and base at least 1": dict(
        relative_position="rotary:0.5"
    ),
    "model.norm = rms:x: behind the colon a number from 0 must stand": dict(norm="rms:x"),
    "norm = rms:-1: behind": dict(norm="rms:-1"),
    "norm = token:: behind": dict(norm="token:"),
    "norm = batch:0.1:0.2: behind": dict(norm="batch:0.1:0.2"),
    "rotary: gives no angles": dict(relative_position="rotary:"),
    "rotary:9:linear:2:3 gives no angles": dict(relative_position="rotary:9:linear:2:3"),
    r'"rotery:2" is not of the form my_file:my_variant \(did you mean "rotary"': dict(relative_position="rotery:2"),
    "model.score = constant does not": dict(relative_position="rotary", score="constant"),
    "turns .* model.score = l2_tied does not": dict(relative_position="rotary_halves", score="l2_tied"),
    "model.D = 8 must be model.H x model.K = 2 x 3": dict(score="identity_query", K=3),
    "unknown relative_position .*alibi": dict(relative_position="alibbi"),
    "unknown compute_dtype .*bfloat16": dict(compute_dtype="bf16"),
    "unknown attention .*flash": dict(attention="flish"),
}
TEXTS = {
    "model.norm = instance needs all tokens": dict(model__norm="instance"),
    "model.segments must be at least 0": dict(model__segments=-1),
    "text.N must be at least 2": dict(text__objective="prefix", text__N=1),
    "another model.norm": dict(text__objective="masked", text__head="linear+gelu", model__norm="batch"),
    "model.share = 3 needs to divide model.M": dict(model__share=3),
    "model.share = 2 needs another model.norm": dict(model__share=2, model__norm="batch"),
    "model.E = 3 needs text.head = linear": dict(model__E=3, text__head="tied"),
    "model.E = 3 needs another model.norm": dict(model__E=3, model__norm="batch"),
    "is a path, and nothing is there": dict(text__tokenizer="/nowhere/tok512.bin"),
}
TRAININGS = {
    "train.accumulation > 1": dict(model__norm="batch_features", train__accumulation=2),
    "optim.betas must be two numbers": dict(optim__betas=[0.9, 1.0]),
    'the schedule "a:b" cannot be imported: there is no a.py': dict(optim__schedule="a:b"),
    "the seed must lie between": dict(seed=-1),
    "optim.ema must be less than 1": dict(optim__ema=1.0),
    "optim.ema must be at least 0": dict(optim__ema=-0.5),
    "hyperball keeps the norms of matrices, and with model.output_std = 0 some": dict(
        optim__name="hyperball", model__output_std=0.0
    ),
}


@pytest.mark.parametrize("words", MODELS)
def test_a_model_that_cannot_be(words):
    settings = tiny.settings("vision", **{f"model__{name}": value for name, value in MODELS[words].items()})
    with pytest.raises(errors.UserError, match=words):
        models.vision(settings.model, answer="pooled", Y=4, X=4, Z=1, patch=2, C=3)


def test_twice_as_many_features_are_an_even_number():
    settings = tiny.settings("vision", model__relative_position="rotary", model__score="tied_wide", model__K=3)
    assert models.block_spec(settings.model).attention.score is score.tied_wide


@pytest.mark.parametrize("words", TEXTS)
def test_a_text_run_that_cannot_be(words, tmp_path):
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    changes = dict(text__source=str(tmp_path / "text.txt"), text__N=8) | TEXTS[words]
    with pytest.raises(errors.UserError, match=words):
        tiny.task_of(tiny.settings("language", **changes))


@pytest.mark.parametrize("words", TRAININGS)
def test_a_training_that_cannot_be(words, tmp_path):
    settings = tiny.settings("vision", image__patch=4, **TRAININGS[words])
    with pytest.raises(errors.UserError, match=words), contextlib.redirect_stdout(io.StringIO()):
        devices = run.devices(settings)
        run.run(settings, tmp_path / "run", by_name.experiment("vision").prepare(settings, devices), devices)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "of", "words"), [("norm", "batch_features", "statistics of each")])
def test_what_needs_all_tokens_of_a_sequence_on_one_device(name, of, words):
    settings = tiny.settings("vision", **{f"model__{name}": of})
    with pytest.raises(errors.UserError, match=f"model.{name} = {of} .*{words}.*mesh.sequence must be 1"):
        models.layout(settings.model, mesh.make(sequence=2, data=1), N=4)


@pytest.mark.parametrize(
    ("name", "of", "words"),
    [("norm", "instance", "needs all tokens"), ("outer_norm", "both", "needs a single sequence")],
)
def test_an_encoder_decoder_refuses_a_norm_that_looks_ahead_and_one_before_its_blocks(name, of, words):
    settings = tiny.settings("vision", **{f"model__{name}": of})
    with pytest.raises(errors.UserError, match=f"model.{name} = {of} {words}"):
        models.encoder_decoder(settings.model, W=5, N=4, tied_output=True)
