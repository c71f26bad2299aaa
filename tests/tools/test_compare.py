"""compare: tables and a figure of runs, of unfinished runs, and of CSV files of other programs."""

import json

import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.studies import figures as study_figures
from experiments.tools import compare

SETTINGS = {"experiment": "vision", "model": {"D": 32, "score": "tied"}, "train": {"steps": 20}}


def write_run(folder, losses, *, steps=20, sha256="a", finished=True, score="tied", train=(), **summary):
    """Write a run with these evaluation losses, each ten steps after the last. Return its folder."""
    folder.mkdir(parents=True)
    config = SETTINGS | {"model": {"D": 32, "score": score}, "train": {"steps": steps, **dict(train)}}
    (folder / "config.json").write_text(json.dumps({"config": config, "data": {"sha256": sha256}}))
    rows = [{"step": 10 * i, "train/loss": 2.0, "eval/loss": x} for i, x in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        summary = {"steps": 20, "params": 1234, "wall_seconds": 5.25, "eval/loss": losses[-1]} | summary
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def run_command(*argv) -> tiny.Outcome:
    return tiny.call(compare.run, compare.HELP, *argv, positional="runs")


def read_table(out, first) -> list[dict[str, str]]:
    """Return the rows of the printed table whose head begins with these names, without labels of several words."""
    lines = out.split("\n\n")
    table = next(block.splitlines() for block in lines if block.split()[: len(first)] == first)
    head, *rows = [line.strip().replace("at step", "at_step").split("  ") for line in table]
    head, *rows = [[cell.strip() for cell in row if cell.strip()] for row in (head, *rows)]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture
def drawn(monkeypatch):
    """Return the list of the panels of all figures, which are not written."""
    panels = []
    monkeypatch.setattr(study_figures, "draw_panels", lambda rows, *_, **__: panels.extend(rows[0]) or [None])
    monkeypatch.setattr(compare.plots, "write", lambda drawing, file: file)
    return panels


def test_the_tables_have_what_differs_and_the_results(tmp_path, drawn):
    write_run(tmp_path / "a", [0.5, 0.75], **{"eval/chrf": 40.0})
    write_run(tmp_path / "b", [0.9], finished=False, score="asymmetric")
    code, out, err = run_command(tmp_path / "a", f"--output={tmp_path}", tmp_path / "b")
    assert (code, err) == (0, "")
    table = [("1", '"tied"'), ("2", '"asymmetric"')]
    assert [(*row.values(),) for row in read_table(out, ["run", "model.score"])] == table
    first, second = read_table(out, ["run", "eval/loss"])
    expected = {"run": "1 a", "eval/loss": "0.7500", "best": "0.5000", "at_step": "10", "eval/chrf": "40.0000"}
    assert first == expected | {"steps": "20", "seconds": "5.2", "parameters": "1,234"}
    assert (second["run"], second["steps"], second["seconds"], second["eval/chrf"]) == ("2 b", "10 of 20", "-", "-")
    assert compare.NOISE.split()[-1] in out and str(tmp_path / "compare.png") in out
    training, evaluation = drawn
    assert training.curves["1 a"][1].tolist() == [[2.0, 2.0]] and evaluation.title == "eval/loss"
    assert [x.tolist() for x in evaluation.curves["1 a"]] == [[10, 20], [[0.5, 0.75]]]


def test_runs_of_fewer_steps_than_planned_say_why(tmp_path, drawn):
    """The summary of an unfinished run is not a result, unlike that of a run that ended early or diverged."""
    write_run(tmp_path / "a", [0.5, 0.75, 0.25], steps=40)
    write_run(tmp_path / "b", [0.9, 0.8])
    write_run(tmp_path / "c", [0.5, 0.75], steps=60, train={"patience": 1})
    write_run(tmp_path / "d", [0.5, None], diverged_at=13)
    rows = read_table(run_command(*(tmp_path / name for name in "abcd")).out, ["run", "eval/loss"])
    names = ("eval/loss", "best", "steps", "seconds", "parameters")
    assert [" | ".join(row[name] for name in names) for row in rows] == [
        "0.2500 | 0.2500 | 30 of 40 | - | -",
        "0.8000 | 0.8000 | 20 | 5.2 | 1,234",
        "0.7500 | 0.5000 | 20 of 60 | 5.2 | 1,234",
        "not finite | 0.5000 | diverged at 13 | 5.2 | 1,234",
    ]


def test_different_training_losses_are_no_comparison_in_the_loss(tmp_path, drawn):
    for name, loss in (("a", "cross_entropy"), ("b", "label_smoothing:0.1")):
        write_run(tmp_path / name, [0.5, 0.75], train={"loss": loss})
    out = " ".join(run_command(tmp_path / "a", tmp_path / "b").out.split())
    assert "warning: eval/loss" in out and "cross_entropy, label_smoothing:0.1" in out
    assert "warning" not in run_command(tmp_path / "a", tmp_path / "b", "--metric=train/loss").out


def test_more_is_better_for_accuracy_and_the_summary_knows_the_user_s_metrics(tmp_path, drawn):
    for folder in "ab":
        run = write_run(tmp_path / folder, [0.5, 0.5], better={"rank": "more"})
        rows = [{"step": i, "eval/accuracy": x, "eval/rank": x, "eval/x": x} for i, x in ((1, 0.5), (2, 0.7), (3, 0.6))]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for metric, best in {"eval/accuracy": "0.7000", "eval/rank": "0.7000", "eval/x": None}.items():
        out = run_command(tmp_path / "a", tmp_path / "b", f"--metric={metric}").out
        assert read_table(out, ["run", metric])[0].get("best") == best
    assert len(drawn) == 3  # no run has a training loss


@pytest.mark.parametrize("name", ["step", "Steps", "iter", " Iteration"])
def test_a_csv_file_of_another_program_is_a_run(name, tmp_path, drawn):
    write_run(tmp_path / "a", [0.5, 0.75])
    (tmp_path / "theirs.csv").write_text(f"note,{name},eval/loss,val\nx,10,0.9,1\ny,20,,2\nz,30,nan,3\n")
    code, out, err = run_command(tmp_path / "a", tmp_path / "theirs.csv", "--metric", "eval/loss")
    row = read_table(out, ["run", "eval/loss"])[1]
    assert (code, err) == (0, "") and row["steps"] == "30" and row["eval/loss"] == "not finite"
    assert (row["run"], row["best"], row["parameters"]) == ("2 theirs.csv", "0.9000", "-")
    assert [x.tolist() for x in drawn[-1].curves["2 theirs.csv"]] == [[10], [[0.9]]]


def test_what_is_left_out_is_printed(tmp_path, drawn):
    write_run(tmp_path / "a", [0.5, 0.75])
    other = write_run(tmp_path / "b", [0.5, 0.75], sha256="b")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"config": config["config"] | {"text": {"N": 7, "W": 9}}}))
    (tmp_path / "theirs.csv").write_text("step,val\n1,0.5\n")
    out = " ".join(run_command(tmp_path / "a", tmp_path / "b", tmp_path / "theirs.csv").out.split())
    assert "3 theirs.csv (it has val)" in out and "(2): text.N, text.W" in out and "different data" in out
    assert "3 theirs.csv" not in drawn[-1].curves and "run 1" not in out  # no setting differs


def test_the_figure_is_a_file_of_the_requested_kind(tmp_path):
    runs = [write_run(tmp_path / folder, [0.5, 0.75]) for folder in "ab"]
    assert compare.run(runs, output=tmp_path / "out") == tmp_path / "out" / "compare.png"
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert compare.run(runs, output=tmp_path / "b.svg").read_bytes().startswith(b"<?xml")


def test_what_is_no_run_is_refused(tmp_path, drawn):
    run = write_run(tmp_path / "a", [0.5, 0.75])
    study = write_run(tmp_path / "study", [0.5])
    (study / "config.json").write_text(json.dumps({"config": SETTINGS | {"study": {"arms": []}}}))
    (tmp_path / "bad.csv").write_text("epoch,loss\n1,2\n")
    for path in (study, tmp_path / "nothing", tmp_path / "bad.csv"):
        with raises(errors.UserError, path):
            compare.run([run, path])
    with raises(errors.UserError, "--metric=eval/bleu", "eval/loss"):
        compare.run([run, write_run(tmp_path / "b", [0.5])], metric="eval/bleu")
    code, out, err = run_command(run, run)
    assert (code, out) == (2, "") and err.startswith("error: ") and "two" in err
