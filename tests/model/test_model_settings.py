"""Settings of models that contradict each other. tests/engine/test_bad_input.py has the table of refused settings."""

import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.devices import mesh as meshes
from experiments.model import build, checks, sharding
from tfm import embed as embeds, head as heads, layout as layouts, position, transformer
from tfm.attention import flash, mask as masks, score, splash


def test_rotary_accepts_an_odd_k_if_the_score_has_twice_as_many_features():
    settings = tiny.settings("vision", model__relative_position="rotary", model__score="tied_wide", model__K=3)
    assert build.vision_model(settings.model, output="pooled", Y=4, X=4, Z=1, patch=2, C=3)
    assert build.make_block_spec(settings.model).attention.score is score.tied_wide


def test_statistics_of_each_position_need_all_tokens_of_a_sequence_on_one_device():
    settings = tiny.settings("vision", model__norm="batch_features")
    with raises(errors.UserError, "model.norm = batch_features", "mesh.sequence"):
        sharding.choose_layout(settings, meshes.make(sequence=2, data=1), N=4)


@pytest.mark.parametrize(("name", "value"), [("norm", "instance"), ("outer_norm", "both")])
def test_an_encoder_decoder_refuses_a_norm_over_tokens_and_a_norm_before_its_blocks(name, value):
    settings = tiny.settings("vision", **{f"model__{name}": value})
    with raises(errors.UserError, f"model.{name} = {value}"):
        build.encoder_decoder(settings.model, W=5, N=4, tied_output=True)


def test_layers_are_unrolled_if_that_saves_more_time_than_it_takes_to_compile():
    def choose(steps, platform="tpu", fsdp=None, **changes):
        changes = {"model.M": 12, "model.D": 384, "model.H": 6, "model.remat": "none"} | changes
        layout = layouts.Layout(platform=platform, fsdp=fsdp, sequences=64 * steps)
        return build.choose_unrolling(tiny.settings("language", **changes).model, 196, layout)

    unrolled, line = choose(100_000)
    assert unrolled and line.startswith("12 layers, unrolled: they save about 3") and "model.remat = products" in line
    longer = "unrolled layers would save about 0 s of the training, and compile about 240 s longer"
    assert choose(1) == (False, f"12 layers in a loop: {longer}")
    for changes in ({"model.remat": "products"}, {"fsdp": "fsdp"}, {"platform": "cpu"}):
        assert choose(100_000, **changes) == (False, "12 layers in a loop")
    assert choose(1, "cpu", **{"model.M": build.UNROLLED_CPU}) == (True, f"{build.UNROLLED_CPU} layers, unrolled")


def test_the_kernel_of_a_tpu_is_used_on_one_device_and_on_a_mesh_but_not_in_a_ring_or_on_any_platform():
    """The FLOPs of a step are counted on one device (run_plan.forward_flops)."""
    layout = layouts.Layout(batch=("data", "fsdp"), platform="tpu")
    m = tiny.settings("language").model
    spec = transformer.Spec(embeds.words, position.none, build.make_block_spec(m), heads.next_word)
    sizes = checks.check_sizes(m) | {"N": 256}
    chosen = build.choose_attention(m, spec, sizes, layout=layout, mask=masks.causal, cross=False)

    def attend(**changes):
        choices = {("tpu", None): chosen.attend, None: flash.attention}
        fitted = build.fit_spec(spec, choices, lambda layout: (False, ""), layouts.ONE._replace(**changes))
        return fitted.block.attention.attend

    assert attend(platform="tpu") is attend(platform="tpu", batch=("data", "fsdp")) is splash.attention
    assert attend() is attend(platform="tpu", sequence="sequence") is flash.attention
