"""What a report says was run is what its runs tell, whoever writes it; and on which data each arm was."""

import json

import study_folder

from experiments.studies import overall, provenance, report, runs, statistics, tables, verdict

TOLD = {"commit": "beef", "device": "a large computer", "versions": {"jax": "1", "numpy": "7"}, "wall_seconds": 1000.4}
LATER = {"commit": "cafe", "device": "another one", "versions": {"jax": "2", "numpy": "7"}, "wall_seconds": 234.3}
LOSSES = {"tied": [1.2, 1.3, 1.5], "asymmetric": [1.0, 1.1, 1.2]}


def written(folder, **summaries):
    """The rows of the report of a study whose arms' summaries hold this besides; and the report's files."""
    study = study_folder.study(seeds=(0, 1, 2))
    for arm, losses in LOSSES.items():
        study_folder.losses(folder, "all", {arm: losses}, **summaries.get(arm, {}))
    files = report.write(folder, study, what=study_folder.WHAT)
    return dict(provenance.rows(json.loads(files[0].read_text()))), files


def test_what_was_run_is_told_by_the_runs(tmp_path):
    data = {"data": ["  text: 9 words", "held out: 2"]}
    rows, files = written(tmp_path, tied=TOLD | data, asymmetric=LATER | data)
    assert rows["code of the runs"] == "beef (3 runs), cafe (3 runs)"
    assert rows["hardware of the runs"] == "a large computer (3 runs), another one (3 runs)"
    assert rows["versions of the runs"] == "jax 1 (3 runs) and 2 (3 runs), numpy 7"
    assert rows["training time of all runs"] == "3,704 s" and rows["data"] == "text: 9 words; held out: 2"
    assert rows["report written by"] == "c0ffee, on one small computer"
    assert rows["report written with"].startswith("jax 0.0.1, scipy ")
    assert rows["runs"] == "6 of 6 finished, seeds 0, 1, 2" and rows["arm tied"] == 'model.score = "tied"'
    page, markdown = files[2].read_text(), files[1].read_text()
    for label, words in rows.items():
        assert f"<td>{label}</td><td>{words}</td>" in page
        assert f"\n* {tables.plain(f'{label}: {words}')}\n" in markdown


def test_older_runs_leave_open_what_they_do_not_tell(tmp_path):
    rows, _ = written(tmp_path, tied=TOLD, asymmetric={"backend": "cpu", "devices": 1})
    assert rows["code of the runs"] == "beef (3 runs), unknown (3 runs)"
    assert rows["hardware of the runs"] == "a large computer (3 runs), cpu (1 device) (3 runs)"
    assert rows["versions of the runs"] == "jax 1 (3 runs) and unknown (3 runs), numpy 7 (3 runs) and unknown (3 runs)"
    assert rows["training time of all runs"] == "3,001 s for the 3 of 6 runs that tell" and "data" not in rows
    rows, _ = written(tmp_path / "none")
    assert rows["training time of all runs"] == rows["hardware of the runs"] == rows["code of the runs"] == "unknown"
    assert rows["versions of the runs"] == "unknown"


def test_a_study_without_runs_was_not_run(tmp_path):
    files = report.write(tmp_path, study_folder.study(), what={})
    rows = dict(provenance.rows(json.loads(files[0].read_text())))
    assert rows["code of the runs"] == "unknown" and rows["runs"].startswith("0 of 10 finished")
    assert rows["report written by"] == "code that is not from a checkout"


def test_conditions_with_other_data_have_a_line_each():
    record = {"a": ["one"], "b": ["one", "two"]}
    assert provenance._data(record) == [["data, a", "one"], ["data, b", "one; two"]]
    assert provenance._data({"a": ["one"], "b": ["one"]}) == [["data", "one"]]


def conditions(folder, **summaries):
    written(folder, **summaries)
    study = study_folder.study(seeds=(0, 1, 2))
    return statistics.analyse(study, runs.load(folder, study))


def test_arms_on_other_examples_are_told(tmp_path):
    found = conditions(tmp_path, tied={"evaluation_crc32": 5}, asymmetric={"evaluation_crc32": 6})
    words = '"tied" is not evaluated on the same held-out examples as "asymmetric": their difference may be one of the'
    assert words in verdict.condition(found[0]) and any(words in note for note in tables.condition(found[0]).notes)
    assert 'Not on the same data as the reference, which may be the difference: "tied".' in overall.overall(found)
    [arm] = [arm for arm in json.loads((tmp_path / "report.json").read_text())["conditions"][0]["arms"]][:1]
    assert arm["other_evaluation"] == [0, 1, 2] and arm["other_batches"] == []


def test_seeds_on_other_batches_are_told(tmp_path):
    study = study_folder.study(seeds=(0, 1, 2))
    for seed in range(3):
        for arm in ("tied", "asymmetric"):
            digest = seed + 10 * (seed == 1 and arm == "tied")
            study_folder.run(tmp_path, "all", arm, seed, ends={"eval/loss": 1.0 + seed}, training_crc32=digest)
    found = statistics.analyse(study, runs.load(tmp_path, study))
    assert found[0].arms[0].other_batches == [1] and found[0].arms[1].other_batches == []
    words = '"tied" is not trained on the batches of "asymmetric" in seed 1: their difference may be one of the batches'
    assert words in verdict.condition(found[0]) and "held-out examples" not in verdict.condition(found[0])


def test_arms_that_begin_with_other_values_are_told(tmp_path):
    """In the log, which ends with the text, and in all files of the report."""
    mine = {
        "blocks/score/U_HKD 2x3": [1.0, 2.0, 3.0, 4.0],
        "head/G_WD 5x7": [1.0, 1.0, 0.0, 0.0],
        "mine_D 2": [1, 0, 0, 0],
    }
    its = {
        "blocks/score/U_HKD 2x3": [1.0, 2.0, 3.0, 4.1],
        "head/G_WD 5x7": [-2.0, -2.0, 0.0, 0.0],
        "its_D 2": [0, 1, 0, 0],
    }
    _, files = written(tmp_path, tied={"initial": mine}, asymmetric={"initial": its})
    words = (
        '"tied" begins with other values than "asymmetric", not only at another scale, in weights of the same name and '
        "shape: blocks/score/U_HKD. Seeds do not pair these."
    )
    study = study_folder.study(seeds=(0, 1, 2))
    assert words in " ".join(report.text(tmp_path, study).split())
    assert words in files[1].read_text() and words.replace('"', "&quot;") in files[2].read_text().replace('"', "&quot;")
    arms = json.loads(files[0].read_text())["conditions"][0]["arms"]
    assert [arm["other_initial"] for arm in arms] == [["blocks/score/U_HKD"], []]
    many = {f"w{i}_D 2": [0.0, 0.0, 1.0, i] for i in range(9)}
    found = conditions(
        tmp_path / "b", tied={"initial": many}, asymmetric={"initial": dict.fromkeys(many, [1.0, 0, 0, 0])}
    )
    assert "shape: w0_D, w1_D, w2_D, w3_D, w4_D, w5_D and 3 more." in verdict.condition(found[0])


def test_nothing_is_said_of_data_that_are_alike_or_not_told(tmp_path):
    same = {"evaluation_crc32": 5, "training_crc32": 7, "initial": {"U_HKD 2x3": [1.0, 2.0, 3.0, 4.0]}}
    for i, (tied, asymmetric) in enumerate(((same, same), ({}, same), (same, {}), ({}, {}))):
        found = conditions(tmp_path / str(i), tied=tied, asymmetric=asymmetric)
        for words in (verdict.condition(found[0]), overall.overall(found), *tables.condition(found[0]).notes):
            assert "examples" not in words and "batches" not in words and "same data" not in words
            assert "other values" not in words
