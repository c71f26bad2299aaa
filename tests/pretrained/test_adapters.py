"""optim.lora: only adapters are trained, alone and in a study; the run is then a model of effective weights."""

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

from experiments.engine import checkpoint, config, errors, mesh, run, run_plan, train_step as steps
from experiments.pretrained import adapters, families, gpt2, open_model, safetensors
from experiments.tools import export
from tfm import layout as layouts, lora, shapes

dots_are_quick = dots.quick


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the folder of a trained model."""
    return published.run(tmp_path_factory.mktemp("source") / "run", "dots", model=False)


@pytest.fixture(scope="module")
def launched(tmp_path_factory, source):
    """Return the function of a folder that trains adapters in folder / 'run', and a folder of such a run."""
    flags = ["--config.optim.lora=2:G_CD:3", f"--config.init_from={source}", "--config.init_fresh=b_C"]
    flags += ["--config.train.save_every=4"]
    folder = tmp_path_factory.mktemp("launched")
    assert dots.launched(folder, *flags).code == 0
    return lambda folder: dots.launched(folder, *flags), folder


def test_a_run_trains_adapters_and_fresh_parts_and_opens_as_the_effective_model(tmp_path, source, launched):
    """Its file has only these. A resumed run is the same, and a run may begin with it."""
    launch, folder = launched
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    start, after = open_model.open(source).params, checkpoint.parameters(run / "checkpoints", 6)
    trained = safetensors.read(run / adapters.FILE)
    expected = {"b_C": (tiny.C,), "lora/G_CD/A_DL": (tiny.D, 2), "lora/G_CD/B_CL": (tiny.C, 2)}
    assert {path: leaf.shape for path, leaf in trained.items()} == expected
    A_DL, B_CL = trained["lora/G_CD/A_DL"], trained["lora/G_CD/B_CL"]
    assert B_CL.any() and trained["b_C"].any() and (trained["b_C"] != start["b_C"]).all()
    np.testing.assert_array_equal(after["G_CD"], start["G_CD"])
    effective = open_model.open(run).params
    np.testing.assert_allclose(effective["G_CD"], start["G_CD"] + 3 / 2 * B_CL @ A_DL.T, rtol=1e-5)
    task = tiny.linear_task(evaluate_batch=5)
    measure = jax.jit(lambda batch: task.loss(effective, batch)[0]["loss"])
    total, count = np.sum([measure(task.evaluation[i]) for i in range(len(task.evaluation))], axis=0)
    assert json.loads((run / "summary.json").read_text())["eval/loss"] == pytest.approx(total / count, rel=1e-5)
    result = dots.result(tmp_path)
    shutil.rmtree(run / "checkpoints" / "6")
    for name in ("summary.json", adapters.FILE):
        (run / name).unlink()
    assert f"resuming {run} at step 4" in launch(tmp_path).out
    assert dots.result(tmp_path)[0] == result[0] and (run / adapters.FILE).exists()


def test_a_study_compares_adapters_with_all_weights_from_the_same_model(tmp_path, source, launched):
    """Each run begins with the model, and equals the run of its config alone."""
    arms = [["adapters", {"optim.lora": "2:G_CD:3", "init_fresh": "b_C"}], ["all", {}]]
    changes = {name.replace(".", "__"): value for name, value in dots.CHANGES.items()}
    outcome = tiny_study.run(tmp_path, study__arms=arms, study__seeds=[0, 5], init_from=str(source), **changes)
    assert outcome.code == 0 and outcome.out.count("starting from") == 2
    summaries = tiny_study.summaries(tmp_path)
    assert len({summary["params_sha256"] for summary in summaries.values()}) == 4
    alone = json.loads((launched[1] / "run" / "summary.json").read_text())
    assert alone["eval/loss"] == pytest.approx(summaries["all/adapters/seed_0"]["eval/loss"], rel=1e-5)


def small(lora: str) -> tuple[config.Settings, run.Work]:
    settings = tiny.settings("vision", **{"init_from": "a", "optim.lora": lora, "train.accumulation": 2})
    return settings, run.Work(frozen_task.small_task(), lambda *arguments: [])


def test_devices_that_share_weights_and_adapters_take_the_same_step():
    """The state of the optimiser has only adapters."""
    metrics = []
    for fsdp in (1, 2):
        devices, (settings, work) = mesh.make(data=1, fsdp=fsdp), small("2:mlp,head")
        layout = layouts.Layout(batch=mesh.BATCH, fsdp="fsdp" if fsdp > 1 else None)
        task = adapters.add_adapters(settings, work._replace(task=work.task._replace(layout=layout))).task
        plan = run_plan.make_plan(settings, task, devices)
        params = {path: np.asarray(leaf) for path, leaf in shapes.flat(tiny.drawn(task)).items()}  # no B is 0
        state = steps.initial_state(plan.task, plan.optimiser, seed=0, mesh=devices, params=params)
        paths = {path for path in shapes.flat(state.opt_state) if "_" in path.split("/")[-1]}
        assert paths and all("/lora/" in path for path in paths)
        state, step = plan.step(state, mesh.place_batch(devices, plan.task.train[0]), True)
        norm = np.linalg.norm([np.linalg.norm(leaf) for leaf in jax.tree.leaves(jax.device_get(state.params))])
        metrics.append([float(step["loss"]), float(step["gradient_norm"]), norm])
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5) and metrics[0][1] > 0.01


@pytest.mark.parametrize(
    ("lora", "parts"),
    [("8:haed", ["haed", '"head"']), ("8:mlp,b_D", ["b_D"]), ("0", ["'0'"]), ("score:8", ["'score:8'"])],
)
def test_what_cannot_be_adapted(lora, parts):
    with raises(errors.UserError, "optim.lora", *parts):
        adapters.add_adapters(*small(lora))


def test_frozen_adapters_leave_nothing_to_train():
    settings, work = small("2:mlp,head")
    settings = settings.replace({"optim.frozen": ["lora"]})
    with raises(errors.UserError, "optim.frozen"):
        run_plan.make_plan(settings, adapters.add_adapters(settings, work).task, mesh.make(data=1))


def test_adapters_need_a_trained_model(tmp_path):
    outcome = dots.launched(tmp_path, "--config.optim.lora=2:G_CD")
    assert outcome.code == 2 and "optim.lora" in outcome.err and "init_from" in outcome.err


PLACES = {"score/Uq_HKD": "attention.self.query", "value/Uv_HKD": "attention.self.value"}
PLACES |= {"value/Uo_HDK": "attention.output.dense", "mlp/W1_FD": "intermediate.dense"}


def copy_adapters(ours: dict, sides: dict) -> None:
    """Set our adapters to those of peft, which are flat and have A transposed."""
    for path, place in PLACES.items():
        node = ours["lora"]["blocks"][path.split("/")[0]][path.split("/")[1]]
        for name, side in zip(sorted(node), "AB", strict=True):
            key = f"base_model.model.bert.encoder.layer.{{}}.{place}.lora_{side}.default.weight"
            layers = [sides.pop(key.format(m)).detach().numpy() for m in range(2)]
            node[name] = np.stack([x.T if side == "A" else x for x in layers]).reshape(node[name].shape)
    assert not sides


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses an old name of transformers
def test_the_same_adapters_give_the_logits_of_peft(tmp_path):
    """A run with these adapters is exported as a model, and also as adapters that peft opens."""
    reason = "parity needs the extra [parity]"
    peft, torch, transformers = (pytest.importorskip(name, reason=reason) for name in ("peft", "torch", "transformers"))
    sizes = {"hidden_size": 33, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=23, max_position_embeddings=13, **sizes))
    bert.save_pretrained(tmp_path)
    theirs = peft.get_peft_model(bert, peft.LoraConfig(r=2, lora_alpha=5, target_modules=[*PLACES.values()])).eval()
    sides = {name: torch.nn.init.normal_(x) for name, x in theirs.named_parameters() if "lora_" in name}
    ours, matrices = open_model.open(tmp_path), {f"blocks/{path}" for path in PLACES}
    params = lora.init(jax.random.key(0), ours.params, rank=2, chosen=matrices.__contains__)
    copy_adapters(params, sides)
    words_BN = np.random.default_rng(0).integers(0, 23, (3, 11))
    adapted = dataclasses.replace(ours, params=jax.device_get(lora.merge(params, alpha=5)))
    expected = theirs(torch.tensor(words_BN)).logits.detach().numpy()
    np.testing.assert_allclose(adapted(words_BN), expected, rtol=1e-4, atol=1e-4)
    assert np.abs(expected - ours(words_BN)).max() > 0.1
    run, text = tmp_path / "run", {"objective": "masked", "N": 13, "head": "tied+gelu"}
    saved = {"experiment": "language", "init_from": str(tmp_path), "text": text, "model": families.FREE | ours.model}
    saved |= {"train": {"keep_best": ""}, "optim": {"lora": "2:Uq_HKD,Uv_HKD,Uo_HDK,W1_FD:5"}}
    published.keep(run, 2, params)
    (run / "config.json").write_text(json.dumps({"config": saved}))
    trained = {path: leaf for path, leaf in shapes.flat(params).items() if path.startswith("lora/")}
    safetensors.write(run / adapters.FILE, trained)
    export.run(run, family="bert", workdir=tmp_path / "out")
    base = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    for model in (
        peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapters"),
        transformers.BertForMaskedLM.from_pretrained(tmp_path / "out"),
    ):
        logits = model.eval()(torch.tensor(words_BN)).logits.detach().numpy()
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    rules = gpt2.lines({"tied_output": True}, gpt2.FAMILY)  # queries, keys and values in one tensor
    assert "blocks/score/Uq_HKD" in adapters.write_peft(run, tmp_path, settings=saved, rules=rules)
