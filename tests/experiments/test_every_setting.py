"""A changed setting changes a program, the data or the plan of a run, or is refused."""

import contextlib
import hashlib
import io
import re
from collections.abc import Callable

import jax
import numpy as np
import pytest
import small_files
import tiny

from configs import base
from experiments.config import by_name, errors, settings as configs
from experiments.devices import mesh as meshes
from experiments.engine import run as runs, run_plan, train_step
from experiments.pretrained import adapters, warm_start
from experiments.studies import study as studies

# Another valid value for each setting. An experiment ignores settings that it does not have.
OTHER_VALUES = {
    "": dict(seed=7, init_from="no_such_folder", init_fresh="head", log=["tensorboard", "symmetry"]),
    "mesh": dict(data=2, fsdp=2, tensor=2, sequence=2, seed=2),
    "model": dict(M=3, D=16, H=1, G=1, K=2, F=10, window=3, segments=2, cap=5.0, output_cap=5.0, mup=4)
    | dict(score="tied", score_std=0.5, output_std=0.5, embed_std=0.5, mup_depth="completep:1", flax="nowhere:Model")
    | dict(scale="1", value="full_rank", norm="rms", mlp="relu", position="sinusoidal", relative_position="alibi")
    | dict(block="post_norm", outer_norm="first", bias="none", dropout=0.5, attention="explicit", remat="full")
    | dict(compute_dtype="bfloat16", weights="user_weights:shares"),
    "optim": dict(name="muon", muon_lr_multiplier=3.0, momentum=0.5, learning_rate=0.5, schedule="linear", ema=0.5)
    | dict(warmup_steps=1, betas=[0.5, 0.5], weight_decay=0.5, frozen=["head"], lora="2", clip=0.5),
    "train": dict(steps=7, loss="nowhere:nothing", metrics=["top5"], watch=["gradient_norms"], batch_size=32)
    | dict(growth=[[2, 32]], accumulation=2, nan="skip", deterministic=True, log_every=2, evaluate_every=2)
    | dict(save_every=2, keep_best="eval/loss", patience=1),
    "text": dict(N=16, documents=True, field="text", head="relu", objective="masked", tokenizer="characters"),
    "image": dict(augment=["shift"], head="class_token", patch=4, size=12),
    "pairs": dict(N=16, vocabulary=300),
    "synthetic": dict(task="ring_causal"),
}
OTHER_VALUES = {
    f"{section}.{name}".lstrip("."): value for section, some in OTHER_VALUES.items() for name, value in some.items()
}
SECTIONS = {"language": ["text"], "translation": ["pairs"], "text_classification": ["texts"], "synthetic": []}
QUICK = ("convolution",)  # `pytest -m slow` traces the others
EXPERIMENTS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in tiny.EXPERIMENTS
    if name != "ablation"
]
STUDY = {
    "study.arms": [["one", {}], ["other", {"model.score": "tied"}]],
    "study.conditions": [["short", {"train.steps": 3}]],
    "study.experiment": "vision",
    "study.looks": 2,
    "study.margin": 0.1,
    "study.metric": "eval/accuracy",
    "study.seeds": [5, 6],
    "study.threshold": 2.0,
    "study.tune": [["optim.learning_rate", [0.1, 0.2]]],
    "study.tune_seeds": [2000],
}


def make_parts(experiment: str, changes: dict) -> dict[str, Callable[[], object]]:
    """Return {part: function that computes the part of a run with these changes, without compilation}.

    The cheapest part is first.
    """
    settings = tiny.settings(experiment, model=experiment != "convolution", **changes)
    with contextlib.redirect_stdout(io.StringIO()):
        settings = warm_start.adopt_architecture(settings, None)
        devices = runs.make_mesh(settings)
        work = adapters.prepare_work(settings, by_name.load_experiment(experiment), devices)
        warm_start.load(settings, work.task.init, resumed=False, files=work.files)
        plan, state = run_plan.prepare(settings, work.task, devices)
    batches, alive = [work.task.train[0], work.task.train[1], *work.task.evaluation], train_step.abstract_alive(devices)
    return {
        "plan": lambda: (
            [plan.steps, plan.seed, plan.every, plan.log, plan.keep_best, plan.growth, plan.accumulation]
            + [plan.task.deterministic]
        ),
        "devices": lambda: devices.shape,
        "parameters": lambda: state.params,
        "files": lambda: work.files,
        "data": lambda: jax.tree.map(lambda x: hashlib.sha256(np.ascontiguousarray(x)).hexdigest(), batches),
        "initial": lambda: jax.make_jaxpr(work.task.init)(jax.random.key(0)),
        "evaluation": lambda: jax.make_jaxpr(work.task.loss)(state.params, batches[-1]),
        "step": lambda: jax.make_jaxpr(plan.step)(state, meshes.abstract_batch(devices, batches[0]), alive),
    }


def format_part(part: object) -> str:
    """Return the text of a part without memory addresses, which differ between traces."""
    return re.sub("0x[0-9a-f]+", "", str(part))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_changed_setting_changes_the_run_or_is_refused(experiment, tmp_path):
    if experiment == "translation":
        pytest.importorskip("sacrebleu", reason='the library sacrebleu is missing: pip install -e ".[text]"')
    sections = SECTIONS.get(experiment, ["image"])
    sources, changed_sources = (
        {"mesh.data": 1} | small_files.sources(tmp_path, sections, word) for word in ("one", "another")
    )
    before, second = (
        {kind: format_part(make()) for kind, make in make_parts(experiment, sources).items()} for _ in range(2)
    )
    assert before == second  # otherwise the comparisons below would be meaningless
    unused_keys = []
    for key in sorted(configs.flat(base.get_config(experiment).to_dict()).keys() - {"experiment"}):
        value = OTHER_VALUES[key] if key in OTHER_VALUES else changed_sources[key]
        try:
            after = make_parts(experiment, sources | {key: value})
        except (errors.UserError, errors.RunError):
            continue
        if all(before[kind] == format_part(after[kind]()) for kind in before):
            unused_keys.append(key)
    assert unused_keys == []


def test_a_changed_setting_of_a_study_changes_the_study_or_is_refused():
    """test_tuning.py tests study.keep_weights."""
    default = {"study.arms": [["one", {}], ["two", {"model.score": "tied"}]], "study.experiment": "language"}
    keys = {key for key in base.get_config("ablation", of="language").study.keys()} - {"keep_weights"}
    assert {f"study.{key}" for key in keys} == STUDY.keys()
    before, unused_keys = studies.read(tiny.settings("ablation", **default)), []
    for key, value in STUDY.items():
        try:
            unused_keys += [key] * (studies.read(tiny.settings("ablation", **default | {key: value})) == before)
        except errors.UserError as error:
            assert key.rpartition(".")[2] in str(error)
    assert unused_keys == []
