"""optim.lora: only adapters are trained, alone and in a study; the run opens as a model with effective weights."""

import dataclasses
import json
import shutil

import dots
import frozen_task
import jax
import numpy as np
import published
import pytest
import tiny
import tiny_study
from errors import raises

from experiments.config import errors, settings as configs
from experiments.devices import mesh as meshes
from experiments.engine import run as runs, run_plan, train_step
from experiments.folder import checkpoint
from experiments.pretrained import adapters, families, gpt2, hub, open_model, safetensors, tensors as hub_tensors
from experiments.tools import export
from tfm import layout as layouts, lora, shapes

without_figures = dots.quick


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the folder of a trained model."""
    return published.write_run(tmp_path_factory.mktemp("source") / "run", "dots", model=False)


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory, source):
    """Return (function of a folder that trains adapters in folder / 'run', folder of such a run)."""
    flags = ["--config.optim.lora=2:G_CD:3", f"--config.init_from={source}", "--config.init_fresh=b_C"]
    flags += ["--config.train.save_every=4"]
    folder = tmp_path_factory.mktemp("launched")
    assert dots.launch_run(folder, *flags).code == 0
    return lambda folder: dots.launch_run(folder, *flags), folder


def test_a_run_trains_adapters_and_fresh_parts_and_opens_as_the_effective_model(tmp_path, source, adapter_run):
    """The file of adapters has only trained parameters. A resumed run has the same result."""
    launch, folder = adapter_run
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    run_folder = tmp_path / "run"
    start, params = jax.device_get(open_model.open(source).params), checkpoint.parameters(run_folder / "checkpoints", 6)
    tensors = safetensors.read(run_folder / adapters.FILE)
    expected = {"b_C": (tiny.C,), "lora/G_CD/A_DL": (tiny.D, 2), "lora/G_CD/B_CL": (tiny.C, 2)}
    assert {path: leaf.shape for path, leaf in tensors.items()} == expected
    A_DL, B_CL = tensors["lora/G_CD/A_DL"], tensors["lora/G_CD/B_CL"]
    assert B_CL.any() and tensors["b_C"].any() and (tensors["b_C"] != start["b_C"]).all()
    np.testing.assert_array_equal(params["G_CD"], start["G_CD"])
    effective = open_model.open(run_folder).params
    np.testing.assert_allclose(effective["G_CD"], start["G_CD"] + 3 / 2 * B_CL @ A_DL.T, rtol=1e-5)
    task = tiny.linear_task(evaluate_batch=5)
    measure = jax.jit(lambda batch: task.loss(effective, batch)[0]["loss"])
    total, count = np.sum([measure(task.evaluation[i]) for i in range(len(task.evaluation))], axis=0)
    assert json.loads((run_folder / "summary.json").read_text())["eval/loss"] == pytest.approx(total / count, rel=1e-5)
    result = dots.read_result(tmp_path)
    shutil.rmtree(run_folder / "checkpoints" / "6")
    for name in ("summary.json", adapters.FILE):
        (run_folder / name).unlink()
    assert f"resuming {run_folder} at step 4" in launch(tmp_path).out
    assert dots.read_result(tmp_path)[0] == result[0] and (run_folder / adapters.FILE).exists()


def test_a_study_compares_adapters_with_all_weights_from_the_same_model(tmp_path, source, adapter_run):
    """Each run starts from the model, and equals a single run with the same config."""
    arms = [["adapters", {"optim.lora": "2:G_CD:3", "init_fresh": "b_C"}], ["all", {}]]
    changes = {name.replace(".", "__"): value for name, value in dots.CHANGES.items()}
    outcome = tiny_study.run(tmp_path, study__arms=arms, study__seeds=[0, 5], init_from=str(source), **changes)
    assert outcome.code == 0 and outcome.out.count("starting from") == 2
    summaries = tiny_study.summaries(tmp_path)
    assert len({summary["params_sha256"] for summary in summaries.values()}) == 4
    single_run = json.loads((adapter_run[1] / "run" / "summary.json").read_text())
    assert single_run["eval/loss"] == pytest.approx(summaries["all/adapters/seed_0"]["eval/loss"], rel=1e-5)


def prepare_small(lora: str) -> tuple[configs.Settings, runs.Work]:
    settings = tiny.settings("vision", **{"init_from": "a", "optim.lora": lora, "train.accumulation": 2})
    return settings, runs.Work(frozen_task.small_task(), lambda *arguments: [])


def test_sharded_weights_and_adapters_take_the_same_step_as_on_one_device():
    """The optimiser state has only adapters."""
    metrics = []
    for fsdp in (1, 2):
        devices, (settings, work) = meshes.make(data=1, fsdp=fsdp), prepare_small("2:mlp,head")
        layout = layouts.Layout(batch=meshes.BATCH, fsdp="fsdp" if fsdp > 1 else None)
        task = adapters.add_adapters(settings, work._replace(task=work.task._replace(layout=layout))).task
        plan = run_plan.make_plan(settings, task, devices)
        params = {path: np.asarray(leaf) for path, leaf in shapes.flat(tiny.draw_params(task)).items()}  # no B is 0
        state = train_step.initial_state(plan.task, plan.optimiser, seed=0, mesh=devices, params=params)
        paths = {path for path in shapes.flat(state.opt_state) if "_" in path.split("/")[-1]}
        assert paths and all("/lora/" in path for path in paths)
        state, step = plan.step(state, meshes.place_batch(devices, plan.task.train[0]), True)
        norm = np.linalg.norm([np.linalg.norm(leaf) for leaf in jax.tree.leaves(jax.device_get(state.params))])
        metrics.append([float(step["loss"]), float(step["gradient_norm"]), norm])
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5) and metrics[0][1] > 0.01


def test_adapters_without_a_matrix_a_trained_model_or_anything_to_train_are_refused(tmp_path):
    refused = {"8:haed": '"head"', "8:mlp,b_D": "b_D", "0": "'0'", "score:8": "'score:8'", "8:mlp:0": "alpha"}
    for value, part in refused.items():
        with raises(errors.UserError, "optim.lora", part):
            adapters.add_adapters(*prepare_small(value))
    settings, work = prepare_small("2:mlp,head")
    settings = settings.replace({"optim.frozen": ["lora"]})
    with raises(errors.UserError, "optim.frozen"):
        run_plan.make_plan(settings, adapters.add_adapters(settings, work).task, meshes.make(data=1))
    outcome = dots.launch_run(tmp_path, "--config.optim.lora=2:G_CD")
    assert outcome.code == 2 and "optim.lora" in outcome.err and "init_from" in outcome.err


PEFT_NAMES = {"score/Uq_HKD": "attention.self.query", "value/Uv_HKD": "attention.self.value"}
PEFT_NAMES |= {"value/Uo_HDK": "attention.output.dense", "mlp/W1_FD": "intermediate.dense"}


def copy_adapters(params: dict, sides: dict) -> None:
    """Copy the adapters of peft into `params`. They are flat and have A transposed."""
    for path, name in PEFT_NAMES.items():
        node = params["lora"]["blocks"][path.split("/")[0]][path.split("/")[1]]
        for leaf, side in zip(sorted(node), "AB", strict=True):
            key = f"base_model.model.bert.encoder.layer.{{}}.{name}.lora_{side}.default.weight"
            layers = [sides.pop(key.format(m)).detach().numpy() for m in range(2)]
            node[leaf] = np.stack([x.T if side == "A" else x for x in layers]).reshape(node[leaf].shape)
    assert not sides


def test_peft_saves_the_trained_layers_and_not_all_modules_around_them(tmp_path):
    """bert.pooler.dense is trained, and peft would not adapt anything inside of a module `bert` that is saved whole."""
    published.save_bert_classifier(tmp_path / "bert")
    model = hub.read(tmp_path / "bert")
    params = lora.init(jax.random.key(0), model.params, rank=2, select=lambda path: path.endswith("Uq_HKD"))
    flat = {path: leaf for path, leaf in shapes.flat(params).items() if path.startswith(("lora/", "head/"))}
    safetensors.write(tmp_path / adapters.FILE, flat)
    settings = {"optim": {"lora": "2:Uq_HKD"}, "init_from": "bert", "model": model.model}
    (tmp_path / "out").mkdir()
    assert adapters.write_peft(tmp_path, tmp_path / "out", settings=settings, lines=hub.list_lines(model, "bert")) == ""
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"]
    assert saved == ["bert.pooler.dense", "classifier"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses a deprecated name of transformers
def test_the_same_adapters_give_the_logits_of_peft(tmp_path):
    """A run with these adapters is exported as a model and as adapters that peft can load."""
    reason = "parity needs the extra [parity]"
    peft, torch, transformers = (pytest.importorskip(name, reason=reason) for name in ("peft", "torch", "transformers"))
    sizes = {"hidden_size": 33, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=23, max_position_embeddings=13, **sizes))
    bert.save_pretrained(tmp_path)
    adapter_config = peft.LoraConfig(r=2, lora_alpha=5, target_modules=[*PEFT_NAMES.values()])
    peft_model = peft.get_peft_model(bert, adapter_config).eval()
    sides = {name: torch.nn.init.normal_(x) for name, x in peft_model.named_parameters() if "lora_" in name}
    our_model, matrices = open_model.open(tmp_path), {f"blocks/{path}" for path in PEFT_NAMES}
    params = lora.init(jax.random.key(0), our_model.params, rank=2, select=matrices.__contains__)
    copy_adapters(params, sides)
    words_BN = np.random.default_rng(0).integers(0, 23, (3, 11))
    merged = dataclasses.replace(our_model, params=jax.device_get(lora.merge(params, alpha=5)))
    expected = peft_model(torch.tensor(words_BN)).logits.detach().numpy()
    np.testing.assert_allclose(merged(words_BN), expected, rtol=1e-4, atol=1e-4)
    assert np.abs(expected - our_model(words_BN)).max() > 0.1
    run_folder = tmp_path / "run"
    config = {"experiment": "language", "init_from": str(tmp_path), "model": families.FREE | our_model.model}
    config |= {"text": {"objective": "masked", "N": 13, "head": "tied+gelu"}, "train": {"keep_best": ""}}
    config |= {"optim": {"lora": "2:Uq_HKD,Uv_HKD,Uo_HDK,W1_FD:5"}}
    published.save_checkpoint(run_folder, 2, params)
    (run_folder / "config.json").write_text(json.dumps({"config": config}))
    tensors = {path: leaf for path, leaf in shapes.flat(params).items() if path.startswith("lora/")}
    safetensors.write(run_folder / adapters.FILE, tensors)
    export.run(run_folder, family="bert", workdir=tmp_path / "out")
    base, merged = (transformers.BertForMaskedLM.from_pretrained(folder) for folder in (tmp_path, tmp_path / "out"))
    for model in (peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapters"), merged):
        logits = model.eval()(torch.tensor(words_BN)).logits.detach().numpy()
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    lines = hub_tensors.select(gpt2.FAMILY.table, our_model.params)  # queries, keys and values in one tensor
    assert "blocks/score/Uq_HKD" in adapters.write_peft(run_folder, tmp_path, settings=config, lines=lines)


def test_a_run_with_absolute_and_relative_positions_says_so():
    for absolute, relative, lines in (("learned", "rotary", 1), ("none", "rotary", 0), ("learned", "none", 0)):
        m = tiny.settings("vision", model__position=absolute, model__relative_position=relative).to_dict()["model"]
        text = adapters.describe_positions(m)
        assert len(text) == lines and (not lines or "model.position = none" in text[0])
