"""A run whose numbers go wrong leaves a bundle, and the bundle shows on one device what was wrong."""

import json
import pathlib
import shutil
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from experiments.engine import disk, errors, replay, step as steps

OWN = """
import dots
import jax.numpy as jnp

config = dots.config

def prepare(settings, devices):
    "As that of dots, until the bias has left the neighbourhood of its start."
    work = dots.prepare(settings, devices)

    def loss_and_metrics(params, batch, key_B, over=None):
        ratios = work.task.loss_and_metrics(params, batch, key_B, over)
        total, count = ratios["loss"]
        return ratios | {"loss": (total * jnp.where(jnp.max(jnp.abs(params["b_C"])) > 0.02, jnp.nan, 1), count)}

    return work._replace(task=work.task._replace(loss_and_metrics=loss_and_metrics))
"""


@pytest.fixture(scope="module")
def aborted(tmp_path_factory):
    """(folder, outcome) of a run on eight devices of the user's own experiment, which goes wrong at some step."""
    folder = tmp_path_factory.mktemp("replay")
    with tiny.without_figures(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        (folder / "my_dots.py").write_text(OWN)
        changes = {"train.batch_size": 16, "train.steps": 20, "optim.learning_rate": 0.01, "optim.warmup_steps": 1}
        changes |= {"train.accumulation": 2, "train.log_every": 1, "train.save_every": 1}
        yield folder, tiny.run("--config", tiny.config_file(folder, "my_dots", **changes), "--workdir", "run")
    sys.modules.pop("my_dots", None)


def bundle_of(folder):
    (bundle,) = (folder / "run" / "replay").iterdir()
    return bundle


def copied(folder, to):
    return shutil.copytree(bundle_of(folder), to / "step")


def replayed(bundle):
    return tiny.run("--replay", str(bundle), "--config.experiment=my_dots")


def test_a_run_that_aborts_leaves_a_whole_bundle(aborted):
    folder, outcome = aborted
    assert outcome.code == 1 and outcome.err.count("\n") == 1 and "Traceback" not in outcome.err
    bundle = bundle_of(folder)
    assert f"--replay run/replay/{bundle.name} " in outcome.err
    assert {file.name for file in bundle.iterdir()} == {"config.json", "state.npz", "batch.npz", "info.json"}
    assert (folder / "run" / "source" / "my_dots.py").read_text() == OWN
    names = {file.name for file in (folder / "run" / "source").iterdir()} - {"checkout.diff"}  # where this has edits
    assert names == {"my_dots.py", "my_dots_config.py"}
    told = json.loads((bundle / "info.json").read_text())
    step = told["step"]
    assert bundle.name == f"step_{step}" and told["loss"] == "nan" and len(told["examples"]) == 16
    assert f"error: step {step}: the loss (nan) and the gradient norm (nan) are not finite" in outcome.err
    assert json.loads((bundle / "config.json").read_text()).keys() == {"config", "versions", "commit", "devices"}
    with np.load(bundle / "state.npz", allow_pickle=False) as state, np.load(bundle / "batch.npz") as batch:
        assert state["step"] == step - 1 and np.isfinite(state["params/b_C"]).all()
        assert batch["example_B"].tolist() == told["examples"]
        assert any("mu" in name for name in state)
    assert sorted(int(file.name) for file in (folder / "run" / "checkpoints").iterdir())[-1] == step - 1


def test_the_bundle_shows_it_again_on_one_device_and_writes_nothing(aborted):
    folder, outcome = aborted
    before = sorted(str(file) for file in folder.rglob("*"))
    again = replayed(bundle_of(folder))
    assert again.code == 1 and "1 of 8 devices" in again.out
    words = outcome.err.partition("; python launch.py")[0]
    assert again.err == words + "\n"  # the same step, numbers, place and examples
    assert "  loss           nan\n" in again.out and "  gradient norm  nan\n" in again.out
    assert "  gradient/G_CD: 15 not finite\n" in again.out
    assert "parameters/G_CD" in again.out and "\n  parameters/" not in again.out
    assert sorted(str(file) for file in folder.rglob("*")) == before


def test_what_is_finite_here_is_said_to_be_and_what_only_the_update_makes_is_not(aborted, tmp_path):
    """The batch and the state of a step that went well, and the same with a running mean that has run away."""
    folder, _ = aborted
    bundle = copied(folder, tmp_path)
    with np.load(bundle / "state.npz", allow_pickle=False) as file:
        state = dict(file)
    state |= {"params/b_C": 0 * state["params/b_C"]}
    np.savez(bundle / "state.npz", **state)
    again = replayed(bundle)
    assert again.code == 0 and again.err == "" and "all of it is finite here" in again.out
    assert "not finite" not in again.out and "loss           nan" not in again.out
    (mean,) = [name for name in state if name.endswith("/mu/b_C")]
    np.savez(bundle / "state.npz", **(state | {mean: np.full_like(state[mean], np.inf)}))
    again = replayed(bundle)
    assert again.code == 1 and "an updated parameter is not finite" in again.err and "finite here" not in again.out


@pytest.mark.parametrize("name", ["config.json", "info.json", "batch.npz", "state.npz"])
@pytest.mark.parametrize("damage", ["absent", "cut", "other"])
def test_a_damaged_bundle_is_told_in_a_sentence(aborted, tmp_path, name, damage):
    folder, _ = aborted
    bundle = copied(folder, tmp_path)
    content = (bundle / name).read_bytes()
    if damage == "absent":
        (bundle / name).unlink()
    else:
        (bundle / name).write_bytes(content[: len(content) // 2] if damage == "cut" else b"[1, 2]")
    told = replayed(bundle)
    assert told.code == 2 and told.err.startswith("error: ") and told.err.count("\n") == 1


SHAPE = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"
HEADERS = [
    SHAPE % "(10000000000000,)",
    SHAPE % "(-1,)",
    SHAPE.replace("<f4", "V0") % f"({10**30},)",
    "(" * 5000,
    "{[]: 1}",
    "\n  1\n 2",
]


def small_bundle(folder: pathlib.Path) -> tuple[pathlib.Path, steps.State]:
    """The bundle of step 3 of a model of five numbers, and their state."""
    state = steps.State(step=jnp.int32(2), params={"x_D": jnp.arange(5.0)}, opt_state=(), key=jax.random.key(1))
    (folder / "config.json").write_text("{}")
    seen = replay.Failure(step=3, loss=float("nan"), norm=1.0, batch={"example_B": np.arange(7)})
    return replay.write(folder, seen, state), state


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("name", ["batch.npz", "state.npz"])
def test_a_header_that_lies_is_a_sentence(tmp_path, name, header):
    bundle, state = small_bundle(tmp_path)
    with zipfile.ZipFile(bundle / name, "w") as file:
        begin = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
        file.writestr("params/x_D.npy", begin + header.encode() + bytes(20))
    told = "announces an array of shape" if header == HEADERS[0] else ""  # before numpy makes room for it
    with pytest.raises(errors.UserError, match=f"{bundle / name} is damaged.*{told}"):
        replay.read(bundle, state)


def test_a_bundle_for_which_there_is_no_room_is_a_sentence(tmp_path, monkeypatch):
    bundle, state = small_bundle(tmp_path)
    monkeypatch.setattr(disk, "host_memory", lambda: 100)
    with pytest.raises(errors.UserError, match=rf"what {bundle / 'batch.npz'} holds unpacked needs .* of memory"):
        replay.read(bundle, state)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[" * 100_000, "info.json cannot be read as JSON"),
        ('{"step": 3' + " " * 10_000 + "}", "info.json cannot be read as JSON: it has 10,011 bytes, and 10,000 are"),
        ('{"step": 1e999}', "its info.json tells no step"),
        ("{}", "its info.json tells no step"),
    ],
)
def test_numbers_of_a_bundle_that_are_none_are_a_sentence(tmp_path, monkeypatch, content, told):
    monkeypatch.setattr(disk, "LARGEST_TEXT", 10_000 if len(content) < 100_000 else disk.LARGEST_TEXT)
    bundle, state = small_bundle(tmp_path)
    (bundle / "info.json").write_text(content)
    with pytest.raises(errors.UserError, match=told):
        replay.read(bundle, state)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", 'has experiment = "my_dots", a program that would be run'),  # unless it is named
        ("--config.experiment=my_dots --config.dots.bias=False", "is not that of the config beside it"),
        ("--config.experiment=my_dots --dry_run", "leave the other flags out"),
        ("--config.experiment=my_dots --workdir=elsewhere", "leave the other flags out"),
    ],
)
def test_a_replay_runs_no_code_that_is_not_named_and_takes_its_own_model_and_flags(aborted, words, sentence):
    told = tiny.run("--replay", str(bundle_of(aborted[0])), *words.split())
    assert told.code == 2 and sentence in told.err


def test_what_is_no_bundle_or_trains_no_single_model_is_a_sentence(tmp_path):
    for sentence in ("it has no config.json", "ablation leaves none"):
        told = tiny.run("--replay", str(tmp_path))
        assert (told.code, told.err) == (2, f"error: {tmp_path} is no replay bundle: {sentence}\n")
        (tmp_path / "config.json").write_text('{"config": {"experiment": "ablation"}}')
