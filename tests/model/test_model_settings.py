"""Settings that contradict each other are refused in one sentence before anything is trained or written."""

import contextlib
import io

import pytest
import tiny
from errors import raises

from experiments.engine import by_name, errors, mesh as meshes, run as runs
from experiments.model import model as models, sharding
from tfm import head as heads, layout as layouts
from tfm.attention import flash, mask as masks, score, splash

MODELS = [  # (settings of the section `model`, another part of the message)
    (dict(window=-1), "0"),
    (dict(cap=-1.0), "0"),
    (dict(output_cap=-1.0), "0"),
    (dict(dropout=1.0), "1"),
    (dict(dropout=-0.1), "0"),
    (dict(value="keys", score="tied_wide"), "model.K = 4"),
    (dict(relative_position="rotary", K=3), "3 features"),
    (dict(relative_position="rotary_halves", score="none", D=9, H=3), "9 features"),
    (dict(relative_position="rotary_halves:9:yarn:2"), "rotary_halves:base:yarn:factor:N:fast:slow:length"),
    (dict(relative_position="rotary:9:linear:0"), "rotary:9:linear:0"),
    (dict(relative_position="rotary:0.5"), "rotary:base"),
    (dict(relative_position="rotary:"), "rotary:base"),
    (dict(relative_position="rotary:9:linear:2:3"), "rotary:base:linear:factor"),
    (dict(relative_position="rotery:2"), '"rotary"'),
    (dict(relative_position="alibbi"), "alibi"),
    (dict(relative_position="rotary", score="constant"), "supports_rope"),
    (dict(relative_position="rotary_halves", score="l2_tied"), "supports_rope"),
    (dict(norm="rms:x"), "rms:1e-6"),
    (dict(norm="rms:-1"), "rms:1e-6"),
    (dict(norm="token:"), "rms:1e-6"),
    (dict(norm="batch:0.1:0.2"), "rms:1e-6"),
    (dict(score="identity_query", K=3), "2 x 3"),
    (dict(compute_dtype="bf16"), "bfloat16"),
    (dict(attention="flish"), "flash"),
]
TEXTS = [
    (dict(model__norm="instance"), "model.norm = instance"),
    (dict(model__segments=-1), "model.segments"),
    (dict(text__objective="prefix", text__N=1), "text.N"),
    (dict(text__objective="masked", text__head="linear+gelu", model__norm="batch"), "text.head = linear+gelu"),
    (dict(model__share=3), "model.share = 3"),
    (dict(model__share=2, model__norm="batch"), "model.share = 2"),
    (dict(model__E=3, text__head="tied"), "model.E = 3"),
    (dict(model__E=3, model__norm="batch"), "model.E = 3"),
    (dict(text__tokenizer="/nowhere/tok512.bin"), "/nowhere/tok512.bin"),
]
TRAININGS = [
    (dict(model__norm="batch_features", train__accumulation=2), "train.accumulation"),
    (dict(optim__betas=[0.9, 1.0]), "optim.betas"),
    (dict(optim__schedule="a:b"), "a:b"),
    (dict(seed=-1), "seed"),
    (dict(optim__ema=1.0), "optim.ema"),
    (dict(optim__ema=-0.5), "optim.ema"),
    (dict(optim__name="hyperball", model__output_std=0.0), "model.output_std"),
]


@pytest.mark.parametrize(("changes", "part"), MODELS)
def test_invalid_settings_of_a_model_are_refused(changes, part):
    settings = tiny.settings("vision", **{f"model__{name}": value for name, value in changes.items()})
    name, value = next(iter(changes.items()))
    with raises(errors.UserError, name, str(value).partition(":")[0], part):
        models.build_vision_model(settings.model, output="pooled", Y=4, X=4, Z=1, patch=2, C=3)


def test_rotary_accepts_an_odd_k_if_the_score_has_twice_as_many_features():
    settings = tiny.settings("vision", model__relative_position="rotary", model__score="tied_wide", model__K=3)
    model = models.build_vision_model(settings.model, output="pooled", Y=4, X=4, Z=1, patch=2, C=3)
    assert model.spec.block.attention.score is score.tied_wide


@pytest.mark.parametrize(("changes", "part"), TEXTS)
def test_invalid_settings_of_a_text_run_are_refused(changes, part, tmp_path):
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    with raises(errors.UserError, part):
        tiny.task_of(tiny.settings("language", **dict(text__source=str(tmp_path / "text.txt"), text__N=8) | changes))


@pytest.mark.parametrize(("changes", "part"), TRAININGS)
def test_invalid_settings_of_training_are_refused(changes, part, tmp_path):
    with raises(errors.UserError, part), contextlib.redirect_stdout(io.StringIO()):
        settings = tiny.settings("vision", image__patch=4, **changes)
        devices = runs.make_mesh(settings)
        runs.run(settings, tmp_path / "run", by_name.load_experiment("vision").prepare(settings, devices), devices)
    assert not (tmp_path / "run").exists()


def test_statistics_of_each_position_need_all_tokens_of_a_sequence_on_one_device():
    settings = tiny.settings("vision", model__norm="batch_features")
    with raises(errors.UserError, "model.norm = batch_features", "mesh.sequence"):
        sharding.choose_layout(settings.model, meshes.make(sequence=2, data=1), N=4)


@pytest.mark.parametrize(("name", "value"), [("norm", "instance"), ("outer_norm", "both")])
def test_an_encoder_decoder_refuses_a_norm_over_tokens_and_a_norm_before_its_blocks(name, value):
    settings = tiny.settings("vision", **{f"model__{name}": value})
    with raises(errors.UserError, f"model.{name} = {value}"):
        models.build_encoder_decoder(settings.model, W=5, N=4, tied_output=True)


def test_the_kernel_of_a_tpu_is_used_on_one_device_and_on_a_mesh_but_not_in_a_ring_or_on_any_platform():
    """The FLOPs of a step are counted on one device (run_plan.forward_flops)."""
    layout = layouts.Layout(batch=("data", "fsdp"), platform="tpu")
    settings = tiny.settings("language").model
    model = models.build_language_model(settings, head=heads.next_word, W=11, N=256, layout=layout, mask=masks.causal)

    def attend(**changes):
        return model.spec_for(layouts.ONE._replace(**changes)).block.attention.attend

    assert attend(platform="tpu") is attend(platform="tpu", batch=("data", "fsdp")) is splash.attention
    assert attend() is attend(platform="tpu", sequence="sequence") is flash.attention
