"""launch.run does in the caller's process what the command does."""

import contextlib
import functools
import gc
import io
import json
import os
import pathlib
import signal
import sys

import dots
import jax
import numpy as np
import published
import pytest
import tiny
from errors import raises

import launch
from experiments.engine import by_name, errors, log, run as runs, summary as summaries

ROOT = pathlib.Path(__file__).parents[2]


def drawing(params, folder, rows):
    (folder / "figures" / "dots.png").write_bytes(b"dots")
    return [folder / "figures" / "dots.png"]


@pytest.fixture(scope="module", autouse=True)
def quick():
    with tiny.without_figures(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dots, "figures", drawing)
        yield


@pytest.fixture(scope="module")
def commanded(tmp_path_factory):
    """The folder of a run of the command."""
    folder = tmp_path_factory.mktemp("commanded")
    file = tiny.config_file(folder, "dots", **dots.CHANGES)
    assert tiny.run("--config", file, "--workdir", str(folder / "run")).code == 0
    return folder / "run"


def run(folder, **changes):
    return launch.run(tiny.config_file(folder, "dots", **dots.CHANGES), folder / "run", **changes)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def files(folder):
    """Their names, but for those that hold a time or a digest."""
    names = {str(file.relative_to(folder)) for file in folder.rglob("*")}
    return {name for name in names if "/state/" not in name and "tfevents" not in name}


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """The result of launch.run in this process, and its output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return run(tmp_path_factory.mktemp("called"), **{"seed": 0, "train.nan": "abort"}), out


def test_a_run_in_this_process_is_that_of_the_command(called, commanded):
    result, out = called[0], called[1].getvalue()
    assert out.count("dots: 61 points") == 1 and out.count("step 4: eval/") == 1 and "throughput" in out
    assert files(result.folder) == files(commanded) and log.read(result.folder) == log.read(commanded)
    assert result.summary == summary(result.folder)
    assert result.summary["params_sha256"] == summary(commanded)["params_sha256"]
    assert result.figures == [result.folder / "figures" / "dots.png"]
    batch = result.batch
    right_B = np.asarray(result.apply(result.params, batch)).argmax(-1) == batch["label_B"]
    assert right_B.shape == (5,) and result.batch.keys() == {"x_BD", "label_B", "weight_B"}


def test_a_second_call_gives_the_result_of_the_first_also_by_the_config_that_it_saved(called, capsys):
    first, folder = called[0], called[0].folder.parent
    second = run(folder)
    assert "holds a finished run: nothing to do" in capsys.readouterr().out
    assert repr(first) == f"Result(folder={str(first.folder)!r}; summary, params, apply, batch, figures)"
    assert second._replace(params=0, apply=0, batch=0) == first._replace(params=0, apply=0, batch=0)
    jax.tree.map(np.testing.assert_array_equal, second.params, first.params)
    np.testing.assert_array_equal(*(one.apply(one.params, one.batch) for one in (first, second)))
    assert launch.run(first.folder / "config.json", first.folder, experiment="dots").summary == first.summary


def test_the_step_to_resume_from_is_an_argument(called, tmp_path, capsys):
    folder = published.changed(called[0].folder, tmp_path / "run")
    again = functools.partial(launch.run, folder / "config.json", folder, experiment="dots", **{"train.steps": 8})
    first = again().summary
    assert again(resume=6).summary["params_sha256"] == first["params_sha256"]
    assert f"resuming {folder} at step 6" in capsys.readouterr().out.partition("step 8")[2]


def test_apply_of_a_built_in_experiment_returns_its_logits(tmp_path):
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    text = {"text__source": str(tmp_path / "text.txt"), "text__N": 17}
    for name, changes, batch, shape in (("language", text, "w_BN", (16, 17)), ("vision", {}, "label_B", (336,))):
        settings = tiny.settings(name, **changes)
        work = by_name.load_experiment(name).prepare(settings, runs.make_mesh(settings))
        params = jax.eval_shape(work.task.init, jax.random.key(0))
        logits = jax.eval_shape(work.apply, params, work.task.evaluation[0])
        assert logits.shape[:-1] == work.task.evaluation[0][batch].shape == shape


def test_a_mistake_is_a_sentence(tmp_path):
    with raises(errors.UserError, "train.steps", "many") as caught:
        run(tmp_path, **{"train.steps": "many"})
    assert caught.value._render_traceback_() == [str(caught.value)]
    assert caught.value.__context__ is None  # a notebook would hold its frames, and the arrays that these hold
    assert not (tmp_path / "run").exists()


def test_the_stop_button_saves_and_the_same_call_goes_on(tmp_path, monkeypatch, commanded, capfd):
    gc.collect()  # arrays of earlier tests
    arrays, where = len(jax.live_arrays()), tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        dots.signal_with_batch(patch, 3, signal.SIGINT)
        run(tmp_path, **{"seed": 0})
    sentence = str(caught.value)
    assert isinstance(caught.value, errors.Interrupted) and caught.value._render_traceback_() == [sentence]
    assert "stopping; what is done is saved first" in capfd.readouterr().err
    reason, call = sentence.split("; go on with: ")
    assert reason == f"stopped after step 3, which is saved in {where}"
    assert len(jax.live_arrays()) <= arrays
    result = eval(call, {"launch": launch})
    assert result.folder == where and result.summary["params_sha256"] == summary(commanded)["params_sha256"]
    assert log.read(where) == log.read(commanded)


def test_a_second_interrupt_stops_at_once(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, raises(KeyboardInterrupt, "launch.run("):
        dots.signal_with_batch(patch, 3, signal.SIGINT, signal.SIGINT)
        run(tmp_path)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert not (tmp_path / "run" / "lock").exists()


def test_before_training_it_stops_at_once_and_nothing_is_written(tmp_path, monkeypatch):
    """Without a workdir, the call to resume it names the folder that was chosen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny, "linear_task", lambda **options: os.kill(os.getpid(), signal.SIGINT))
    with raises(errors.Interrupted, "dots_config.py', workdir='runs/dots_config/"):
        launch.run(tiny.config_file(tmp_path, "dots", **dots.CHANGES))
    assert not (tmp_path / "runs").exists()


def test_a_sigterm_saves_and_then_calls_the_handler_from_before(tmp_path, monkeypatch):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(list((tmp_path / "run").iterdir())))
    try:
        with raises(errors.Interrupted, "step 3"):
            dots.signal_with_batch(monkeypatch, 3, signal.SIGTERM)
            run(tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(heard) == 1 and tmp_path / "run" / "checkpoints" in heard[0]


OWN = """
import dots
import my_size
from experiments.engine import errors
config = dots.config
def prepare(settings, devices):
    raise errors.UserError(f"version {my_size.VERSION} takes {settings.train.steps} steps")
"""


def test_the_users_modules_are_imported_as_they_are_now(tmp_path, monkeypatch):
    """Also those that they import, and those that a config imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "configs_of_mine").mkdir()
    (tmp_path / "my_dots.py").write_text(OWN)
    file = pathlib.Path(tiny.config_file(tmp_path / "configs_of_mine", "my_dots", **dots.CHANGES))
    file.write_text(
        "import my_steps\n" + file.read_text().replace("return", "config.train.steps = my_steps.N\n    return")
    )
    kept = {name: sys.modules[name] for name in ("tiny", "launch", "dots")}
    for version in (2, 30):
        (tmp_path / "my_size.py").write_text(f"VERSION = {version}\n")
        (tmp_path / "configs_of_mine" / "my_steps.py").write_text(f"N = {version}\n")
        with raises(errors.UserError, f"version {version} takes {version} steps"):
            launch.run(file, tmp_path / "run")
    assert kept == {name: sys.modules[name] for name in kept}
    for name in ("my_size", "my_steps", "my_dots"):
        del sys.modules[name]


def test_a_figure_that_fails_ends_no_run_and_the_earlier_numbers_stay(tmp_path, monkeypatch, capsys):
    def broken(params, folder, rows):
        assert summary(folder)["params_sha256"]  # it is there before anything is drawn
        yield {"eval/more": 0.25}
        raise MemoryError("Unable to allocate 75 GiB")

    monkeypatch.setattr(dots, "figures", broken)
    result = run(tmp_path)
    out = capsys.readouterr().out
    assert result.summary["eval/more"] == 0.25 and result.summary == summary(result.folder)
    assert "75 GiB" in out and "eval/more" in out and result.figures == []
    assert [*result.summary].index("eval/more") < [*result.summary].index("guess")


@pytest.mark.parametrize(
    ("reached", "constant", "worse"),
    [
        ({"accuracy": 0.3}, {"accuracy": 0.4}, ["accuracy"]),
        ({"accuracy": 0.5}, {"accuracy": 0.4}, []),
        ({"loss": 2.0}, {"loss": 1.0}, ["loss"]),
        ({"loss": 0.5, "accuracy": 0.1}, {"loss": 1.0, "accuracy": 0.2}, ["accuracy"]),
        ({"loss": float("nan")}, {"loss": 1.0}, ["loss"]),
    ],
)
def test_a_result_that_is_no_better_than_the_guess_says_so(reached, constant, worse):
    row = {"wall_seconds": 1.0, "compile_seconds": 1.0, "tokens_per_second": 0, "guess": dict.fromkeys(constant, "A")}
    row |= {f"eval/{name}": value for name, value in reached.items()}
    row |= {f"baseline/{name}": value for name, value in constant.items()}
    lines = [line for line in summaries.format_result(row, []).splitlines() if "warning" in line]
    assert len(lines) == len(worse) and all(f"eval/{name} " in line for name, line in zip(worse, lines, strict=True))
