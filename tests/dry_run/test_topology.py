"""Programs for TPU chips that this machine does not have: what the compiler reports about them."""

import functools
import json

import jax
import numpy as np
import pytest
import tiny
from errors import raises

from experiments.config import errors
from experiments.devices import compilation, mesh as meshes
from experiments.dry_run import topology as topologies
from experiments.model import build, sharding
from experiments.tools import generation
from tfm import head as heads
from tfm.attention import mask as masks

libtpu = pytest.mark.skipif(compilation.libtpu() is None, reason='libtpu is not installed: pip install -e ".[aot]"')
TOO_LARGE = "needs {} GiB of memory, and the chip has {} GiB"
SMALL = {"model.M": 1, "model.D": 8, "model.H": 2, "image.patch": 4, "train.batch_size": 16}


@pytest.fixture(autouse=True)
def restore_jax_config():
    names = "jax_platforms", "jax_enable_compilation_cache", "jax_optimization_level"
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_optimization_level", "O0")  # the compiled programs need not be fast
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def dry_run(tmp_path, *flags, **changes):
    return tiny.run("--config", tiny.config_file(tmp_path, "vision", **SMALL | changes), "--dry_run", *flags)


def test_an_unknown_topology_and_a_missing_libtpu_are_reported(tmp_path, monkeypatch):
    code, _, err = dry_run(tmp_path, "--topology=v5e-3")
    assert code == 2 and all(part in err for part in ("--topology", "v5e-3", "v5e-4"))
    monkeypatch.setattr(compilation, "libtpu", lambda: None)
    code, _, err = dry_run(tmp_path, "--topology=v5e-1")
    assert code == 2 and "libtpu" in err and topologies.INSTALL in err


def test_a_libtpu_for_another_jax_is_reported(monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("INVALID_ARGUMENT: no such thing\nmore")

    monkeypatch.setattr(topologies.topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(compilation, "libtpu", lambda: "0.0.1")
    with raises(errors.UserError, "v5e-1", "libtpu 0.0.1", topologies.INSTALL):
        topologies.describe("v5e-1")
    monkeypatch.setattr(compilation, "describe_libtpu_mismatch", lambda: "")
    with raises(errors.UserError, "v5e-1", "INVALID_ARGUMENT: no such thing"):
        topologies.describe("v5e-1")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("error. Used 16.40G of 15.75G hbm. Exceeded", TOO_LARGE.format("16.40", "15.75")),
        ("temporaries (1.5T) exceeds available HBM (512M).", TOO_LARGE.format("1,536.00", "0.50")),
        ("(size=3221225472) would exceed memory (size=2147483648)", TOO_LARGE.format("3.00", "2.00")),
        ("INTERNAL: RET_CHECK\nmore", "is refused by the compiler: INTERNAL: RET_CHECK"),
    ],
)
def test_errors_of_the_compiler_become_one_line(message, reason):
    assert topologies.refusal(message) == reason


@libtpu
def test_a_topology_has_a_device_for_each_chip(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # these flags are for XLA:CPU
    for name in topologies.NAMES:
        kind, _, cores = name.partition("-")
        devices = topologies.describe(name).devices
        assert len(devices) == int(cores) // (2 if kind in ("v4", "v5p") else 1)
    mesh = meshes.make(devices=devices)
    assert mesh.size == len(devices) and meshes.backend(mesh) == "tpu"
    assert meshes.backend(meshes.make()) == "cpu"


@libtpu
def test_compiler_options_are_known_to_libtpu_and_not_set_by_the_user(monkeypatch):
    mesh = meshes.make(devices=topologies.describe("v5e-4").devices)
    assert meshes.compiler_options(mesh) == meshes.MEMORY
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{next(iter(meshes.MEMORY))}=65536")
    assert meshes.compiler_options(mesh) == {}
    monkeypatch.setattr(meshes, "MEMORY", {"xla_tpu_flag_of_another_libtpu": "1"})
    assert meshes.compiler_options(mesh) == {}
    assert meshes.compiler_options(meshes.make()) == {}


@libtpu
def test_a_step_is_compiled_and_reported(tmp_path):
    file = tmp_path / "report.json"
    outcome = dry_run(tmp_path, "--topology=v5e-4", f"--json={file}")
    assert outcome.code == 0, outcome.err
    report = json.loads(file.read_text())
    assert report["compiled"] and report["reason"] == "" and report["chips"] == 4
    step, evaluation = report["programs"]
    assert (step["name"], evaluation["name"]) == ("step of 16 examples", "evaluation of 336 examples")
    assert 0 < report["parameters_bytes"] < report["optimiser_bytes"] < step["argument_bytes"] < step["needed_bytes"]
    assert step["needed_bytes"] < report["hbm_bytes"] == 15.75 * 2**30
    assert step["collectives"]["all-reduce"]["bytes"] >= report["parameters_bytes"]
    assert "all-reduce" in outcome.out and "evaluation of 336 examples" in outcome.out and "15.8 GiB" in outcome.out
    assert not (tmp_path / "runs").exists()


@libtpu
def test_a_step_that_is_too_large_is_reported_with_the_compilers_reason(tmp_path):
    file = tmp_path / "report.json"
    outcome = dry_run(tmp_path, "--topology=v5e-1", f"--json={file}", **{"model.D": 65536, "model.H": 512})
    report = json.loads(file.read_text())
    assert outcome.code == 1 and not report["compiled"] and "15.75" in report["reason"] and "15.75" in outcome.err


@libtpu
@pytest.mark.parametrize(("M", "seconds", "is_loop"), [(build.UNROLLED, 1e9, False), (5, 1e9, True), (5, 0, False)])
def test_many_layers_are_scanned_only_on_a_tpu_and_if_they_compile_slowly(monkeypatch, M, seconds, is_loop):
    monkeypatch.setattr(build, "LAYER_SECONDS", seconds)
    settings = tiny.settings("vision", image__patch=4, model__M=M, model__remat="none")

    def has_loop(mesh):
        layout = sharding.choose_layout(settings, mesh)
        model = build.vision_model(settings.model, output="pooled", Y=8, X=8, Z=1, patch=4, C=3)
        params = jax.eval_shape(model.init, jax.random.key(0))
        apply = functools.partial(model.apply, mask=None, layout=layout._replace(batch=()))
        program = jax.make_jaxpr(apply)(params, np.ones((2, 4, 16), np.float32))
        return any(one.primitive.name == "scan" and one.params["unroll"] == 1 for one in program.eqns)

    assert not has_loop(meshes.make(data=1))
    assert has_loop(meshes.make(data=1, devices=topologies.describe("v5e-1").devices)) == is_loop


@libtpu
def test_the_most_expensive_program_of_a_study_is_compiled(tmp_path):
    file = tmp_path / "report.json"
    study = {"study.experiment": "vision", "study.arms": [("wide", {"model.D": 12}), ("narrow", {})]}
    config = tiny.config_file(tmp_path, "ablation", **SMALL, **study | {"study.seeds": [0, 1]})
    outcome = tiny.run("--config", config, "--dry_run", "--topology=v5e-1", f"--json={file}")
    assert outcome.code == 0, outcome.err
    names = [one["name"] for one in json.loads(file.read_text())["programs"] if one["compiled"]]
    assert names == ["step of wide x 2 seeds", "evaluation of wide x 2 seeds"]


@libtpu
def test_generation_is_compiled_for_the_prompt_and_for_the_next_tokens():
    chip = meshes.make(data=1, devices=topologies.describe("v5e-1").devices)
    model = build.language_model(tiny.settings("language").model, head=heads.next_word, W=11, N=272)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "stop": [], "mesh": chip}
    params = jax.eval_shape(model.init, jax.random.key(0))
    generator = generation.Generator(model, params, mask=lambda length_B=None: masks.causal, **options)
    reading, extension = topologies.compile_programs(generation.requests(generator, [[1] * 256], steps=9))
    assert (reading.reason, extension.reason) == ("", "")
    assert reading.request.name.startswith("reading 1 x 256 tokens") and "next 8" in extension.request.name
    assert extension.compiled.memory_analysis().alias_size_in_bytes > 0  # the state is donated
