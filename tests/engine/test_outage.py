"""A workdir on a mounted drive that is gone for a while, as Colab's is: the run goes on by itself, and says so."""

import errno
import os
import sys

import pytest
from test_checkpoint_log_workdir import alike, run

from experiments.engine import disk, errors, run as runs, workdir

EVENTS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
GONE = errno.ENOTCONN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT


class Drive:
    """A folder of which every use by Python fails behind the first `uses`, in all threads, until it is asked twice."""

    def __init__(self):
        self.folder, self.uses, self.last, self.code, self.asked = "nowhere", 0, None, 0, 0
        sys.addaudithook(self._use)

    def mount(self, folder, *, last=None, code=errno.ENOTCONN):
        self.folder, self.uses, self.last, self.code, self.asked = str(folder), 0, last, code, 0

    def ask(self, seconds):
        """In place of time.sleep, between two looks."""
        self.asked += 1
        self.last = None if self.asked % 2 == 0 else self.last

    def _use(self, event, arguments):
        if event in EVENTS and str(arguments[0]).startswith(self.folder):
            self.uses += 1
            if self.last is not None and self.uses > self.last:
                raise OSError(self.code, os.strerror(self.code), str(arguments[0]))


DRIVE = Drive()  # an audit hook stays for good


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(workdir.time, "sleep", DRIVE.ask)
    yield
    DRIVE.mount("nowhere")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run that nothing disturbed, and how often Python used it."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    DRIVE.mount(folder)
    run(folder)
    return folder, DRIVE.uses


def outlived(folder):
    """The run, as the launcher starts it; and once more where it was refused at its beginning, as a person would."""
    try:
        return workdir.outlive(lambda: run(folder), folder)
    except errors.UserError as error:
        assert DRIVE.asked == 0 and os.strerror(DRIVE.code) in str(error) and "\n" not in str(error)
        DRIVE.last = None
        return outlived(folder)


def assert_outlived(straight, folder, *, last, capfd):
    DRIVE.mount(folder, last=last, code=GONE[last % len(GONE)])
    outlived(folder)
    out, err = capfd.readouterr()
    assert DRIVE.last is None and "Traceback" not in out + err
    if DRIVE.asked:
        assert f"\nwaiting for {folder}, 120 seconds at most\n{folder} is back: the run goes on from its last" in out
    assert alike(folder, straight)
    assert {file.name for file in (folder / "checkpoints").iterdir()} == {"6", "9"}


@pytest.mark.parametrize("part", [1, 5])
def test_a_drive_that_is_gone_in_the_middle_is_outlived(tmp_path, straight, capfd, part):
    """While it starts, and in a save."""
    folder, uses = straight
    assert uses > 100
    assert_outlived(folder, tmp_path / "run", last=part * uses // 7, capfd=capfd)


@pytest.mark.slow
def test_a_drive_that_is_gone_at_any_use_is_outlived(tmp_path, straight, capfd):
    folder, uses = straight
    for last in range(uses):
        assert_outlived(folder, tmp_path / str(last), last=last, capfd=capfd)


def elsewhere(number, name):
    return OSError(number, os.strerror(number), name)


class Failing:
    """A run that fails so often, for this reason."""

    def __init__(self, reason, times, kind=errors.RunError):
        self.reason, self.times, self.kind, self.calls = reason, times, kind, 0

    def __call__(self):
        self.calls += 1
        if self.calls > self.times:
            return "done"
        try:
            raise self.reason
        except Exception as error:
            raise self.kind("a sentence") from error


@pytest.mark.parametrize(
    ("run", "folder", "calls"),
    [
        (Failing(OSError(errno.ENOSPC, "full"), 1), "", 1),  # it would be full again
        (Failing(ValueError("UNKNOWN: [os_error_code='28']"), 1), "", 1),
        (Failing(OSError(errno.EIO, "gone"), 1, errors.UserError), "", 1),  # at the very beginning
        (Failing(elsewhere(errno.EIO, "/data/images.npz"), 1), "", 1),  # of another disk
        (Failing(OSError(errno.EIO, "gone"), 1), "new", 1),  # the folder was never made
        (Failing(OSError(errno.EIO, "broken"), 99), "", workdir.OUTAGES + 1),  # there, and of no use
    ],
)
def test_what_is_no_outage_ends_the_run(tmp_path, run, folder, calls):
    with pytest.raises(run.kind, match="a sentence"):
        workdir.outlive(run, tmp_path / folder)
    assert run.calls == calls


@pytest.mark.parametrize("reason", [OSError(errno.ESTALE, "gone"), ValueError("UNKNOWN: [os_error_code='107'] while")])
def test_who_says_so_does_not_matter(tmp_path, monkeypatch, reason):
    run = Failing(reason, 2)
    assert workdir.outlive(run, tmp_path) == "done" and run.calls == 3
    for folder, processes in ((None, 1), (tmp_path, 2)):
        monkeypatch.setattr(workdir.jax, "process_count", lambda processes=processes: processes)
        with pytest.raises(errors.RunError):
            workdir.outlive(Failing(reason, 2), folder)


def test_a_drive_that_is_gone_again_as_the_run_comes_back_is_waited_for_again(tmp_path):
    kinds = iter((errors.RunError, errors.UserError))  # in the middle, and while the folder is entered again
    run = Failing(OSError(errno.ESTALE, "gone"), 2, lambda sentence: next(kinds)(sentence))
    assert workdir.outlive(run, tmp_path) == "done" and run.calls == 3


def test_a_file_of_the_folder_and_another_one_of_the_drive_that_is_gone_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Failing(elsewhere(errno.EIO, str(tmp_path / "metrics.jsonl")), 1)
    assert workdir.outlive(run, tmp_path.relative_to(tmp_path)) == "done"
    DRIVE.mount(tmp_path, last=0)
    assert workdir.outlive(Failing(elsewhere(errno.EIO, "/data/images.npz"), 1), tmp_path) == "done"
    assert DRIVE.asked == 2


def test_while_it_waits_nothing_is_advised_that_needs_another_cell(tmp_path, capsys):
    def run():
        with runs.file_errors(tmp_path):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(tmp_path / "metrics.jsonl"))

    DRIVE.mount(tmp_path, last=0)
    with pytest.raises(errors.RunError, match=r"on Colab: drive.mount\("):
        workdir.outlive(run, tmp_path)
    said = capsys.readouterr().out
    assert "mount(" not in said
    assert f"metrics.jsonl: {os.strerror(errno.ENOTCONN)}; once that is mended, the same command" in said


def test_a_drive_that_does_not_come_back_ends_the_run_with_its_sentence(tmp_path, monkeypatch, capsys):
    now = [0.0]
    DRIVE.mount(tmp_path / "unmounted", last=0)
    monkeypatch.setattr(workdir.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(workdir.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    run = Failing(OSError(errno.ENOTCONN, "gone"), 2)
    with pytest.raises(errors.RunError, match="^a sentence$"):
        workdir.outlive(run, tmp_path / "unmounted")
    assert run.calls == 1 and now[0] == workdir.PATIENCE
    assert capsys.readouterr().out == f"a sentence\nwaiting for {tmp_path / 'unmounted'}, 120 seconds at most\n"


def test_what_was_raised_while_a_drive_was_found_gone_says_so_too():
    with pytest.raises(ValueError) as caught:
        try:
            raise OSError(errno.ESTALE, "gone")
        except OSError:
            int("late")  # as a library may, which does not say from what
    assert disk.gone(caught.value) and not disk.gone(ValueError("late"))
