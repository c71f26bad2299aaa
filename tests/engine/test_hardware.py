"""Why a TPU cannot be had, on machines that are made up; the locks and the words are those of libtpu."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import jax
import pytest
import tiny

from experiments.engine import compilation, errors

GVNIC, DISK, V5E = ("0x1ae0", "0x020000"), ("0x1ae0", "0x010802"), ("0x1ae0", "0x120000")
GPU = ("0x10de", "0x030200")
MISSING = "UNKNOWN: TPU initialization failed: No jellyfish device found."
FILE = 'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".'
HELD = "ABORTED: The TPU is already in use by process with pid {}. Not attempting to load libtpu.so in this process."
NEVER = "Unknown backend tpu. Available backends are ['cpu']"
NONE = "this machine has no TPU (on Colab: Runtime > Change runtime type)"
VERSION = importlib.metadata.version("jax")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes this one have these devices, and this libtpu for a JAX that needs another one or not."""
    for name in ("PCI", "DEV", "PROC"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(compilation, name, tmp_path / name)
    monkeypatch.setattr(compilation, "LOCK", tmp_path / "lockfile")

    def machine(*devices, libtpu="0.0.23", wanted="0.0.23"):
        for n, (vendor, kind) in enumerate(devices):
            (tmp_path / "PCI" / f"0000:00:0{n}.0").mkdir()
            for name, text in (("vendor", vendor), ("class", kind)):
                (tmp_path / "PCI" / f"0000:00:0{n}.0" / name).write_text(text + "\n")
        monkeypatch.setattr(compilation, "libtpu", lambda: libtpu)
        monkeypatch.setattr(
            importlib.metadata, "requires", lambda name: ["numpy", *[f"libtpu=={wanted}"] * bool(wanted)]
        )
        return tmp_path

    return machine


@pytest.fixture
def platforms():
    """A function that sets JAX's flag; afterwards it is as before."""
    before = jax.config.jax_platforms
    yield lambda value: jax.config.update("jax_platforms", value)
    jax.config.update("jax_platforms", before)


def test_chips_are_what_google_puts_there_but_for_disks_and_network_cards(machine):
    folder = machine(GVNIC, V5E, DISK, GPU, V5E)
    (folder / "DEV" / "accel0").touch()
    assert compilation.chips() == 2


def test_chips_are_also_seen_as_device_files(machine):
    folder = machine(GVNIC)
    assert compilation.chips() == 0
    for said in (MISSING, FILE, NEVER):
        assert compilation.why_no_tpu(said) == NONE
    for name in ("accel0", "accel1", "accel"):  # the last: where Linux has those of others
        (folder / "DEV" / name).touch()
    assert compilation.chips() == 2


HOLD = """
import fcntl, sys, time
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path):
    """The process that holds the lock file."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lockfile")], **pipes, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.stdin.close()


def test_who_holds_the_lock_file_is_named_and_one_that_nobody_holds_too(machine, held):
    folder = machine(V5E)
    told = compilation.why_no_tpu(FILE)
    assert told.startswith(f"the TPU is in use by process {held.pid}, and a TPU belongs to one process: in a notebook")
    assert "call launch.run" in told and "restart its runtime" in told
    held.stdin.close()
    held.wait()
    assert (folder / "lockfile").exists()
    left = f"{folder / 'lockfile'} is left of a process that is no more, and keeps others from the TPU: sudo rm"
    assert compilation.why_no_tpu(FILE) == f"{left} {folder / 'lockfile'}"
    assert "cannot be used" in compilation.why_no_tpu(MISSING)  # libtpu always leaves the file, which does no harm


def test_libtpu_or_a_device_file_tells_who_holds_it(machine):
    folder = machine(V5E)
    assert "in use by process 61, and" in compilation.why_no_tpu(HELD.format(61))
    own, other = (folder / "PROC" / str(number) / "fd" for number in (os.getpid(), 67))
    for fds in (own, other):
        fds.mkdir(parents=True)
    (own / "3").symlink_to(folder / "DEV" / "vfio" / "0")  # a libtpu that fails here leaves it open
    (other / "3").symlink_to(folder / "DEV" / "null")
    assert "cannot be used" in compilation.why_no_tpu(MISSING)
    (other / "4").symlink_to(folder / "DEV" / "vfio" / "0")
    assert "in use by process 67, and" in compilation.why_no_tpu("open(/dev/vfio/0): Device or resource busy")


@pytest.mark.parametrize(
    ("there", "wanted", "belongs"),
    [
        ("0.0.23", "0.0.23", True),
        ("0.0.23.1", "0.0.23", False),
        ("0.0.42", "0.0.23", False),
        ("0.0.50.1", "0.0.50.*", True),
        ("0.0.5011", "0.0.50.*", False),
        ("0.0.1", "", True),
        (None, "0.0.23", False),
    ],
)
def test_a_libtpu_of_another_jax_or_none(machine, there, wanted, belongs):
    machine(V5E, libtpu=there, wanted=wanted)
    told, install = compilation.why_no_tpu(f"{MISSING}\nand more"), f'pip install "jax[tpu]=={VERSION}"'
    if belongs:
        assert told == f"the TPU of this machine cannot be used: {MISSING}"
    elif there:
        needs = f"does not belong to JAX {VERSION}, which needs {wanted}"
        assert told == f"libtpu {there} {needs}: {install} ({MISSING})"
    else:
        assert told == f"this machine has a TPU, but no libtpu, by which JAX uses it: {install}"


def test_what_this_jax_needs_is_read_from_its_metadata(monkeypatch):
    monkeypatch.setattr(compilation, "libtpu", lambda: "0.0.1")
    assert "which needs 0.0." in compilation.foreign()
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: None)
    assert compilation.foreign() == ""


def test_jax_has_started_without_it(machine, platforms):
    machine(V5E)
    before = "a run before had device = cpu"  # "tpu,cpu": as JAX itself has it where chips are
    for given, kept in (("cpu", "JAX_PLATFORMS = cpu"), (None, before), ("tpu,cpu", before)):
        platforms(given)
        told = f"JAX has started without the TPU in this process ({kept}): restart it"
        assert compilation.why_no_tpu(NEVER).startswith(told)


# Where JAX starts


def test_the_command_says_why_there_is_no_tpu(machine, tmp_path):
    machine(GVNIC)
    file = tiny.config_file(tmp_path, "vision", **tiny.TRAIN)
    told = tiny.run("--config", file, "--workdir", str(tmp_path / "run"), "--device=tpu")
    assert (told.code, told.out) == (2, "") and not (tmp_path / "run").exists()
    assert told.err == f"error: a tpu was asked for: {NONE}\n"


def test_where_a_tpu_is_in_use_the_cpu_is_used_with_a_warning(machine, held, platforms, capsys):
    machine(V5E)
    with pytest.raises(errors.UserError, match=f"^a tpu was asked for: the TPU is in use by process {held.pid}, and"):
        compilation.start("tpu")
    platforms(None)
    compilation.start("any")
    told = capsys.readouterr().out
    assert told.startswith(f"warning: the TPU is in use by process {held.pid}") and told.endswith("; the CPU is used\n")
    platforms("cpu")
    for device in ("any", "cpu"):  # who has asked for it is not warned
        compilation.start(device)
    assert capsys.readouterr().out == ""
    for device, sentence in (
        ("gpu", f"a gpu was asked for, but JAX {VERSION} sees only 8 x cpu"),
        ("npu", "unknown dev"),
    ):
        with pytest.raises(errors.UserError, match=sentence):
            compilation.start(device)


def test_where_jax_asks_for_both_and_cannot_have_the_tpu_the_cpu_is_used_with_a_warning(
    machine, platforms, monkeypatch, capsys
):
    machine(V5E)

    def default_backend():
        if "tpu" in (jax.config.jax_platforms or ""):
            raise RuntimeError(f"Unable to initialize backend 'tpu': {HELD.format(71)}")
        return "cpu"

    monkeypatch.setattr(jax, "default_backend", default_backend)
    platforms("tpu,cpu")
    with pytest.raises(errors.UserError, match="^a tpu was asked for: the TPU is in use by process 71, and"):
        compilation.start("tpu")
    compilation.start("any")
    assert capsys.readouterr().out.startswith("warning: the TPU is in use by process 71, and")
    platforms("tpu")
    with pytest.raises(errors.UserError, match="^JAX cannot start: Unable to initialize backend 'tpu'"):
        compilation.start("any")


# A libtpu where there is no TPU


@pytest.mark.parametrize(
    ("devices", "variables", "installed", "before", "file", "expected"),
    [
        ([], {}, {"libtpu"}, None, False, "cpu"),
        ([V5E], {}, {"libtpu"}, None, False, None),
        ([], {"TPU_WORKER_ID": "0"}, {"libtpu"}, None, False, None),
        ([], {"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": "libtpu.so"}, {"libtpu"}, None, False, "cpu"),
        ([], {}, {"libtpu"}, None, True, None),  # as a TPU in a container may be all that is seen
        ([], {}, set(), None, False, None),
        ([], {}, {"libtpu", "jax_plugins"}, None, False, None),  # for a GPU
        ([], {}, {"libtpu"}, "cuda,cpu", False, "cuda,cpu"),
    ],
)
def test_jax_is_spared_the_search_for_a_tpu_where_there_is_none(
    machine, platforms, monkeypatch, devices, variables, installed, before, file, expected
):
    folder = machine(*devices)
    for name in [name for name in os.environ if name.startswith("TPU_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    if file:
        (folder / "DEV" / "vfio").mkdir()
        (folder / "DEV" / "vfio" / "0").touch()
    platforms(before)
    compilation.leave_out()
    assert jax.config.jax_platforms == expected


def test_a_libtpu_that_is_there_says_nothing_where_there_is_no_tpu():
    if compilation.chips() or importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed, or of use")
    program = (
        "import jax; from experiments.engine import compilation, errors\n"
        "try: compilation.start('tpu')\n"
        "except errors.UserError: compilation.start('any')\n"
        "print(jax.default_backend())"
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_PLATFORMS", "TPU_"))}
    ended = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("cpu\n", 0)
    assert "TPU" not in ended.stderr and "libtpu" not in ended.stderr
