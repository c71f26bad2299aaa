"""launch.run trains in the caller's process as the command does."""

import contextlib
import gc
import io
import json
import os
import pathlib
import signal
import sys
import time

import dots
import jax
import numpy as np
import pytest
import tiny
from errors import raises

import launch
from experiments.config import by_name, errors
from experiments.engine import run as runs, summary as summaries
from experiments.folder import manifest, records

unbroken, unbroken_folder = dots.unbroken, dots.unbroken_folder


def draw_figures(work, params, folder, rows):
    (folder / "figures" / "dots.png").write_bytes(b"dots")
    return [folder / "figures" / "dots.png"]


@pytest.fixture(scope="module", autouse=True)
def without_figures():
    with tiny.without_figures(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dots, "figures", draw_figures)
        yield


def launch_run(folder, **changes):
    return launch.run(tiny.config_file(folder, "dots", **dots.CHANGES), folder / "run", **changes)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def list_names(folder):
    """Return the relative paths of all files except the figure and those whose names contain a time or a digest."""
    names = {str(file.relative_to(folder)) for file in folder.rglob("*")}
    return {name for name in names if "/state/" not in name and "tfevents" not in name} - {"figures/dots.png"}


@pytest.fixture(scope="module")
def call_result(tmp_path_factory):
    """Return the result of launch.run in this process, and its stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return launch_run(tmp_path_factory.mktemp("called"), **{"seed": 0, "train.nan": "abort"}), out


def test_a_run_in_this_process_equals_that_of_the_command(call_result, unbroken_folder):
    (result, out), command_folder = (call_result[0], call_result[1].getvalue()), unbroken_folder / "run"
    assert out.count("dots: 61 points") == 1 and out.count("step 4: eval/") == 1 and "throughput" in out
    assert list_names(result.folder) == list_names(command_folder)
    assert records.read_metrics(result.folder) == records.read_metrics(command_folder)
    assert result.summary == summary(result.folder)
    assert result.summary["params_sha256"] == summary(command_folder)["params_sha256"]
    assert result.figures == [result.folder / "figures" / "dots.png"]
    batch = result.batch
    correct_B = np.asarray(result.apply(result.params, batch)).argmax(-1) == batch["label_B"]
    assert correct_B.shape == (5,) and result.batch.keys() == {"x_BD", "label_B", "weight_B"}


def test_a_second_call_returns_the_first_result_also_with_the_saved_config(call_result, capsys):
    first, folder = call_result[0], call_result[0].folder.parent
    second = launch_run(folder)
    assert "holds a finished run: nothing to do" in capsys.readouterr().out
    assert repr(first) == f"Result(folder={str(first.folder)!r}; summary, params, apply, batch, figures)"
    assert second._replace(params=0, apply=0, batch=0) == first._replace(params=0, apply=0, batch=0)
    jax.tree.map(np.testing.assert_array_equal, second.params, first.params)
    np.testing.assert_array_equal(*(one.apply(one.params, one.batch) for one in (first, second)))
    assert launch.run(first.folder / "config.json", first.folder, experiment="dots").summary == first.summary


def test_the_step_to_resume_from_is_an_argument(call_result):
    with raises(errors.UserError, "resume=5", "its steps are: 6"):
        launch_run(call_result[0].folder.parent, resume=5)


def test_apply_of_a_built_in_experiment_returns_its_logits(tmp_path):
    (tmp_path / "text.txt").write_bytes(tiny.TEXT)
    text = {"text__source": str(tmp_path / "text.txt"), "text__N": 17}
    for name, changes, batch, shape in (("language", text, "w_BN", (16, 17)), ("vision", {}, "label_B", (336,))):
        settings = tiny.settings(name, **changes)
        work = by_name.load_experiment(name).prepare(settings, runs.make_mesh(settings))
        params = jax.eval_shape(work.task.init, jax.random.key(0))
        logits = jax.eval_shape(work.apply, params, work.task.evaluation[0])
        assert logits.shape[:-1] == work.task.evaluation[0][batch].shape == shape


def test_a_mistake_is_reported_without_a_traceback(tmp_path):
    with raises(errors.UserError, "train.steps", "many") as caught:
        launch_run(tmp_path, **{"train.steps": "many"})
    assert caught.value._render_traceback_() == [str(caught.value)]
    assert caught.value.__context__ is None  # a notebook would keep its frames and their arrays in memory
    assert not (tmp_path / "run").exists()


def test_the_stop_button_saves_and_the_same_call_resumes(tmp_path, monkeypatch, unbroken, capfd):
    gc.collect()  # frees arrays of earlier tests
    arrays, folder = len(jax.live_arrays()), tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        dots.signal_with_batch(patch, 3, signal.SIGINT)
        launch_run(tmp_path, **{"seed": 0})
    sentence = str(caught.value)
    assert isinstance(caught.value, errors.Interrupted) and caught.value._render_traceback_() == [sentence]
    assert "stopping after this stage or step" in capfd.readouterr().err
    reason, call = sentence.split("; go on with: ")
    assert reason == f"stopped after step 3, which is saved in {folder}"
    assert len(jax.live_arrays()) <= arrays
    result = eval(call, {"launch": launch})
    assert result.folder == folder and dots.read_result(tmp_path) == unbroken


def test_a_second_interrupt_stops_at_once(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, raises(KeyboardInterrupt, "launch.run("):
        dots.signal_with_batch(patch, 3, signal.SIGINT, signal.SIGINT)
        launch_run(tmp_path)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert not (tmp_path / "run" / "lock").exists()


class Deleted:
    def __del__(self):  # Python prints and ignores an exception here
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_before_training_stops_the_run_also_where_python_ignores_exceptions(tmp_path, monkeypatch):
    """Nothing is written. Without a workdir, the printed call names the default folder."""
    monkeypatch.chdir(tmp_path)
    linear_task = tiny.linear_task
    monkeypatch.setattr(tiny, "linear_task", lambda **options: (Deleted(), linear_task(**options))[1])
    with raises(errors.Interrupted, "dots_config.py', workdir='runs/dots_config/"):
        launch.run(tiny.config_file(tmp_path, "dots", **dots.CHANGES))
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_between_two_figures_stops_the_run_and_its_result_is_kept(tmp_path, monkeypatch):
    def draw(*arguments):
        Deleted()
        yield {"eval/more": 0.25}
        yield pytest.fail("a figure is drawn after the interrupt")

    monkeypatch.setattr(dots, "figures", draw)
    with raises(errors.Interrupted, "go on with"):
        launch_run(tmp_path)
    assert summary(tmp_path / "run")["steps"] == 6


def test_a_sigterm_saves_and_then_calls_the_previous_handler(tmp_path, monkeypatch):
    """A second signal during the save does not end the process before the save is on the disk."""
    calls, write = [], manifest.write

    def signal_and_write(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        write(*arguments, **options)

    monkeypatch.setattr(manifest, "write", signal_and_write)
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(dots.list_steps(tmp_path)))
    try:
        with raises(errors.Interrupted, "step 3"):
            dots.signal_with_batch(monkeypatch, 3, signal.SIGTERM)
            launch_run(tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [[3]]


USER_EXPERIMENT = """
import dots
import my_size
from experiments.config import errors
config = dots.config
def prepare(settings, devices):
    raise errors.UserError(f"version {my_size.VERSION} takes {settings.train.steps} steps")
"""


def test_changed_modules_of_the_user_are_imported_again(tmp_path, monkeypatch):
    """This includes modules that they import and modules that a config imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "configs_of_mine").mkdir()
    (tmp_path / "my_dots.py").write_text(USER_EXPERIMENT)
    file = pathlib.Path(tiny.config_file(tmp_path / "configs_of_mine", "my_dots", **dots.CHANGES))
    file.write_text(
        "import my_steps\n" + file.read_text().replace("return", "config.train.steps = my_steps.N\n    return")
    )
    modules = {name: sys.modules[name] for name in ("tiny", "launch", "dots")}
    for version in (2, 30):
        (tmp_path / "my_size.py").write_text(f"VERSION = {version}\n")
        (tmp_path / "configs_of_mine" / "my_steps.py").write_text(f"N = {version}\n")
        with raises(errors.UserError, f"version {version} takes {version} steps"):
            launch.run(file, tmp_path / "run")
    assert modules == {name: sys.modules[name] for name in modules}
    for name in ("my_size", "my_steps", "my_dots"):
        del sys.modules[name]


def test_a_figure_that_fails_does_not_end_the_run_and_earlier_numbers_stay(tmp_path, monkeypatch, capsys):
    def draw_and_fail(work, params, folder, rows):
        assert summary(folder)["params_sha256"]  # the summary is written before the figures are drawn
        yield {"eval/more": 0.25}
        raise MemoryError("Unable to allocate 75 GiB")

    monkeypatch.setattr(dots, "figures", draw_and_fail)
    result = launch_run(tmp_path)
    out = capsys.readouterr().out
    assert result.summary["eval/more"] == 0.25 and result.summary == summary(result.folder)
    assert "75 GiB" in out and "eval/more" in out and result.figures == []
    assert [*result.summary].index("eval/more") < [*result.summary].index("guess")


def test_figures_that_end_the_process_do_not_end_the_run(tmp_path, capsys):
    assert summaries.draw(lambda *arguments: sys.exit(0), {}, tmp_path) == ([], {})
    assert "not all figures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metrics", "constant", "warnings"),
    [
        ({"accuracy": 0.3}, {"accuracy": 0.4}, ["accuracy"]),
        ({"accuracy": 0.5}, {"accuracy": 0.4}, []),
        ({"loss": 2.0}, {"loss": 1.0}, ["loss"]),
        ({"loss": 0.5, "accuracy": 0.1}, {"loss": 1.0, "accuracy": 0.2}, ["accuracy"]),
        ({"loss": float("nan")}, {"loss": 1.0}, ["loss"]),
    ],
)
def test_a_result_that_is_worse_than_the_constant_guess_has_a_warning(metrics, constant, warnings):
    row = {"wall_seconds": 1.0, "compile_seconds": 1.0, "tokens_per_second": 0, "guess": dict.fromkeys(constant, "A")}
    row |= {f"eval/{name}": value for name, value in metrics.items()}
    row |= {f"baseline/{name}": value for name, value in constant.items()}
    lines = [line for line in summaries.format_result(row, []).splitlines() if "warning" in line]
    assert len(lines) == len(warnings) and all(
        f"eval/{name} " in line for name, line in zip(warnings, lines, strict=True)
    )
