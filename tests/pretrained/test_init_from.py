"""Training that starts from another model's parameters, and errors if these do not fit."""

import contextlib
import io
import json
import shutil

import dots
import jax
import numpy as np
import published
import pytest
import tiny
from errors import raises

from configs import base, finetune
from experiments import text_classification
from experiments.config import errors, settings as configs
from experiments.data import tokenization
from experiments.engine import run as runs
from experiments.model import build
from experiments.pretrained import bert, hub, open_model, warm_start
from tfm import head as heads, shapes

GPT2_FIELDS = {"M": 2, "D": 21, "H": 3, "F": 19, "mlp": "gelu_tanh"}  # the fields of GPT-2 in published.py


def make_gpt2(N: int = 13, W: int = 23, experiment: str = "language", **changes):
    """Return (settings, model) of a run with the shapes of GPT-2 in published.py, with these changes."""
    fields = {f"model__{name}": value for name, value in GPT2_FIELDS.items()} | {"text__N": N, "text__head": "tied"}
    settings = tiny.settings("language", model=False, **(fields | changes))
    model = build.language_model(settings.model, head=heads.next_word, W=W, N=N, output="tied")
    return (settings if experiment == "language" else tiny.settings(experiment, **changes)), model


def make_vision(Y=8, patch=4, P=16, **changes):
    """Return (settings, model) of a run on images of Y x Y pixels. The defaults are like `source`."""
    settings = tiny.settings("vision", **{"model__M": 1, "image__patch": patch} | changes)
    sizes = {"Y": Y, "X": Y, "Z": P // patch**2, "patch": patch}
    output = settings.to_dict()["image"]["head"]
    return settings, build.vision_model(settings.model, output=output, **sizes, C=10)


def load(settings, model, resumed=False, files=()):
    """Return (initial parameters by path, stdout)."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return warm_start.load(settings, model.init, resumed=resumed, files=dict(files)), out.getvalue()


def check_refusal(settings, model, *parts: str, files=(), absent=()) -> str:
    """Assert that loading fails with these parts in the message and none of `absent`. Return the message."""
    with raises(errors.UserError, *parts) as error:
        load(settings, model, files=files)
    assert not any(part in str(error.value) for part in absent)
    return str(error.value)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the folder of a run on digits."""
    return published.write_run(tmp_path_factory.mktemp("source") / "run", "vision", **{"image.patch": 4, "model.M": 1})


def test_a_run_starts_from_the_parameters_of_another_and_resumes_without_them(tmp_path):
    source_run = published.write_run(tmp_path / "theirs", "dots", model=False)
    start = open_model.open(str(source_run)).params["G_CD"]
    changes = [f"--config.init_from={source_run}", "--config.seed=3", "--config.train.steps=1"]
    changes += ["--config.optim.learning_rate=0.0", "--config.optim.warmup_steps=0"]
    outcome = dots.launch_run(tmp_path, *changes)  # a step of learning rate 0
    assert f"starting from {source_run}: {tiny.C * tiny.D + tiny.C} of its parameters\n" in outcome.out
    assert outcome.code == 0
    np.testing.assert_array_equal(open_model.open(str(tmp_path / "run")).params["G_CD"], start)
    shutil.rmtree(source_run)
    (tmp_path / "run" / "summary.json").unlink()
    outcome = dots.launch_run(tmp_path, *changes)
    assert outcome.code == 0 and "resuming" in outcome.out and (tmp_path / "run" / "summary.json").exists()
    np.testing.assert_array_equal(open_model.open(str(tmp_path / "run")).params["G_CD"], start)


def test_a_published_model_is_the_start_and_its_table_is_printed(tmp_path):
    folder = published.save(tmp_path, "gpt2")
    for path in (folder, folder / "model.safetensors"):
        settings, model = make_gpt2(init_from=str(path))
        start, out = load(settings, model)
        assert "wte.weight" in out and "starting from" in out
    expected = shapes.flat(jax.eval_shape(model.init, jax.random.key(0)))
    assert {name: x.shape for name, x in start.items()} == {name: x.shape for name, x in expected.items()}
    np.testing.assert_array_equal(start["embed/E_WD"], published.tensors("gpt2", prefix="")["wte.weight"])
    assert load(settings, model, resumed=True) == ({}, "")
    opened = open_model.open(folder)
    for *case, head in (("language", (), "tied"), ("text_classification", (), None), ("language", ("head",), None)):
        assert warm_start.list_required(case[0], opened, case[1]).get("text.head") == head


def test_another_architecture_is_an_error_with_the_fields_to_change(tmp_path, source):
    folder = published.save(tmp_path, "gpt2")
    changes = {"model__D": 24, "model__norm": "rms", "text__head": "linear", "model__dropout": 0.5}
    fields = ["model.D = 21 (it is 24)", "model.norm = 'token' (it is 'rms')", "text.head = 'tied' (it is "]
    fields += ["model.K = 7 (it is 8)", "norm1/shift_D (2, 21) is left over"]
    check_refusal(*make_gpt2(init_from=str(folder), **changes), *fields, absent=("init_fresh", "model.H", "dropout"))
    check_refusal(*make_gpt2(init_from=str(folder), W=256), "embed/E_WD has shape (23, 21) and not (256, 21)")
    check_refusal(*make_gpt2(init_from=str(tmp_path / "absent")), "absent")
    settings, _ = make_vision(init_from=str(source))
    three_classes = build.vision_model(settings.model, output="pooled", Y=8, X=8, Z=1, patch=4, C=3)
    check_refusal(settings, three_classes, "head/G_CD has shape (10, 8) and not (3, 8)", "init_fresh = head")
    settings, _ = make_vision(init_from=str(source), init_fresh="head")
    start, out = load(settings, three_classes)
    assert "parameters, new: head\n" in out and "embed/W_DP" in start and "head/G_CD" not in start


@pytest.mark.parametrize(("N", "rule", "last"), [(5, "cut", 4), (17, "linear", -1)])
def test_positions_are_resized_and_the_rule_is_printed(tmp_path, N, rule, last):
    start, out = load(*make_gpt2(N, init_from=str(published.save(tmp_path, "gpt2"))))
    assert f"the 13 learned positions are resized to {N} by the rule {rule}" in out
    source_ND = published.tensors("gpt2", prefix="")["wpe.weight"]
    np.testing.assert_allclose(start["position/P_ND"][[0, -1]], source_ND[[0, last]], rtol=1e-6)
    assert start["position/P_ND"].shape == (N, 21)


def test_init_fresh_lists_parts_of_the_model_to_draw_anew(tmp_path):
    check_refusal(*make_gpt2(init_fresh="head"), "init_fresh", "init_from")
    parts = ['init_fresh: "positoin" (did you mean "position"?)', "blocks, embed, norm, position"]
    check_refusal(*make_gpt2(init_from=str(published.save(tmp_path, "gpt2")), init_fresh="embed, positoin"), *parts)
    for part in ("blocks/mlp", "mlp", "blocks/ml*"):
        start, _ = load(*make_gpt2(5, init_from=str(tmp_path), init_fresh=f"{part},position"))
        assert "blocks/score/Uq_HKD" in start and not any("mlp" in path or "position" in path for path in start)


@pytest.mark.parametrize("positions", ["rotary:50", "learned"])
def test_positions_can_be_removed_and_the_context_can_grow(tmp_path, positions):
    """A second run starts from the first without its positions (DroPE)."""
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    part = "position" if positions == "learned" else "relative_position"
    source_settings = {"text.source": str(tmp_path / "text.txt"), "text.N": 8, "model.position": "none"}
    folder = published.write_run(tmp_path / "run", "language", **source_settings | {f"model.{part}": positions})
    changes = {"text__N": 16, "init_from": str(folder), "model__position": "none", "model__relative_position": "none"}
    settings = tiny.settings("language", **changes)
    model = build.language_model(settings.model, head=heads.next_word, W=256, N=16)
    check_refusal(settings, model, f"model.{part} = '{positions}' (it is 'none')")
    start, out = load(tiny.settings("language", **changes, init_fresh=part), model)
    assert f"unused: {part}\n" in out
    params = shapes.flat(open_model.open(str(folder)).params)
    assert start.keys() == {path for path in params if "position" not in path}
    for path in start:
        np.testing.assert_array_equal(start[path], params[path])


def test_positions_of_patches_are_resized_only_if_the_rest_fits(source):
    settings = {"init_from": str(source)}
    start, _ = load(*make_vision(Y=16, **settings))
    assert start["position/P_ND"].shape == (16, 8)
    start, out = load(*make_vision(init_fresh="position", **settings))
    assert "new: position" in out and not any("position" in path for path in start)
    check_refusal(*make_vision(patch=2, P=4, **settings), "set image.patch = 4 (it is 2)")
    for changes in ({"Y": 16, "P": 48}, {"image__head": "class_token"}, {"patch": 2}):
        check_refusal(*make_vision(**changes, **settings), "images of [8, 8, 1] pixels")


def test_a_classifier_can_start_from_a_run_on_masked_patches(tmp_path):
    source_run = str(published.write_run(tmp_path / "run", "masked_image", **{"image.patch": 4, "model.M": 1}))
    parts = ["embed/h_D (8,) is left over", "init_fresh"]
    check_refusal(*make_vision(init_from=source_run, init_fresh="head"), *parts, absent=["set "])
    start, out = load(*make_vision(init_from=source_run, init_fresh="head,embed/h_D"))
    assert "new: head, unused: embed/h_D\n" in out and "embed/h_D" not in start and "embed/W_DP" in start
    check_refusal(*make_vision(init_from=source_run, init_fresh="head,embed/x"), 'init_fresh: "embed/x"')


@pytest.mark.parametrize(
    ("head", "fresh", "kept", "line"),
    [
        ("tanh", "head", True, "new: head (except head/pooler"),
        ("tanh", "head,head/pooler", False, "new: head, head/pooler\n"),
        ("relu", "head", False, "is not used: it needs text.head = tanh, and text.head = relu"),
        ("pooled", "head", False, "is not used: it needs text.head = tanh, and text.head = pooled"),
    ],
)
@pytest.mark.parametrize("is_classifier", [False, True])
def test_a_new_head_begins_with_the_pooler_of_bert(tmp_path, is_classifier, head, fresh, kept, line):
    (published.save_bert_classifier if is_classifier else published.save_bert_with_tokenizer)(tmp_path)
    fields = {f"model__{name}": value for name, value in open_model.open(tmp_path).model.items()}
    changes = {"text__head": head, "text__N": 13, "init_from": str(tmp_path), "init_fresh": fresh}
    settings = tiny.settings("text_classification", model=False, **fields, **changes)
    model = text_classification.make_model(settings, runs.make_mesh(settings), W=23, C=2)
    start, out = load(settings, model)
    assert line in out and ("head/pooler/b_D" in start) == kept and "head/G_CD" not in start
    if kept:
        np.testing.assert_array_equal(start["head/pooler/W_DD"], published.tensors("bert")["bert.pooler.dense.weight"])


@pytest.mark.parametrize(("chosen", "head"), [((), "relu"), (("text.head",), "tanh")])
def test_a_new_head_has_the_layer_of_the_family_unless_the_user_chooses_another(tmp_path, monkeypatch, chosen, head):
    heads = bert.BERT.heads | {"classes": bert.BERT.heads["classes"]._replace(output="relu")}
    monkeypatch.setitem(hub.FAMILIES, "bert", bert.BERT._replace(heads=heads))
    config = base.get_config("text_classification")
    config.update(init_from=str(published.save(tmp_path, "bert")), init_fresh="head")
    settings = configs.Settings(config, explicit=chosen)
    assert warm_start.adopt_architecture(settings, None).text.head == head


def test_parameters_must_be_finite(tmp_path):
    arrays = published.tensors("gpt2")
    arrays["transformer.h.1.mlp.c_proj.bias"][3] = np.inf
    folder = str(published.save(tmp_path, "gpt2", arrays))
    check_refusal(*make_gpt2(init_from=folder), folder, "blocks/mlp/b2_D")
    start, _ = load(*make_gpt2(init_from=folder, init_fresh="blocks/mlp"))
    assert "embed/E_WD" in start  # unused parameters need not be finite


def test_a_path_may_be_the_current_folder_or_the_config_of_a_model(source, tmp_path, monkeypatch):
    assert open_model.open(str(source / "config.json")).path == source
    folder = published.save(tmp_path / "gpt2", "gpt2")
    assert open_model.open(str(folder / "config.json")).kind == "causal"
    (folder / "tokenizer.json").write_bytes(save_tokenizer("abc"))
    monkeypatch.chdir(source)
    assert open_model.open(".").kind == open_model.open("config.json").kind == "image"
    monkeypatch.chdir(folder)
    for path in (".", "config.json", "model.safetensors"):
        assert open_model.open(path).tokenizer.size == 3
    (tmp_path / "alone.pt").write_bytes(b"\x80\x04.")
    with raises(errors.UserError, "alone.pt", "AutoTokenizer"):
        open_model.open(str(tmp_path / "alone.pt"))


def save_tokenizer(text: str, **fields) -> bytes:
    """Return the file of a tokenizer of these characters."""
    content = tokenization.make("characters", [text.encode()], specials=()).files["tokenizer.json"]
    return json.dumps(json.loads(content) | fields).encode()


def test_the_tokenizer_must_equal_that_of_the_start(tmp_path):
    folder = published.save(tmp_path, "gpt2")
    (settings, model), files = make_gpt2(init_from=str(folder)), {"tokenizer.json": save_tokenizer("abcdefghij")}
    load(settings, model, files=files)  # the model has no tokenizer
    (folder / "tokenizer.json").write_bytes(b"\n" + save_tokenizer("abcdefghij", padding={"length": 7}))
    load(settings, model, files=files)
    (folder / "tokenizer.json").write_bytes(save_tokenizer("klmnopqrst"))
    setting = f"set text.tokenizer = {folder}"
    check_refusal(settings, model, setting, files=files)
    load(settings, model, files={"data.json": b"{}"})
    load(*make_gpt2(init_from=str(folder), init_fresh="embed"), files=files)  # the embedding is not loaded
    check_refusal(*make_gpt2(init_from=str(folder), W=256), setting, "23", "256", files=files)
    translation_run = make_gpt2(init_from=str(folder), experiment="translation")
    check_refusal(*translation_run, "tokenizer", files=files, absent=["text.tokenizer"])


def test_settings_that_the_user_did_not_choose_follow_the_model(tmp_path, capsys):
    folder_of_model = published.save(tmp_path / "llama", "llama", num_attention_heads=6)
    (folder_of_model / "tokenizer.json").write_bytes(save_tokenizer("abcdefghijklmnopqrstuvw"))

    def adopt(path=folder_of_model, chosen=(), folder=None, **changes):
        config = base.get_config("language")
        config.update_from_flattened_dict({"init_from": str(path)} | changes)
        settings = configs.Settings(config, explicit=chosen)
        return configs.flat(warm_start.adopt_architecture(settings, folder).to_dict())

    settings = adopt()
    fields = open_model.open(folder_of_model).model | {"H": 6, "G": 2, "K": 4, "norm": "rms:1e-6", "bias": "none"}
    assert {name: settings[f"model.{name}"] for name in fields} == fields and settings["text.head"] == "linear"
    assert settings["text.tokenizer"] == str(folder_of_model)
    sizes = "model.D = 18, model.F = 19, model.G = 2, model.H = 6, model.K = 4, model.M = 2"
    assert f"settings of {folder_of_model}: {sizes}" in capsys.readouterr().out
    changes = {"model.D": 24, "model.H": 3, "text.tokenizer": "characters", "init_fresh": "head"}
    settings = adopt(chosen={"model.norm"}, **changes)
    values = [settings[f"model.{name}"] for name in ("D", "H", "G", "K", "F", "norm")]
    assert values == [24, 3, 2, 4, 19, "token"]  # warm_start.load refuses D and H
    assert settings["text.tokenizer"] == "characters"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"model": {"D": 30, "F": 7}}}))
    settings = adopt(tmp_path / "gone", folder=tmp_path / "run", **{"model.F": 5})
    assert [settings[f"model.{name}"] for name in ("D", "F", "norm")] == [30, 5, "token"]
    assert adopt("")["model.D"] == 128


@pytest.mark.parametrize(("fresh", "head"), [("", "class_token"), ("head", "pooled")])
def test_an_image_classifier_keeps_the_head_of_a_vit_unless_it_is_new(tmp_path, fresh, head):
    config = base.get_config("vision")
    config.update_from_flattened_dict({"init_from": str(published.save(tmp_path, "vit")), "init_fresh": fresh})
    settings = configs.flat(warm_start.adopt_architecture(configs.Settings(config), None).to_dict())
    assert settings["image.head"] == head


def test_code_that_a_model_names_is_not_adopted_unless_the_config_names_it_too(tmp_path, source):
    """The run may be somebody else's: without --trust, its code is never executed."""
    foreign = published.copy_with_changes(source, tmp_path / "foreign", model__mlp="their_file:mlp")
    config = base.get_config("language")
    config.init_from = str(foreign)
    with raises(errors.UserError, 'model.mlp = "their_file:mlp"', "code that would be executed"):
        warm_start.adopt_architecture(configs.Settings(config), None)
    config.model.mlp = "their_file:mlp"
    settings = warm_start.adopt_architecture(configs.Settings(config, explicit={"model.mlp"}), None)
    assert settings.model.mlp == "their_file:mlp"


def test_a_run_starts_from_a_published_llama_with_its_tokenizer(tmp_path):
    folder = published.save(tmp_path / "llama", "llama")
    (folder / "tokenizer.json").write_bytes(save_tokenizer("abcdefghijklmnopqrstuvw"))
    (tmp_path / "text.txt").write_text("abadcab" * 99)
    changes = {"text.source": str(tmp_path / "text.txt"), "text.N": 12, "init_from": str(folder)}
    settings = warm_start.adopt_architecture(configs.Settings(finetune.get_config()).replace(changes), None)
    work = tiny.work_of(settings)
    start, _ = load(settings, work.task, files=work.files)
    expected = shapes.flat(open_model.open(folder).params)
    assert start.keys() == expected.keys() == shapes.flat(jax.eval_shape(work.task.init, jax.random.key(0))).keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(start[path], array, err_msg=path)
    assert json.loads(work.files["tokenizer.json"]) == json.loads((folder / "tokenizer.json").read_bytes())


CLASSES = ["ape", "bee", "cow", "dog", "eel", "fly", "gnu", "hen", "ibis", "jay"]


@pytest.mark.parametrize(
    ("source_classes", "order"),
    [
        ([name.upper() for name in CLASSES], range(10)),
        ([*CLASSES[1:], "APE"], [9, *range(9)]),
        ([f"LABEL_{i}" for i in range(10)], range(10)),  # classes without names
        ([*CLASSES[:9], "yak"], None),  # other classes are an error
    ],
)
def test_the_rows_of_a_head_follow_the_classes_of_the_data(tmp_path, source_classes, order):
    folder = published.write_run(tmp_path / "run", "vision", **{"image.patch": 4})
    data = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps(data | {"classes": source_classes}))
    settings = tiny.settings("vision", image__patch=4, init_from=str(folder))
    model, files = tiny.task_of(settings), {"data.json": json.dumps({"classes": CLASSES}).encode()}
    if order is None:
        check_refusal(settings, model, "init_fresh = head", source_classes[0], files=files)
        return
    (start, out), head = load(settings, model, files=files), open_model.open(folder).params["head"]
    for name in ("G_CD", "b_C"):
        np.testing.assert_array_equal(start[f"head/{name}"], head[name][np.array(order)])
    assert ("order of the data's classes" in out) == (order != range(10))


def test_adapters_of_peft_alone_are_an_error(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with raises(errors.UserError, "some/base", "merge_and_unload"):
        open_model.open(tmp_path)
