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
    """The folder of a trained model."""
    return published.run(tmp_path_factory.mktemp("source") / "run", "dots", model=False)


@pytest.fixture(scope="module")
def launched(tmp_path_factory, source):
    """folder -> what a person sees of a run that trains adapters, in folder / 'run'; and a folder of such a run."""
    how = ["--config.optim.lora=2:G_CD:3", f"--config.init_from={source}", "--config.init_fresh=b_C"]
    how += ["--config.train.save_every=4"]
    folder = tmp_path_factory.mktemp("launched")
    assert dots.launched(folder, *how).code == 0
    return lambda folder: dots.launched(folder, *how), folder


def test_a_run_trains_its_adapters_and_what_begins_anew_and_opens_as_the_effective_model(tmp_path, source, launched):
    """Its file has these alone; a run that goes on is the same, and one may begin with it."""
    again, folder = launched
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    begun, after = open_model.open(source).params, checkpoint.parameters(tmp_path / "run" / "checkpoints", 6)
    kept = safetensors.read(tmp_path / "run" / adapters.FILE)
    assert {path: leaf.shape for path, leaf in kept.items()} == {
        "b_C": (tiny.C,),
        "lora/G_CD/A_DL": (tiny.D, 2),
        "lora/G_CD/B_CL": (tiny.C, 2),
    }
    A_DL, B_CL = kept["lora/G_CD/A_DL"], kept["lora/G_CD/B_CL"]
    assert B_CL.any() and kept["b_C"].any() and (kept["b_C"] != begun["b_C"]).all()
    np.testing.assert_array_equal(after["G_CD"], begun["G_CD"])
    effective = open_model.open(tmp_path / "run").params
    np.testing.assert_allclose(effective["G_CD"], begun["G_CD"] + 3 / 2 * B_CL @ A_DL.T, rtol=1e-5)
    task = tiny.linear_task(evaluate_batch=5)
    measure = jax.jit(lambda batch: task.loss(effective, batch)[0]["loss"])
    total, count = np.sum([measure(task.evaluation[i]) for i in range(len(task.evaluation))], axis=0)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval/loss"] == pytest.approx(total / count, rel=1e-5)
    whole = dots.result(tmp_path)
    for name in ("summary.json", adapters.FILE, "checkpoints/6"):
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert f"resuming {tmp_path / 'run'} at step 4" in again(tmp_path).out
    assert dots.result(tmp_path)[0] == whole[0] and (tmp_path / "run" / adapters.FILE).exists()


def test_a_study_compares_adapters_with_all_weights_from_the_same_model(tmp_path, source, launched):
    """Each run begins with the model, and is the one that it is alone."""
    arms = [["adapters", {"optim.lora": "2:G_CD:3", "init_fresh": "b_C"}], ["all", {}]]
    same = {name.replace(".", "__"): value for name, value in dots.CHANGES.items()}
    told = tiny_study.run(tmp_path, study__arms=arms, study__seeds=[0, 5], init_from=str(source), **same)
    assert told.code == 0 and told.out.count("starting from") == 2
    found = tiny_study.summaries(tmp_path)
    assert len({one["params_sha256"] for one in found.values()}) == 4
    alone = json.loads((launched[1] / "run" / "summary.json").read_text())
    assert alone["eval/loss"] == pytest.approx(found["all/adapters/seed_0"]["eval/loss"], rel=1e-5)


def small(lora: str) -> tuple[config.Settings, run.Work]:
    settings = tiny.settings("vision", **{"init_from": "a", "optim.lora": lora, "train.accumulation": 2})
    return settings, run.Work(frozen_task.small_task(), lambda *arguments: [])


def test_devices_that_share_weights_and_adapters_take_the_same_step():
    """And the optimiser remembers nothing of other weights."""
    measured = []
    for fsdp in (1, 2):
        devices, (settings, work) = mesh.make(data=1, fsdp=fsdp), small("2:mlp,head")
        layout = layouts.Layout(batch=mesh.BATCH, fsdp="fsdp" if fsdp > 1 else None)
        task = adapters.add_adapters(settings, work._replace(task=work.task._replace(layout=layout))).task
        plan = run_plan.make_plan(settings, task, devices)
        params = {path: np.asarray(leaf) for path, leaf in shapes.flat(tiny.drawn(task)).items()}  # no B is 0
        state = steps.initial_state(plan.task, plan.optimiser, seed=0, mesh=devices, params=params)
        remembered = {path for path in shapes.flat(state.opt_state) if "_" in path.split("/")[-1]}
        assert remembered and all("/lora/" in path for path in remembered)
        state, metrics = plan.step(state, mesh.place_batch(devices, plan.task.train[0]), True)
        norm = np.linalg.norm([np.linalg.norm(leaf) for leaf in jax.tree.leaves(jax.device_get(state.params))])
        measured.append([float(metrics["loss"]), float(metrics["gradient_norm"]), norm])
    assert measured[1] == pytest.approx(measured[0], rel=1e-5) and measured[0][1] > 0.01


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


def test_without_a_trained_model_there_is_nothing_to_adapt(tmp_path):
    told = dots.launched(tmp_path, "--config.optim.lora=2:G_CD")
    assert told.code == 2 and "optim.lora" in told.err and "init_from" in told.err


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for an old name
def test_the_same_adapters_give_the_logits_of_peft(tmp_path):
    """Of matrices of queries, values, outputs and the MLP; theirs are flat, and A is the other way around."""
    peft, torch, transformers = (
        pytest.importorskip(name, reason="parity needs the extra [parity]")
        for name in ("peft", "torch", "transformers")
    )
    places = {"score/Uq_HKD": "attention.self.query", "value/Uv_HKD": "attention.self.value"}
    places |= {"value/Uo_HDK": "attention.output.dense", "mlp/W1_FD": "intermediate.dense"}
    sizes = {"hidden_size": 33, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=23, max_position_embeddings=13, **sizes))
    bert.save_pretrained(tmp_path)
    theirs = peft.get_peft_model(bert, peft.LoraConfig(r=2, lora_alpha=5, target_modules=[*places.values()])).eval()
    sides = {name: torch.nn.init.normal_(x) for name, x in theirs.named_parameters() if "lora_" in name}
    ours = open_model.open(tmp_path)
    chosen = {f"blocks/{path}": path for path in places}
    params = lora.init(jax.random.key(0), ours.params, rank=2, chosen=chosen.__contains__)
    for path, place in places.items():
        room, name = path.split("/")
        node = params["lora"]["blocks"][room][name]
        for own, side in zip(sorted(node), "AB", strict=True):
            beginning = f"base_model.model.bert.encoder.layer.{{}}.{place}.lora_{side}.default.weight"
            layers = [sides.pop(beginning.format(m)).detach().numpy() for m in range(2)]
            node[own] = np.stack([x.T if side == "A" else x for x in layers]).reshape(node[own].shape)
    assert not sides
    words_BN = np.random.default_rng(0).integers(0, 23, (3, 11))
    adapted = dataclasses.replace(ours, params=jax.device_get(lora.merge(params, alpha=5)))
    wanted = theirs(torch.tensor(words_BN)).logits.detach().numpy()
    np.testing.assert_allclose(adapted(words_BN), wanted, rtol=1e-4, atol=1e-4)
    assert np.abs(wanted - ours(words_BN)).max() > 0.1
    # A run that has learned them is written as a model and beside it as what peft opens.
    run = tmp_path / "run"
    text = {"objective": "masked", "N": 13, "head": "tied+gelu"}
    saved = {"experiment": "language", "init_from": str(tmp_path), "text": text, "model": families.FREE | ours.model}
    saved["train"] = {"keep_best": ""}
    saved["optim"] = {"lora": f"2:{','.join(path.split('/')[1] for path in places)}:5"}
    published.keep(run, 2, params)
    (run / "config.json").write_text(json.dumps({"config": saved}))
    own = {path: leaf for path, leaf in shapes.flat(params).items() if path.startswith("lora/")}
    safetensors.write(run / adapters.FILE, own)
    export.run(run, family="bert", workdir=tmp_path / "out")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    for model in (
        peft.PeftModel.from_pretrained(again, tmp_path / "out" / "adapters"),
        transformers.BertForMaskedLM.from_pretrained(tmp_path / "out"),
    ):
        found = model.eval()(torch.tensor(words_BN)).logits.detach().numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    rules = gpt2.lines({"tied_output": True}, gpt2.FAMILY)  # queries, keys and values in one tensor
    assert "blocks/score/Uq_HKD" in adapters.write_peft(run, tmp_path, settings=saved, rules=rules)
