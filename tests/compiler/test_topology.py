"""Programs for TPU chips that are not there: what the compiler says, and that nothing in them is for a CPU only."""

import functools
import json

import jax
import numpy as np
import pytest
import tiny

from experiments import model as models
from experiments.compiler import report, topology
from experiments.engine import compilation, mesh, train_step
from experiments.tools import generation
from tfm import head
from tfm.attention import mask

libtpu = pytest.mark.skipif(compilation.libtpu() is None, reason='libtpu is not installed: pip install -e ".[aot]"')
SMALL = {"model.M": 1, "model.D": 8, "model.H": 2, "image.patch": 4, "train.batch_size": 16}


@pytest.fixture(autouse=True)
def as_before():
    """JAX's flags are those of the other tests again."""
    names = "jax_platforms", "jax_enable_compilation_cache", "jax_optimization_level"
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_optimization_level", "O0")  # what is compiled need not be fast
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def dry(tmp_path, *more, **changes):
    return tiny.run("--config", tiny.config_file(tmp_path, "vision", **SMALL | changes), "--dry_run", *more)


def test_bad_input_is_a_sentence(tmp_path, monkeypatch):
    config = tiny.config_file(tmp_path, "vision", **SMALL)
    for arguments in (("--topology=v5e-1",), ("--dry_run", "--json=x.json")):
        refused = tiny.run("--config", config, *arguments)
        assert refused.code == 2 and "--topology and --json are for --dry_run" in refused.err
    unknown = dry(tmp_path, "--topology=v5e-3")
    assert unknown.code == 2 and 'unknown --topology "v5e-3"; the right ones are: v5e-1, v5e-4' in unknown.err
    nowhere = dry(tmp_path, "--topology=v5e-1", f"--json={tmp_path}/none/x.json")
    assert nowhere.code == 2 and f"there is no folder {tmp_path}/none" in nowhere.err
    monkeypatch.setattr(compilation, "libtpu", lambda: None)
    without = dry(tmp_path, "--topology=v5e-1")
    assert without.code == 2 and 'not installed: pip install -e ".[aot]"' in without.err


def test_a_libtpu_that_is_not_jaxs_is_named(monkeypatch, capsys):
    def refuse(*arguments, **more):
        raise RuntimeError("INVALID_ARGUMENT: no such thing\nmore")

    monkeypatch.setattr(topology.topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(compilation, "libtpu", lambda: "0.0.1")
    with pytest.raises(topology.errors.UserError, match="libtpu 0.0.1 does not belong to JAX .*, which needs"):
        topology.described("v5e-1")
    monkeypatch.setattr(compilation, "foreign", lambda: "")
    with pytest.raises(topology.errors.UserError, match="cannot describe v5e-1: INVALID_ARGUMENT: no such thing$"):
        topology.described("v5e-1")
    monkeypatch.setattr(compilation, "foreign", lambda: "libtpu 7 does not belong")
    monkeypatch.setattr(topology.topologies, "get_topology_desc", lambda *_, **__: type("T", (), {"devices": [1]}))
    assert topology.described("v5e-1") == [1]
    assert "libtpu 7 does not belong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("error. Used 16.40G of 15.75G hbm. Exceeded", "needs 16.40 GiB of memory, and the chip has 15.75"),
        ("temporaries (1.5T) exceeds available HBM (512M).", "needs 1,536.00 GiB of memory, and the chip has 0.50"),
        ("(size=3221225472) would exceed memory (size=2147483648)", "needs 3.00 GiB of memory, and the chip has 2.00"),
        ("INTERNAL: RET_CHECK\nmore", "is refused by the compiler: INTERNAL: RET_CHECK"),
    ],
)
def test_the_compilers_reason_is_a_part_of_a_sentence(said, reason):
    assert topology.reason(said) == reason


def test_abstract_batches_are_those_that_are_placed():
    devices = mesh.make(data=2, sequence=2)
    batch = {"example_B": np.arange(6), "word_BN": np.ones((6, 4), np.float64), "weight_B": np.ones(6, np.float32)}

    def facts(tree):
        return {name: (x.shape, x.dtype, x.sharding) for name, x in tree.items()}

    assert facts(mesh.abstract_batch(devices, batch)) == facts(mesh.place_batch(devices, batch))
    placed = mesh.place_rows(devices, [batch] * 3)
    assert facts(mesh.abstract_batch(devices, batch, rows=3)) == facts(placed)
    alive = train_step.abstract_alive(devices, 3)
    assert (alive.shape, alive.dtype) == ((3,), np.bool_) and alive.sharding == mesh.replicated(devices)


@libtpu
@pytest.mark.parametrize(("name", "chips", "kind"), [("v4-8", 4, "v4"), ("v5p-8", 4, "v5"), ("v6e-8", 8, "v6 lite")])
def test_a_topology_has_a_device_for_each_chip(name, chips, kind, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # in which the tests say how much is compiled on CPU
    with topology.of(name) as of:
        assert len(of.devices) == chips and of.devices[0].device_kind == f"TPU {kind}"
        devices = mesh.make(data=-1)
        assert devices.size == chips and mesh.backend(devices) == "tpu" and mesh.side_by_side(devices)
        assert compilation.for_one_run(devices) == {} and f"{chips} of {chips} devices of {name}" in mesh.describe(
            devices
        )
    assert mesh.make().devices.flat[0].platform == "cpu" and compilation.for_one_run(mesh.make())
    for name in topology.NAMES:
        kind, _, cores = name.partition("-")
        assert len(topology.described(name)) == int(cores) // (2 if kind in ("v4", "v5p") else 1)


@libtpu
@pytest.mark.parametrize("name", ["v5e-4", "v5e-8"])
def test_chips_that_gather_are_neighbours_and_compute_beside(name, monkeypatch):
    with topology.of(name):
        chips = [chip.coords for chip in mesh.make(data=1, fsdp=-1).devices.flat]
        ring = chips[::2] + chips[::-2]
        options = mesh.compiler_options(mesh.make(data=1, fsdp=-1))
        first, second = mesh.BESIDE["fsdp"]
        memory = mesh.MEMORY
        assert (
            options == memory | {first: "true", second: "true"} and mesh.compiler_options(mesh.make(data=-1)) == memory
        )
        monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{first}=false --{next(iter(memory))}=65536")
        both = mesh.compiler_options(mesh.make(data=1, fsdp=-1, tensor=2))
        assert both == dict.fromkeys((second, *mesh.BESIDE["tensor"]), "true")
        monkeypatch.setattr(mesh, "MEMORY", {"xla_tpu_flag_of_another_libtpu": "1"})
        assert not mesh.compiler_options(mesh.make(data=-1))
    assert not mesh.compiler_options(mesh.make(data=1, fsdp=-1))
    hops = [np.abs(np.subtract(here, there)).sum() for here, there in zip(ring, ring[1:] + ring[:1], strict=True)]
    assert set(hops) == {1} and len(set(map(tuple, ring))) == len(ring)


@libtpu
def test_a_step_is_compiled_and_told(tmp_path):
    file = tmp_path / "said.json"
    shown = dry(tmp_path, "--topology=v5e-4", f"--json={file}")
    assert shown.code == 0, shown.err
    said = json.loads(file.read_text())
    assert said["compiled"] and said["reason"] == "" and said["chips"] == 4
    assert [one["name"] for one in said["programs"]] == ["step of 16 examples", "evaluation of 336 examples"]
    assert said["name"] == "step of 16 examples" and said["hbm_bytes"] == 15.75 * 2**30
    assert 0 < said["parameters_bytes"] < said["optimiser_bytes"] < said["argument_bytes"] < said["needed_bytes"]
    assert 0 < said["ideal_seconds"] < said["estimated_seconds"] < 1
    assert sum(said["by_scope"].values()) == pytest.approx(said["estimated_seconds"])
    assert "guard" in said["by_scope"] and said["collectives"]["all-reduce"]["times"] > 0
    assert 0 < said["waiting_seconds"] < 1.001 * said["collective_seconds"]  # all of it: sums in another order
    for words in ("compiler's estimate", "not beside computation", "where it would go", "15.75 GiB"):
        assert words in shown.out
    assert "evaluation of 336 examples" in shown.out
    assert shown.out.count("attention: flash, all weights at once") == 1
    assert not (tmp_path / "runs").exists()


@libtpu
def test_too_large_a_step_is_the_compilers_own_reason(tmp_path):
    file = tmp_path / "said.json"
    shown = dry(tmp_path, "--topology=v5e-1", f"--json={file}", **{"model.D": 65536, "model.H": 512})
    assert shown.code == 1 and "of memory, and the chip has 15.75" in shown.err, shown.err
    said = json.loads(file.read_text())
    assert not said["compiled"] and "and the chip has 15.75" in said["reason"] and "temp_bytes" not in said


@libtpu
def test_the_ideal_time_is_that_of_the_chips_that_are_used():
    ideal = {}
    with topology.of("v5e-4") as of:
        for used in (1, 4):
            place = mesh.replicated(mesh.make(data=used))
            wanted = topology.Request("", None, (jax.ShapeDtypeStruct((), np.int32, sharding=place),), flops=7e12)
            ideal[used] = report.record(topology.Program(wanted, None, "it is not", 0.0), of)["ideal_seconds"]
    assert ideal == {1: pytest.approx(7 / 197), 4: pytest.approx(7 / 4 / 197)}


@libtpu
@pytest.mark.parametrize(("M", "loop"), [(models.WRITTEN_OUT, False), (models.WRITTEN_OUT + 1, True)])
def test_many_layers_are_a_loop_on_a_tpu_only(M, loop):
    settings = tiny.settings("vision", image__patch=4, model__M=M, model__remat="none")

    def loops(devices):
        layout = models.layout(settings.model, devices)
        model = models.vision(settings.model, answer="pooled", Y=8, X=8, Z=1, patch=4, C=3)
        params = jax.eval_shape(model.init, jax.random.key(0))
        apply = functools.partial(model.apply, mask=None, over=layout._replace(batch=()))
        program = jax.make_jaxpr(apply)(params, np.ones((2, 4, 16), np.float32))
        return any(one.primitive.name == "scan" and one.params["unroll"] == 1 for one in program.eqns)

    assert not loops(mesh.make(data=1))
    with topology.of("v5e-1"):
        assert loops(mesh.make(data=1)) == loop


@libtpu
def test_of_a_study_the_dearest_program_is_compiled(tmp_path):
    file = tmp_path / "said.json"
    study = {"study.experiment": "vision", "study.arms": [("wide", {"model.D": 12}), ("narrow", {})]}
    config = tiny.config_file(tmp_path, "ablation", **SMALL, **study | {"study.seeds": [0, 1]})
    shown = tiny.run("--config", config, "--dry_run", "--topology=v5e-1", f"--json={file}")
    assert shown.code == 0, shown.err
    told = {one["name"]: one for one in json.loads(file.read_text())["programs"]}
    assert list(told) == ["step of wide x 2 seeds", "evaluation of wide x 2 seeds"]
    assert all(one["compiled"] for one in told.values())


@libtpu
def test_generation_is_compiled_reading_the_prompt_and_going_on():
    model = models.language(tiny.settings("language").model, answer=head.next_word, W=11, N=272)
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "stop": []}
    params = jax.eval_shape(model.init, jax.random.key(0))
    generator = generation.Generator(model, params, mask=lambda length_B=None: mask.causal, **how)
    with topology.of("v5e-1") as of:
        wanted = list(generation.described(generator, [[1] * 256], steps=9))
        programs = topology.compiled(wanted)
        assert [one.reason for one in programs] == ["", ""]
        reading, further = (report.record(one, of) for one in programs)
    assert "splash" in programs[0].compiled.as_text()
    assert reading["name"].startswith("reading 1 x 256 tokens") and "next 8" in further["name"]
    assert 0 < further["ideal_seconds"] and further["alias_bytes"] > 0  # the state is used up
