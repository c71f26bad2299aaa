"""A workdir or a model's folder that somebody else has filled: links, pipes and folders where a file should be."""

import contextlib
import errno
import functools
import io
import os
import pathlib
import socket
import stat
import threading

import numpy as np
import pytest
import tiny
from checkpoints import resumed, saved, state
from matplotlib import figure
from test_fuzz_data import LIKE

from experiments.data import image_file, pretrained_tokenizer
from experiments.engine import checkpoint, disk, errors, log, manifest, run, workdir
from experiments.figures import plots
from experiments.pretrained import hub, llama2c, open_model, safetensors, warm_start
from experiments.studies import attention, figures as drawings, programs, run_folders, study

WORK = "years of work"
CONFIG = {"seed": 0, "train": {"steps": 9}}
SECONDS = 5  # far more than anything here takes, but for waiting without end


@pytest.fixture(autouse=True)
def no_waiting(tmp_path):
    """Who waits for a pipe, also in C++, is let go by a writer that writes nothing, and is found to have waited."""
    waited, done = [], threading.Event()

    def let_go():
        while not done.wait(SECONDS):
            for pipe in filter(pathlib.Path.is_fifo, tmp_path.rglob("*")):
                with contextlib.suppress(OSError):  # nobody reads
                    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
                    waited.append(pipe)

    thread = threading.Thread(target=let_go)
    thread.start()
    yield
    done.set()
    thread.join()
    assert not waited


@pytest.fixture
def outside(tmp_path):
    """A folder beside the workdir, with a file and a folder in it, that must stay as it is."""
    folder = tmp_path / "outside"
    (folder / "5.writing").mkdir(parents=True)
    for file in (folder / "thesis.txt", folder / "5.writing" / "file", folder / "loss.png"):
        file.write_text(WORK)
    before = sorted(folder.rglob("*"))
    yield folder
    assert sorted(folder.rglob("*")) == before
    assert {file.read_text() for file in before if file.is_file()} == {WORK}


def entered(folder):
    with workdir.hold(folder):
        return workdir.enter(folder, CONFIG)


def drawn(file):
    plots.write(figure.Figure(), file)


# Written through no link


def test_a_link_in_place_of_a_file_that_a_run_writes_is_replaced(tmp_path, outside):
    folder, thesis = tmp_path / "run", outside / "thesis.txt"
    entered(folder)
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).symlink_to(thesis)
    (folder / "loss.png").symlink_to(tmp_path / "nowhere")
    log.Log(folder, start=0).close()
    disk.write_json(folder / "summary.json", {"steps": 9})
    safetensors.write(folder / "model.safetensors", {"x_D": np.zeros(3)})
    drawn(folder / "loss.png")
    assert entered(folder)
    written = [folder / name for name in ("summary.json", "metrics.jsonl", "model.safetensors", "loss.png")]
    assert not any(file.is_symlink() for file in written) and not (tmp_path / "nowhere").exists()


def study_entered(folder):
    program = study.Program([study.Run("all", "tied", 3, tiny.settings("vision"))])
    run_folders.enter_runs(folder, [program], [programs.Checked(program, [], 0, 0, 0, 0.0, 0)], None, False)


LINKS = {  # what is a link, where to, who writes there, what is said
    "lock": ("lock", "thesis.txt", entered, "lock cannot be used: it is a link"),
    "lock to nothing": ("lock", "new", entered, "lock cannot be used: it is a link"),
    "lock of two names": ("lock", None, entered, "lock cannot be used: it is no file, or one that has another name"),
    "checkpoints": (
        "checkpoints",
        "",
        lambda folder: checkpoint.Checkpoints(folder / "checkpoints", keep=1),
        "checkpoints cannot be used for checkpoints: it is a link, and a run writes into its own folder only",
    ),
    "events": ("events", "", functools.partial(log.Log, start=0), "events: it is a link"),
    "figures": ("figures", "", lambda folder: drawings.draw(folder, None, [], []), "figures: it is a link"),
    "run of a study": ("all", "", study_entered, "all: it is a link"),
}


@pytest.mark.parametrize(("name", "target", "use", "told"), LINKS.values(), ids=LINKS)
def test_a_link_in_place_of_what_a_run_writes_into_is_a_sentence(tmp_path, outside, name, target, use, told):
    folder = tmp_path / "run"
    folder.mkdir()
    if target is None:
        (folder / name).hardlink_to(outside / "thesis.txt")
    else:
        (folder / name).symlink_to(outside / target)
    with pytest.raises((errors.UserError, errors.RunError), match=told) as caught, run.file_errors(folder):
        use(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_checkpoints_of_a_study_s_program_are_not_looked_for_behind_a_link(tmp_path, outside, monkeypatch):
    """The whole of a study's folder of checkpoints, in which programs begin, and are tidied away behind their end."""
    (tmp_path / "checkpoints").symlink_to(outside)
    (outside / "all_tied_0123abcd").mkdir()
    row = study.Run("all", "tied", 3, tiny.settings("vision"))
    run_folders.remove_checkpoints(tmp_path / "checkpoints", [row])
    (outside / "all_tied_0123abcd").rmdir()  # it is still there
    monkeypatch.setattr(programs, "prepare", None)
    one = programs.Checked(study.Program([row]), [], 0, 0, 0, 0.0, 0)
    with pytest.raises(OSError, match="it is a link"):
        programs.train(one, tmp_path, None, {}, None)


def test_of_a_checkpoint_that_is_a_link_only_the_link_is_removed(tmp_path, outside):
    saved(outside.parent / "others", (3,))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "3").symlink_to(outside.parent / "others" / "3")
    saves = checkpoint.Checkpoints(folder, keep=1)
    saves.save(6, state(seed=6))
    saves.close()
    assert [found.name for found in folder.iterdir()] == ["6"]
    assert manifest.damage(outside.parent / "others" / "3", step=3) is None


def test_what_is_removed_is_not_waited_for_nor_what_a_link_leads_to(tmp_path, outside):
    os.mkfifo(tmp_path / "6.damaged")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "pipe")
    (tmp_path / "6").symlink_to(outside)
    manifest.put_aside(tmp_path / "6")
    assert (tmp_path / "6.damaged").is_symlink()
    for name in ("6.damaged", "folder", "nothing"):
        disk.remove(tmp_path / name)
    assert [found.name for found in tmp_path.iterdir()] == ["outside"]


# What is left of drafts


def test_what_a_killed_run_was_writing_does_not_keep_it_from_starting_again(tmp_path, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(disk.os, "replace", killed)
        patch.setattr(pathlib.Path, "unlink", killed)  # as SIGKILL leaves it
        workdir.enter(tmp_path, CONFIG)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("config.json.") and left.name.endswith(disk.DRAFT)
    assert not entered(tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == ["config.json"]


def test_a_draft_that_cannot_be_put_in_place_is_removed_and_the_file_named(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"Is a directory: '.*/a.json'$"):
        disk.write_json(tmp_path / "a.json", {})
    with pytest.raises(OSError, match="No space left on device: .*b.json") as caught, disk.draft(tmp_path / "b.json"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write says it
    assert caught.value.filename2 is None and [found.name for found in tmp_path.iterdir()] == ["a.json"]


def test_no_file_but_a_draft_is_tidied_away(tmp_path):
    names = {"a.tmp", "a.draft", f"{disk.DRAFT}.txt", "a"}
    for name in (*names, f"config.json.0123abcd{disk.DRAFT}"):
        (tmp_path / name).write_text("")
    (tmp_path / f"folder{disk.DRAFT}").mkdir()
    disk.tidy(tmp_path)
    assert {found.name for found in tmp_path.iterdir()} == names | {f"folder{disk.DRAFT}"}


def test_others_may_read_what_is_written_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        disk.write_json(tmp_path / "summary.json", {})
        drawn(tmp_path / "loss.png")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o640}


# Nothing is waited for


def read_summary(file):
    disk.write_json(file.parent / "config.json", {"config": CONFIG})
    entered(file.parent)


def read_array(file):
    """An empty file of a checkpoint, of which size tells nothing."""
    array = file.parent / "3" / "state" / "x"
    array.parent.mkdir(parents=True)
    array.write_bytes(b"")
    manifest.write(file.parent / "3", step=3, metrics={}, versions={})
    array.unlink()
    os.rename(file, array)
    if damage := manifest.damage(file.parent / "3", step=3):
        raise damage


def read_published(file):
    disk.write_json(file.parent / "config.json", {"model_type": "gpt2"})
    hub.read(file.parent)


READERS = {
    "config.json": [lambda file: entered(file.parent), lambda file: open_model.open(str(file.parent))],
    "summary.json": [read_summary, lambda file: disk.read_json(file, says="all")],
    "metrics.jsonl": [lambda file: log.read(file.parent)],
    "manifest.json": [lambda file: manifest.read(file.parent, step=3)],
    "array": [read_array],
    "state.npz": [disk.read_npz],
    "maps.npz": [attention.read],
    "image.png": [lambda file: image_file.read(file, LIKE)],
    "model.safetensors": [safetensors.read, read_published],
    "model.safetensors.index.json": [safetensors.read, read_published],
    "tokenizer.json": [pretrained_tokenizer.read, lambda file: pretrained_tokenizer.read(file.parent)],
    "model.bin": [llama2c.read],
}


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
@pytest.mark.parametrize(("name", "use"), [(name, use) for name, uses in READERS.items() for use in uses])
def test_what_is_no_file_is_read_by_nobody(tmp_path, monkeypatch, name, use, kind):
    monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
    file = tmp_path / name
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        {"pipe": os.mkfifo, "socket": made.bind, "folder": os.mkdir}[kind](name)
        with pytest.raises(errors.UserError) as caught:
            use(file)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    assert name in str(caught.value) or name.startswith(("array", "model", "tokenizer"))


def test_facts_beside_a_model_are_not_waited_for(tmp_path):
    """Of a pipe in place of its data.json nobody learns how large its images were; it is not needed to say the rest."""
    os.mkfifo(tmp_path / "data.json")
    made = open_model.Trained(tmp_path, "image", {"a": 7}, {}, {"Z": 1}, {"b": 7}, "table")
    assert repr(made) == f"Trained(path={tmp_path!r}, kind='image', model={{}}, facts={{'Z': 1}}, trust=())"
    tree = {warm_start.PATCHES: np.zeros((3, 25)), warm_start.TABLE: np.zeros((5, 3))}
    other = {warm_start.PATCHES: np.zeros((3, 9)), warm_start.TABLE: np.zeros((10, 3))}
    assert "images that make 5 tokens, and these make 10" in warm_start._images(made, tree, other)


def test_a_device_is_no_file_and_a_link_to_a_file_is_one(tmp_path):
    with pytest.raises(OSError, match="neither a file nor a folder"):
        disk.opened("/dev/zero")
    (tmp_path / "file").write_text(WORK)
    (tmp_path / "link").symlink_to(tmp_path / "file")  # as in the caches of downloads
    with disk.opened(tmp_path / "link") as file:
        assert isinstance(file, io.BufferedReader) and file.read().decode() == WORK


# Something else in the way is named


@pytest.mark.parametrize("kind", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["lock", "config.json", "summary.json"])
def test_what_is_in_the_way_is_named_with_what_to_do(tmp_path, name, kind):
    folder = tmp_path / "run"
    entered(folder)
    (folder / name).unlink(missing_ok=True)
    kind(folder / name)
    with pytest.raises(errors.UserError) as caught:
        entered(folder)
    assert str(caught.value).startswith(f"{folder / name} cannot be used: ")
    assert str(caught.value).endswith("; mend that, or choose another --workdir")


@pytest.mark.parametrize("name", ["lock", "config.json", "summary.json"])
def test_what_may_not_be_read_is_named(tmp_path, monkeypatch, name):
    entered(tmp_path)
    (tmp_path / name).touch()
    usual = os.open

    def forbidden(path, *arguments, **options):  # the superuser may read all
        if pathlib.Path(path) == tmp_path / name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return usual(path, *arguments, **options)

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(errors.UserError, match=f"{tmp_path / name} cannot be used: Permission denied; mend that"):
        entered(tmp_path)


def test_checkpoints_that_may_not_be_looked_for_are_a_sentence(tmp_path, monkeypatch):
    """Before anything else of the run, and for who only uses its model."""
    saved(tmp_path / "checkpoints")

    def forbidden(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(pathlib.Path, "iterdir", forbidden)
    with pytest.raises(errors.UserError, match="checkpoints cannot be read: Permission denied"):
        checkpoint.newest(tmp_path / "checkpoints")


def test_a_file_in_place_of_a_checkpoint_or_of_their_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.UserError, match="file cannot be used for checkpoints: Not a directory"):
        checkpoint.Checkpoints(tmp_path / "file", keep=1)
    folder = saved(tmp_path / "checkpoints")
    os.mkfifo(folder / "6.writing")
    saves = checkpoint.Checkpoints(folder, keep=1)
    with pytest.raises(errors.RunError, match=f"step 6 could not be saved in {folder}/6.writing: File exists"):
        saves.save(6, state())
    saves.close()
    assert (folder / "6.writing").is_fifo()
    (folder / "6").write_text("")
    with pytest.raises(errors.UserError, match="checkpoints cannot be used for checkpoints: 6 is no folder"):
        resumed(folder)


def test_a_file_in_place_of_the_figures_is_named(tmp_path):
    (tmp_path / "figures").write_text("")
    with pytest.raises(errors.RunError, match=f"{tmp_path / 'figures'}: Not a directory; once"):
        with run.file_errors(tmp_path):
            drawings.draw(tmp_path, None, [], [])
