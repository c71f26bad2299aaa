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
MISSING = "UNKNOWN: TPU initialization failed: No jellyfish device found."
FILE = 'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".'
HELD = "ABORTED: The TPU is already in use by process with pid {}. Not attempting to load libtpu.so in this process."
NEVER = "Unknown backend tpu. Available backends are ['cpu']"
CHANGES = {"image.patch": 4, "train.steps": 2, "optim.warmup_steps": 1, "mesh.data": 1} | {"model.D": 8, "model.H": 2}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes this one have these devices, and this libtpu for a JAX that needs 0.0.23."""
    for name in ("PCI", "DEV", "PROC"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(compilation, name, tmp_path / name)
    monkeypatch.setattr(compilation, "LOCK", tmp_path / "lockfile")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["libtpu==0.0.23"])

    def machine(*devices, libtpu="0.0.23"):
        for n, (vendor, kind) in enumerate(devices):
            (tmp_path / "PCI" / f"0000:00:0{n}.0").mkdir()
            for name, text in (("vendor", vendor), ("class", kind)):
                (tmp_path / "PCI" / f"0000:00:0{n}.0" / name).write_text(text + "\n")
        monkeypatch.setattr(compilation, "libtpu", lambda: libtpu)
        return tmp_path

    return machine


@pytest.fixture
def platforms():
    """A function that sets JAX's flag; afterwards it is as before."""
    before = jax.config.jax_platforms
    yield lambda value: jax.config.update("jax_platforms", value)
    jax.config.update("jax_platforms", before)


def test_chips_are_what_google_puts_there_but_for_disks_and_network_cards(machine):
    folder = machine(GVNIC, V5E, DISK, ("0x10de", "0x030200"), V5E)
    assert compilation.chips() == 2
    (folder / "DEV" / "accel0").touch()
    assert compilation.chips() == 2


def test_chips_are_also_seen_as_device_files(machine):
    folder = machine(GVNIC)
    assert compilation.chips() == 0
    for name in ("accel0", "accel1"):
        (folder / "DEV" / name).touch()
    (folder / "DEV" / "accel").mkdir()  # where Linux has those of others
    assert compilation.chips() == 2


def test_there_is_none(machine):
    machine(GVNIC)
    for said in (MISSING, FILE, NEVER):
        assert compilation.why_no_tpu(said) == "this machine has no TPU (on Colab: Runtime > Change runtime type)"


def test_there_is_no_libtpu(machine):
    machine(V5E, libtpu=None)
    version = importlib.metadata.version("jax")
    assert compilation.why_no_tpu(MISSING).endswith(
        f'has a TPU, but no libtpu, by which JAX uses it: pip install "jax[tpu]=={version}"'
    )


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


def test_another_process_holds_it(machine, held):
    machine(V5E)
    told = compilation.why_no_tpu(FILE)
    assert told.startswith(f"the TPU is in use by process {held.pid}, and a TPU belongs to one process: in a notebook")
    assert "call launch.run" in told and "restart its runtime" in told


def test_libtpu_or_a_device_file_tells_who_holds_it(machine):
    folder = machine(V5E)
    assert "in use by process 61, and" in compilation.why_no_tpu(HELD.format(61))
    own = folder / "PROC" / str(os.getpid()) / "fd"
    for fds in (own, folder / "PROC" / "67" / "fd"):
        fds.mkdir(parents=True)
    (own / "3").symlink_to(folder / "DEV" / "vfio" / "0")  # a libtpu that fails here leaves it open
    (folder / "PROC" / "67" / "fd" / "3").symlink_to(folder / "DEV" / "null")
    assert "cannot be used" in compilation.why_no_tpu(MISSING)
    (folder / "PROC" / "67" / "fd" / "4").symlink_to(folder / "DEV" / "vfio" / "0")
    assert "in use by process 67, and" in compilation.why_no_tpu("open(/dev/vfio/0): Device or resource busy")


def test_a_lock_file_that_nobody_holds(machine, held):
    folder = machine(V5E)
    held.stdin.close()
    held.wait()
    assert (folder / "lockfile").exists()
    left = f"{folder / 'lockfile'} is left of a process that is no more, and keeps others from the TPU: sudo rm"
    assert compilation.why_no_tpu(FILE) == f"{left} {folder / 'lockfile'}"
    assert "cannot be used" in compilation.why_no_tpu(MISSING)  # libtpu always leaves the file, which does no harm


@pytest.mark.parametrize(
    ("there", "wanted", "belongs"),
    [
        ("0.0.23", "0.0.23", True),
        ("0.0.23.1", "0.0.23", False),
        ("0.0.42", "0.0.23", False),
        ("0.0.50.1", "0.0.50.*", True),
        ("0.0.5011", "0.0.50.*", False),
        ("0.0.1", "", True),
    ],
)
def test_a_libtpu_of_another_jax(machine, monkeypatch, there, wanted, belongs):
    machine(V5E, libtpu=there)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [f"libtpu=={wanted}"])
    version, told = importlib.metadata.version("jax"), compilation.why_no_tpu(f"{MISSING}\nand more")
    if belongs:
        assert told == f"the TPU of this machine cannot be used: {MISSING}"
    else:
        assert told.startswith(f"libtpu {there} does not belong to JAX {version}, which needs {wanted}: pip install ")
        assert told.endswith(f'"jax[tpu]=={version}" ({MISSING})')


def test_what_this_jax_needs_is_read_from_its_metadata(monkeypatch):
    monkeypatch.setattr(compilation, "libtpu", lambda: "0.0.1")
    assert "which needs 0.0." in compilation.foreign()
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: None)
    assert compilation.foreign() == ""


def test_jax_has_started_without_it(machine, platforms):
    machine(V5E)
    platforms("cpu")
    assert (
        "JAX has started without the TPU in this process (JAX_PLATFORMS = cpu): restart it"
        in compilation.why_no_tpu(NEVER)
    )
    for given in (None, "tpu,cpu"):  # the latter: as JAX itself has it where chips are
        platforms(given)
        assert "(a run before had device = cpu)" in compilation.why_no_tpu(NEVER)


# Through the command


def launched(folder, *more):
    return tiny.run("--config", tiny.config_file(folder, "vision", **CHANGES), "--workdir", str(folder / "run"), *more)


def test_the_command_says_why_there_is_no_tpu(machine):
    folder = machine(GVNIC)
    told = launched(folder, "--config.device=tpu")
    assert (told.code, told.out) == (2, "") and not (folder / "run").exists()
    assert told.err == f"error: a tpu was asked for: {compilation.why_no_tpu('')}\n"


def test_the_command_says_that_a_tpu_is_in_use(machine, held, platforms):
    folder = machine(V5E)
    told = launched(folder, "--config.device=tpu")
    assert told.code == 2 and f"error: a tpu was asked for: the TPU is in use by process {held.pid}, and" in told.err
    platforms(None)
    with tiny.without_figures():
        told = launched(folder)
    assert told.code == 0
    assert f"warning: the TPU is in use by process {held.pid}" in told.out and "; the CPU is used\n" in told.out


def test_who_has_asked_for_the_cpu_is_not_warned(machine, platforms, capsys):
    machine(V5E)
    platforms("cpu")
    for device in ("any", "cpu"):
        compilation.start(device)
    assert capsys.readouterr().out == ""


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
    ("devices", "given", "expected"),
    [
        ([], {}, "cpu"),
        ([V5E], {}, None),
        ([], {"TPU_WORKER_ID": "0"}, None),
        ([], {"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": "libtpu.so"}, "cpu"),
    ],
)
def test_jax_is_spared_the_search_for_a_tpu_where_there_is_none(
    machine, platforms, monkeypatch, devices, given, expected
):
    folder = machine(*devices)
    for name in [name for name in os.environ if name.startswith("TPU_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    installed = {"libtpu"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    platforms(None)
    compilation.leave_out()
    assert jax.config.jax_platforms == expected
    platforms(None)
    (folder / "DEV" / "vfio").mkdir()
    (folder / "DEV" / "vfio" / "0").touch()  # as a TPU in a container may be all that is seen
    compilation.leave_out()
    assert jax.config.jax_platforms is None
    (folder / "DEV" / "vfio" / "0").unlink()
    for names in (set(), {"libtpu", "jax_plugins"}):  # the latter: for a GPU
        installed = names
        compilation.leave_out()
        assert jax.config.jax_platforms is None
    platforms("cuda,cpu")
    installed = {"libtpu"}
    compilation.leave_out()
    assert jax.config.jax_platforms == "cuda,cpu"


def test_a_libtpu_that_is_there_says_nothing_where_there_is_no_tpu():
    if compilation.chips() or importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed, or of use")
    program = (
        "import jax; from experiments.engine import compilation, errors\n"
        "try: compilation.start('tpu')\n"
        "except errors.UserError: compilation.start('any')\n"
        "print(jax.default_backend())"
    )
    given = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_PLATFORMS", "TPU_"))}
    ended = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("cpu\n", 0)
    assert "TPU" not in ended.stderr and "libtpu" not in ended.stderr
