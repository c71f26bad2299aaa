"""Training from another model's parameters: they are there at step 0, a misfit is named, resuming needs none."""

import contextlib
import functools
import io
import json
import os
import pathlib
import shutil

import dots
import jax
import numpy as np
import published
import pytest
import tiny
from errors import raises

from configs import base, finetune
from experiments import language
from experiments.build import model as models
from experiments.data import tokenizer
from experiments.engine import config, config_file, errors, run
from experiments.pretrained import open_model, warm_start
from tfm import head, shapes

GPT2 = {"M": 2, "D": 21, "H": 3, "F": 19, "mlp": "gelu_tanh"}  # as tests/published.py


def gpt2(N: int = 13, W: int = 23, experiment: str = "language", **changes):
    """Settings and model of a run that fits GPT-2 of tests/published.py, but for the changes."""
    fields = {f"model__{name}": value for name, value in GPT2.items()} | {"text__N": N, "text__head": "tied"}
    settings = tiny.settings("language", model=False, **(fields | changes))
    model = models.build_language_model(settings.model, head=head.next_word, W=W, N=N, output="tied")
    return (settings if experiment == "language" else tiny.settings(experiment, **changes)), model


def images(Y=8, patch=4, P=16, **changes):
    """Settings and model of a run on images of Y x Y pixels, as `source`."""
    settings = tiny.settings("vision", **{"model__M": 1, "image__patch": patch} | changes)
    sizes = {"Y": Y, "X": Y, "Z": P // patch**2, "patch": patch}
    C = 3 if changes.pop("classes", None) else 10
    return settings, models.build_vision_model(settings.model, output=settings.to_dict()["image"]["head"], **sizes, C=C)


def load(settings, model, resumed=False, kept=()):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return warm_start.load(settings, model.init, resumed=resumed, files=dict(kept)), out.getvalue()


def refusal(settings, model, kept=()) -> str:
    with pytest.raises(errors.UserError) as error:
        load(settings, model, kept=kept)
    return str(error.value)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a run on digits."""
    return published.run(tmp_path_factory.mktemp("source") / "run", "vision", **{"image.patch": 4, "model.M": 1})


def test_a_run_starts_from_another_ones_parameters_and_resumes_without_them(tmp_path):
    theirs = published.run(tmp_path / "theirs", "dots", model=False)
    there = open_model.open(str(theirs)).params
    changes = [f"--config.init_from={theirs}", "--config.seed=3", "--config.train.steps=1"]
    changes += ["--config.optim.learning_rate=0.0", "--config.optim.warmup_steps=0"]
    outcome = dots.launched(tmp_path, *changes)  # a step of learning rate 0
    assert f"starting from {theirs}: {tiny.C * tiny.D + tiny.C} of its parameters\n" in outcome.out
    assert outcome.code == 0
    ours = open_model.open(str(tmp_path / "run")).params
    np.testing.assert_array_equal(ours["G_CD"], there["G_CD"])
    shutil.rmtree(theirs)
    (tmp_path / "run" / "summary.json").unlink()
    outcome = dots.launched(tmp_path, *changes)
    assert outcome.code == 0 and "resuming" in outcome.out and (tmp_path / "run" / "summary.json").exists()
    np.testing.assert_array_equal(open_model.open(str(tmp_path / "run")).params["G_CD"], there["G_CD"])


def test_a_published_model_is_the_start_and_its_table_is_shown(tmp_path):
    folder = published.save(tmp_path, "gpt2")
    for path in (folder, folder / "model.safetensors"):
        settings, model = gpt2(init_from=str(path))
        found, out = load(settings, model)
        assert "wte.weight" in out and "starting from" in out
    expected = shapes.flat(jax.eval_shape(model.init, jax.random.key(0)))
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in expected.items()}
    np.testing.assert_array_equal(found["embed/E_WD"], published.tensors("gpt2", prefix="")["wte.weight"])
    assert load(settings, model, resumed=True) == ({}, "")
    other, asked = open_model.open(folder), (("language", ()), ("text_classification", ()), ("language", ("head",)))
    assert [warm_start.list_required(kind, other, new).get("text.head") for kind, new in asked] == ["tied", None, None]


def test_another_architecture_is_refused_with_the_fields_to_change(tmp_path, source):
    folder = published.save(tmp_path, "gpt2")
    wrong = {"model__D": 24, "model__norm": "rms", "text__head": "linear", "model__dropout": 0.5}
    told = refusal(*gpt2(init_from=str(folder), **wrong))
    assert not any(words in told for words in ("init_fresh", "model.H", "dropout"))
    for words in ("model.D = 21 (it is 24)", "model.norm = 'token' (it is 'rms')", "text.head = 'tied' (it is "):
        assert words in told
    assert "model.K = 7 (it is 8)" in told and "norm1/shift_D (2, 21) is left over" in told
    told = refusal(*gpt2(init_from=str(folder), W=256))
    assert "embed/E_WD has shape (23, 21) and not (256, 21)" in told
    assert "absent" in refusal(*gpt2(init_from=str(tmp_path / "absent")))
    settings, _ = images(init_from=str(source))
    three = models.build_vision_model(settings.model, output="pooled", Y=8, X=8, Z=1, patch=4, C=3)
    told = refusal(settings, three)
    assert "head/G_CD has shape (10, 8) and not (3, 8)" in told and "init_fresh = head" in told
    settings, _ = images(init_from=str(source), init_fresh="head")
    found, out = load(settings, three)
    assert "parameters, new: head\n" in out and "embed/W_DP" in found and "head/G_CD" not in found


@pytest.mark.parametrize(("N", "rule"), [(5, "cut"), (17, "linear")])
def test_positions_are_resized_and_it_is_said(tmp_path, N, rule):
    found, out = load(*gpt2(N, init_from=str(published.save(tmp_path, "gpt2"))))
    assert f"the 13 learned positions are resized to {N} by the rule {rule}" in out
    theirs = published.tensors("gpt2", prefix="")["wpe.weight"]
    np.testing.assert_allclose(found["position/P_ND"][[0, -1]], theirs[[0, 4 if rule == "cut" else -1]], rtol=1e-6)
    assert found["position/P_ND"].shape == (N, 21)


def test_the_parts_to_make_anew_are_those_of_the_model(tmp_path):
    assert "no meaning without init_from" in refusal(*gpt2(init_fresh="head"))
    told = refusal(*gpt2(init_from=str(published.save(tmp_path, "gpt2")), init_fresh="embed, positoin"))
    assert 'init_fresh: "positoin" (did you mean "position"?)' in told and "blocks, embed, norm, position" in told
    found, _ = load(*gpt2(5, init_from=str(tmp_path), init_fresh="blocks/mlp,position"))
    assert "blocks/score/Uq_HKD" in found and not any("mlp" in path or "position" in path for path in found)


@pytest.mark.parametrize("dropped", ["rotary:50", "learned"])
def test_positions_are_dropped_on_the_way_and_the_context_may_grow(tmp_path, dropped):
    """DroPE: a second run starts from the first without its positions."""
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    part = "position" if dropped == "learned" else "relative_position"
    theirs = {"text.source": str(tmp_path / "text.txt"), "text.N": 8, "model.position": "none"}
    theirs |= {f"model.{part}": dropped}
    folder = published.run(tmp_path / "run", "language", **theirs)
    ours = {"text__N": 16, "init_from": str(folder), "model__position": "none", "model__relative_position": "none"}
    settings = tiny.settings("language", **ours)
    model = models.build_language_model(settings.model, head=head.next_word, W=256, N=16)
    assert f"model.{part} = '{dropped}' (it is 'none')" in refusal(settings, model)
    found, out = load(tiny.settings("language", **ours, init_fresh=part), model)
    assert f"unused: {part}\n" in out
    there = shapes.flat(open_model.open(str(folder)).params)
    assert there.keys() - found.keys() == {path for path in there if "position" in path}
    assert found.keys() <= there.keys()
    for path in found:
        np.testing.assert_array_equal(found[path], there[path])


def test_positions_of_patches_are_resized_only_where_all_else_fits(source):
    start = {"init_from": str(source)}
    found, _ = load(*images(Y=16, **start))
    assert found["position/P_ND"].shape == (16, 8)
    found, out = load(*images(init_fresh="position", **start))
    assert "new: position" in out and not any("position" in path for path in found)
    other = "images of [8, 8, 1] pixels"
    assert "set image.patch = 4 (it is 2)" in refusal(*images(patch=2, P=4, **start))
    for changes in ({"Y": 16, "P": 48}, {"image__head": "class_token"}, {"patch": 2}):
        assert other in refusal(*images(**changes, **start))


def test_a_run_on_hidden_patches_is_the_start_of_one_on_classes(tmp_path):
    changes = {"image.patch": 4, "model.M": 1}
    folder = published.run(tmp_path / "run", "masked_image", **changes)
    told = refusal(*images(init_from=str(folder), init_fresh="head"))
    assert "embed/h_D (8,) is left over" in told and "init_fresh" in told and "set " not in told
    found, out = load(*images(init_from=str(folder), init_fresh="head,embed/h_D"))
    assert "new: head, unused: embed/h_D\n" in out and "embed/h_D" not in found and "embed/W_DP" in found
    assert 'init_fresh: "embed/x"' in refusal(*images(init_from=str(folder), init_fresh="head,embed/x"))


# What a path means, and whether it is whole.


def test_numbers_that_are_not_finite_are_not_used(tmp_path):
    arrays = published.tensors("gpt2")
    arrays["transformer.h.1.mlp.c_proj.bias"][3] = np.inf
    folder = published.save(tmp_path, "gpt2", arrays)
    told = refusal(*gpt2(init_from=str(folder)))
    assert str(folder) in told and "blocks/mlp/b2_D" in told
    found, _ = load(*gpt2(init_from=str(folder), init_fresh="blocks/mlp"))
    assert "embed/E_WD" in found  # what is not taken may be anything


def test_a_path_may_be_the_folder_one_is_in_or_the_config_of_a_model(source, tmp_path, monkeypatch):
    assert open_model.open(str(source / "config.json")).path == source
    folder = published.save(tmp_path / "gpt2", "gpt2")
    assert open_model.open(str(folder / "config.json")).kind == "causal"
    (folder / "tokenizer.json").write_bytes(saved_words("abc"))
    monkeypatch.chdir(source)
    assert open_model.open(".").kind == open_model.open("config.json").kind == "image"
    monkeypatch.chdir(folder)
    for path in (".", "config.json", "model.safetensors"):
        assert open_model.load_tokenizer(open_model.open(path)).size == 3
    (tmp_path / "alone.pt").write_bytes(b"\x80\x04.")
    with raises(errors.UserError, "alone.pt", "AutoTokenizer"):
        open_model.open(str(tmp_path / "alone.pt"))


# The words of a trained model.


def saved_words(text: str, **more) -> bytes:
    made = tokenizer.make("characters", [text.encode()], specials=())
    return json.dumps(json.loads(made.files["tokenizer.json"]) | more).encode()


def test_the_ids_of_a_start_must_mean_the_same_words(tmp_path):
    folder = published.save(tmp_path, "gpt2")
    (settings, model), ours = gpt2(init_from=str(folder)), {"tokenizer.json": saved_words("abcdefghij")}
    load(settings, model, kept=ours)  # nobody knows what they mean there
    (folder / "tokenizer.json").write_bytes(b"\n" + saved_words("abcdefghij", padding={"length": 7}))
    load(settings, model, kept=ours)
    (folder / "tokenizer.json").write_bytes(saved_words("klmnopqrst"))
    told = refusal(settings, model, kept=ours)
    assert f"set text.tokenizer = {folder}" in told
    assert told == refusal(settings, model, kept={"tok23.bin": b"words"})
    load(settings, model, kept={"data.json": b"{}"})
    load(*gpt2(init_from=str(folder), init_fresh="embed"), kept=ours)  # no row of a word is taken from it
    told = refusal(*gpt2(init_from=str(folder), W=256), kept=ours)
    assert f"set text.tokenizer = {folder}" in told and "23" in told and "256" in told
    told = refusal(*gpt2(init_from=str(folder), experiment="translation"), kept=ours)
    assert "tokenizer" in told and "text.tokenizer" not in told


def test_what_nobody_chose_is_as_the_model_has_it(tmp_path, capsys):
    theirs = published.save(tmp_path / "llama", "llama", num_attention_heads=6)
    (theirs / "tokenizer.json").write_bytes(saved_words("abcdefghijklmnopqrstuvw"))

    def adopted(given=(), folder=None, **changes):
        made = base.get_config("language")
        made.update_from_flattened_dict({"init_from": str(theirs)} | changes)
        settings = config.Settings(made, config_file.defaults(made, base.get_config), explicit=given)
        return config.flat(warm_start.adopt_architecture(settings, folder).to_dict())

    found = adopted()
    of = open_model.open(theirs).model | {"H": 6, "G": 2, "K": 4, "norm": "rms:1e-6", "bias": "none"}
    assert {name: found[f"model.{name}"] for name in of} == of and found["text.head"] == "linear"
    assert found["text.tokenizer"] == str(theirs)
    assert (
        f"as {theirs} has it: model.D = 18, model.F = 19, model.G = 2, model.H = 6, model.K = 4, model.M = 2"
        in capsys.readouterr().out
    )
    others = {"model.D": 24, "model.H": 3, "text.tokenizer": "characters", "init_fresh": "head"}
    own = adopted({"model.norm"}, **others)
    found = [own[f"model.{name}"] for name in ("D", "H", "G", "K", "F", "norm")]
    assert found == [24, 3, 2, 4, 19, "token"]  # and D and H are refused
    assert own["text.tokenizer"] == "characters"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"model": {"D": 30, "F": 7}}}))
    theirs = tmp_path / "gone"
    again = adopted(folder=tmp_path / "run", **{"model.F": 5})
    assert (again["model.D"], again["model.F"], again["model.norm"]) == (30, 5, "token")
    theirs = ""
    assert adopted()["model.D"] == 128


def test_stories260k_goes_on_learning():
    folder = pathlib.Path(os.environ.get("TFM_DATA", "")) / "stories260K"
    if not os.environ.get("TFM_DATA") or not folder.is_dir():
        pytest.skip("TFM_DATA names no folder with stories260K")
    made = finetune.get_config()
    changes = {"text.source": str(folder / "greedy.txt"), "text.N": 20}
    changes |= {"init_from": str(folder / "stories260K.bin"), "text.tokenizer": str(folder / "tok512.bin")}
    made.update_from_flattened_dict(changes)
    settings = warm_start.adopt_architecture(config.Settings(made, config_file.defaults(made, base.get_config)), None)
    with contextlib.redirect_stdout(io.StringIO()):
        work = language.prepare(settings, run.make_mesh(settings))
    found, _ = load(settings, work.task, kept=work.files)
    theirs = shapes.flat(open_model.open(folder / "stories260K.bin").params)
    assert found.keys() == theirs.keys() == shapes.flat(jax.eval_shape(work.task.init, jax.random.key(0))).keys()
    for path, array in theirs.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    assert work.files["tok512.bin"] == (folder / "tok512.bin").read_bytes()


CLASSES = ["ape", "bee", "cow", "dog", "eel", "fly", "gnu", "hen", "ibis", "jay"]


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ([name.upper() for name in CLASSES], None),
        ([*CLASSES[1:], "APE"], "order"),
        ([f"LABEL_{i}" for i in range(10)], None),  # nobody named them
        ([*CLASSES[:9], "yak"], "refused"),
    ],
)
def test_the_classes_of_a_head_are_those_of_the_data(tmp_path, capsys, theirs, told):
    changes = {"image__patch": 4, "init_from": str(tmp_path / "run")}
    made = published.run(tmp_path / "run", "vision", **{"image.patch": 4})
    facts = json.loads((made / "data.json").read_text())
    (made / "data.json").write_text(json.dumps(facts | {"classes": theirs}))
    head, settings = open_model.open(made).params["head"], tiny.settings("vision", **changes)
    work, files = tiny.work_of(settings), {"data.json": json.dumps({"classes": CLASSES}).encode()}
    load = functools.partial(warm_start.load, settings, work.task.init, resumed=False, files=files)
    if told == "refused":
        with raises(errors.UserError, "init_fresh = head", theirs[0]):
            load()
        return
    start, out = load(), capsys.readouterr().out
    lower = [name.lower() for name in theirs]
    order = [lower.index(name) for name in CLASSES] if told else range(10)
    np.testing.assert_array_equal(start["head/G_CD"], head["G_CD"][order])
    np.testing.assert_array_equal(start["head/b_C"], head["b_C"][order])
    assert ("order of the data's classes" in out) == (told == "order")


def test_adapters_of_peft_alone_are_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with raises(errors.UserError, "some/base", "merge_and_unload"):
        open_model.open(tmp_path)
