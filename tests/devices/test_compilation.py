"""Compilation: the backend, compiled and cached programs, memory checks, FLOPs against E29, cost reports."""

import functools
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types

import dots
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from checkpoints import save_steps
from errors import raises
from resuming import Stopped, run

from experiments.config import disk, errors
from experiments.devices import compilation, mesh as meshes
from experiments.engine import batches, run as runs, summary as summaries, train_step
from tfm import head as heads, loss
from tfm.attention import explicit, flash, mask as masks, splash

ROOT = pathlib.Path(__file__).parents[2]
BACKEND = "/jax/core/compile/backend_compile_duration"
compilations: list[str] = []  # names of the compiled functions


@pytest.fixture(scope="session", autouse=True)
def record_compilations():
    def record(event, seconds, **about):
        if event == BACKEND:
            compilations.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(record)  # JAX has no public function to remove it


def test_one_compilation_for_each_shape_through_evaluations_saves_and_a_resume(tmp_path, monkeypatch):
    changes = {"train__steps": 6, "train__evaluate_every": 2, "train__save_every": 2}
    counts, original = {}, batches.iterate  # {step: number of compilations before it}

    def iterate(dataset, *, start):
        for n, batch in enumerate(original(dataset, start=start), start + 1):
            counts[n] = len(compilations)
            if n == 6 and start == 0:
                raise Stopped
            yield batch

    monkeypatch.setattr(batches, "iterate", iterate)
    compilations.clear()
    with pytest.raises(Stopped):
        run(tmp_path / "run", **changes)
    assert compilations.count("jit(train_step)") == compilations.count("jit(held_out)") == 1
    assert counts[2] == counts[1] and counts[3] > counts[2]  # the first evaluation follows step 2
    assert counts[6] == counts[5] == counts[4] == counts[3]  # an evaluation and a save follow step 4
    counts.clear()
    compilations.clear()
    run(tmp_path / "run", **changes)
    assert compilations.count("jit(train_step)") == compilations.count("jit(held_out)") == 1
    assert list(counts) == [5, 6] and counts[6] == counts[5]


FIRST_STEP = """
import json, os, sys

import jax

programs = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **about: programs.append(about["fun_name"]) if "backend_compile" in event else None
)
import launch
from experiments.engine import batches

original = batches.iterate

def iterate(dataset, *, start):
    for n, batch in enumerate(original(dataset, start=start)):
        if n == 1:
            print(json.dumps([programs, *sys.modules]), flush=True)
            os._exit(0)
        yield batch

batches.iterate = iterate
launch.run("configs/smoke.py", sys.argv[1])
"""
UNUSED = ("sklearn", "scipy", "matplotlib", "flax.nnx", "jax.experimental.pallas")


def test_a_run_compiles_five_programs_before_its_second_step_and_imports_nothing_that_it_does_not_use(tmp_path):
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FIRST_STEP, str(tmp_path / "run")]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    programs, *modules = json.loads(process.stdout.splitlines()[-1])
    # Two programs make the random key, and the product measures the devices.
    assert len(programs) == 5 and {"jit(init_state)", "jit(train_step)", "jit(matmul)"} < {*programs}
    assert {*UNUSED} & {*modules} == set()


def test_saving_replicated_arrays_compiles_no_slices(tmp_path):
    """Orbax compiles a program to slice an array. D = 72 is in no other test, so it would be compiled here."""
    compilations.clear()
    save_steps(tmp_path, layout="8 whole", D=72)
    assert "jit(slice)" not in compilations


@pytest.fixture
def restore_jax_settings(monkeypatch):
    """Enable the compilation cache, and restore JAX's settings after the test."""
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation.compilation_cache.reset_cache()


def test_a_second_start_takes_its_programs_from_the_cache(restore_jax_settings, tmp_path, monkeypatch):
    monkeypatch.setenv(compilation.FOLDER, str(tmp_path / "cache"))
    hits, values = [], []
    jax.monitoring.register_event_listener(
        lambda event, **options: hits.append(event) if "cache_hits" in event else None
    )
    for _ in range(2):
        compilation.enable_cache()
        # A new function, which jit has not cached.
        values.append((float(jax.jit(lambda x: jax.numpy.tanh(x) * 2 + 1)(3.0)), len(hits) > 0))
    (first, first_hit), (second, second_hit) = values
    assert first == second and (first_hit, second_hit) == (False, True) and any((tmp_path / "cache").iterdir())


def test_the_cache_folder_of_compiled_programs_can_be_chosen_and_switched_off(
    restore_jax_settings, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(compilation.FOLDER, raising=False)
    compilation.enable_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "tfm" / "compiled")
    monkeypatch.setenv(compilation.FOLDER, str(tmp_path / "own"))
    compilation.enable_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert (tmp_path / "own").is_dir() and capsys.readouterr().out == ""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compilation.FOLDER, str(tmp_path / "file" / "below"))
    compilation.enable_cache()
    assert "compiled programs are not cached: " in capsys.readouterr().out
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    compilation.disable_cache()
    monkeypatch.setenv(compilation.FOLDER, str(tmp_path / "more"))
    compilation.enable_cache()  # has no effect after disable_cache(), as with JAX_ENABLE_COMPILATION_CACHE=false
    assert not jax.config.jax_enable_compilation_cache and not (tmp_path / "more").exists()


def test_a_program_that_runs_once_is_compiled_quickly_unless_xla_flags_set_a_level(monkeypatch):
    assert compilation.run_once_options(meshes.make()) == {}  # the tests set a lower level in XLA_FLAGS
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert compilation.run_once_options(meshes.make()) == {"xla_backend_optimization_level": 1}


def test_only_programs_for_gpus_have_the_option_of_deterministic_operations():
    gpu = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="gpu")]))
    options = compilation.deterministic_options(gpu, True)
    assert options == {"xla_gpu_deterministic_ops": True}
    assert compilation.deterministic_options(gpu, False) == compilation.deterministic_options(meshes.make(), True) == {}
    jax.jit(jnp.sin, compiler_options=options).lower(1.0).compile()  # this jaxlib knows the option


@pytest.mark.parametrize(
    ("key", "values", "words"),
    [
        ("train.deterministic", (False, True), "train.deterministic = true changes nothing on a CPU"),
        ("model.compute_dtype", ("float32", "bfloat16"), "bfloat16 is slower than float32 on a CPU"),
    ],
)
def test_a_setting_that_does_not_suit_a_cpu_has_a_warning(capsys, key, values, words):
    for value in values:
        runs.make_mesh(tiny.settings("vision", **{key: value}), "cpu")
        assert (words in capsys.readouterr().out) == (value == values[1])


def test_the_tests_write_nothing_into_the_cache_of_the_user():
    folder = pathlib.Path(os.environ[compilation.FOLDER])
    assert folder.parent == pathlib.Path(tempfile.gettempdir()) and folder.name.startswith("tfm-compiled-")


TPU_IN_USE = "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 71."


@pytest.fixture
def set_platforms():
    """Return a function that sets jax_platforms, which is restored after the test."""
    before = jax.config.jax_platforms
    yield lambda value: jax.config.update("jax_platforms", value)
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize("device", ["gpu", "tpu", "npu"])
def test_a_device_that_is_not_available_is_refused(tmp_path, device):
    file = tiny.config_file(tmp_path, "vision", **tiny.TRAIN)
    outcome = tiny.run("--config", file, "--workdir", str(tmp_path / "run"), f"--device={device}")
    assert (outcome.code, outcome.out) == (2, "") and not (tmp_path / "run").exists()
    assert device in outcome.err and ("runtime" in outcome.err) == (device == "tpu")


def test_a_tpu_in_use_is_reported_with_jaxs_message_and_a_hint(set_platforms, monkeypatch):
    def default_backend():
        if jax.config.jax_platforms == "cpu":
            return "cpu"
        raise RuntimeError(f"{TPU_IN_USE}\nand more")

    monkeypatch.setattr(jax, "default_backend", default_backend)
    for device in ("any", "tpu"):
        set_platforms(None)
        with raises(errors.UserError, TPU_IN_USE, "--device=cpu") as caught:
            compilation.start(device)
        assert "and more" not in str(caught.value)
    compilation.start("cpu")


def test_a_dry_run_of_a_larger_mesh_has_fake_devices(monkeypatch):
    sizes = {"data": -1, "fsdp": 2, "tensor": 4}
    assert compilation.split(sizes, "any", fake=True) is None  # the tests have eight devices
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    fake = compilation.split(sizes, "any", fake=True)
    assert meshes.make(fsdp=2, tensor=4, devices=fake).devices.size == 8
    with raises(errors.UserError, "mesh", 8192):
        compilation.split({"data": 4096, "fsdp": 2}, "any", fake=True)


def test_host_memory_is_the_available_memory_or_the_limit_of_the_group(tmp_path, monkeypatch):
    assert 2**20 < disk.host_memory() < 2**50
    monkeypatch.setattr(disk, "GROUP", tmp_path / "max")
    (tmp_path / "max").write_text("max\n")
    assert 2**20 < disk.host_memory() < 2**50
    (tmp_path / "max").write_text("5000\n")
    assert disk.host_memory() == 5000


def test_arrays_that_do_not_fit_are_refused(monkeypatch):
    disk.check_memory("this", 5000, 5000)
    with raises(errors.UserError, "this", "3 GiB", "1.25 MiB", "less"):
        disk.check_memory("this", 3 * 2**30, 2**20 + 2**18, ": less")
    monkeypatch.setattr(disk, "host_memory", lambda: 100)
    disk.check_memory("this", 100)
    with raises(errors.UserError, "101 bytes", "100 bytes"):
        disk.check_memory("this", 101)
    sizes = {1000: "1,000 bytes", 1024: "1 KiB", 12345678: "11.8 MiB", 999.7 * 2**20: "1,000 MiB"}
    assert {n: disk.size(n) for n in sizes} == sizes
    assert compilation.tree_bytes({"a": jnp.ones((3, 5)), "b": (np.int8(1), None)}) == 61


def test_a_state_is_counted_once_for_each_device_that_holds_it(monkeypatch):
    """D = 5, C = 3: 18 parameters and 18 gradients of 4 bytes, no moments. The step and the key have 12 bytes."""
    task, devices = tiny.linear_task(), meshes.make(data=8)
    state = train_step.abstract_state(task, optax.sgd(0.1), mesh=devices)
    needed_bytes = 8 * (2 * 18 * 4 + 4 + jax.random.key(0).dtype.itemsize)
    monkeypatch.setattr(disk, "host_memory", lambda: needed_bytes)
    compilation.check_state(state, devices, dry_run=False)
    monkeypatch.setattr(disk, "host_memory", lambda: needed_bytes - 1)
    with raises(errors.UserError, "8 devices"):
        compilation.check_state(state, devices, dry_run=False)
    compilation.check_state(state, devices, dry_run=True)  # the devices are not here, so their memory is unknown
    monkeypatch.setattr(compilation, "UNLIMITED", needed_bytes // 8 - 1)
    with raises(errors.UserError, "memory"):
        compilation.check_state(state, devices, dry_run=True)


def test_batches_are_refused_before_they_are_made(monkeypatch):
    sizes = []

    def fetch(index_B, rng):
        sizes.append(len(index_B))
        return {"x_BD": np.zeros((len(index_B), 125)), "y_B": index_B}  # 1008 bytes

    monkeypatch.setattr(disk, "host_memory", lambda: 1008 * 200)
    batches.train(fetch, n=10**6, batch=20, seed=0)
    batches.evaluation(fetch, n=10**6, batch=100)
    for growth in ((), [[5, 21]]):
        with raises(errors.UserError, "210 examples", "1008 bytes"):
            batches.train(fetch, n=10**6, batch=20 if growth else 21, seed=0, growth=growth)
    with raises(errors.UserError, "202 examples", "1008 bytes"):
        batches.evaluation(fetch, n=10**6, batch=101)
    assert set(sizes) == {1}


def test_a_model_of_absurd_size_is_refused_before_it_is_made(tmp_path):
    file = tiny.config_file(tmp_path, "vision", **tiny.MODEL | {"image.patch": 4, "model.F": 2000000000})
    outcome = tiny.run("--config", file, "--workdir", str(tmp_path / "run"))
    assert outcome.code == 2 and "TiB of memory" in outcome.err and "Make model.D" in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_step_that_needs_more_memory_than_is_available_is_refused(monkeypatch):
    devices = meshes.make(data=8)
    product = jax.jit(lambda x_BD: (x_BD @ x_BD.T) @ x_BD).lower(jax.ShapeDtypeStruct((101, 3), np.float32)).compile()
    needed_bytes = 8 * product.memory_analysis().temp_size_in_bytes
    assert needed_bytes >= 8 * 101 * 101 * 4
    monkeypatch.setattr(disk, "host_memory", lambda: needed_bytes)
    compilation.check_step(product, devices)
    monkeypatch.setattr(disk, "host_memory", lambda: needed_bytes - 1)
    with raises(errors.UserError, "training step", "8 devices"):
        compilation.check_step(product, devices)


def test_a_run_whose_step_needs_too_much_memory_stops_before_the_step(tmp_path, monkeypatch):
    """State and batches fit into 1 MiB. The temporary arrays of two examples on each of 8 devices do not."""
    monkeypatch.setattr(disk, "host_memory", lambda: 2**20)
    task = tiny.linear_task()

    def loss(params, batch, **options):
        large_BX = jnp.cumsum(jnp.repeat(batch["x_BD"], 50_000, axis=1), axis=1)
        measures, aux = task.loss(params, batch)
        return measures | {"large": (large_BX.max(), jnp.float32(1))}, aux

    with raises(errors.UserError, "training step", "8 devices"):
        tiny.train(tmp_path / "run", task._replace(loss=loss), mesh__data=8)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


B, N, D, H, M, F, W = 2, 7, 12, 3, 5, 20, 256


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(tiny.TEXT)
    return str(file)


def task(text, **changes):
    sizes = {"model__D": D, "model__H": H, "model__M": M, "model__F": F, "text__N": N, "model__attention": "explicit"}
    return tiny.task_of(tiny.settings("language", text__source=text, **(sizes | changes)))


def forward(task):
    params = jax.eval_shape(task.init, jax.random.key(0))
    batch = {name: array[:B] for name, array in task.train[0].items()}
    return compilation.flops(task.loss, params, batch), params, batch


def layer(*, K=D // H, projections=4):
    """Return E29 for one layer and B sequences: projections, attention, MLP. A multiply-add counts as two."""
    T = B * N
    return projections * 2 * T * D * H * K + B * 2 * 2 * H * N * N * K + 4 * T * D * F


HEAD = 2 * B * N * D * W


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model__remat": "none"}, M * layer() + HEAD),
        ({"model__K": 11}, M * layer(K=11) + HEAD),
        ({"model__score": "tied"}, M * layer(projections=3) + HEAD),
        ({"model__position": "sinusoidal", "model__norm": "token_plain", "model__bias": "none"}, M * layer() + HEAD),
        ({"text__objective": "masked"}, M * layer() + HEAD + 2 * B * N * D),  # [MASK] adds one token id
    ],
)
def test_flops_equal_the_formula_for_every_variant(text, changes, expected):
    assert forward(task(text, **changes))[0] == expected


def test_the_backward_pass_costs_two_forward_passes_and_remat_one_more(text):
    def gradient(task):
        forward_flops, params, batch = forward(task)
        loss = jax.grad(lambda params: task.loss(params, batch)[0]["loss"][0])
        return compilation.flops(loss, params), forward_flops

    total_flops, forward_flops = gradient(task(text, model__remat="none"))
    assert total_flops == 3 * forward_flops
    loop_flops, _ = gradient(task(text, model__remat="products"))  # a loop computes the logits q . k again
    assert loop_flops == 3 * forward_flops + M * 2 * B * N * N * D
    remat_flops, _ = gradient(task(text, model__remat="full"))
    assert 3 * forward_flops < remat_flops <= 4 * forward_flops


def ones(*shape):
    return np.ones(shape, np.float32)


def test_flops_of_nested_programs_are_added():
    a, b = ones(3, 5), ones(5, 7)
    product = 2 * 3 * 5 * 7
    assert compilation.flops(jnp.matmul, a, b) == product
    assert compilation.flops(jax.jit(lambda a, b: jax.jit(jnp.matmul)(a, b) + a @ b), a, b) == 2 * product
    assert compilation.flops(lambda a, b: jax.lax.map(lambda _: a @ b, jnp.arange(11)), a, b) == 11 * product
    assert compilation.flops(jax.vmap(jnp.matmul, (0, None)), ones(4, 3, 5), b) == 4 * product
    assert compilation.flops(jax.vmap(jnp.matmul), ones(4, 3, 5), ones(4, 5, 7)) == 4 * product
    assert compilation.flops(lambda a, b: a[:, :1] + 1, a, b) == 0
    x_BHNK = ones(1, 2, 64, 8)  # flash attention has branches; the most expensive one counts
    for kernel in (flash, explicit):
        call = functools.partial(kernel.attention, mask=masks.causal, scale=1.0)
        assert compilation.flops(call, x_BHNK, x_BHNK, x_BHNK) == 2 * 2 * 2 * 64 * 64 * 8
        assert compilation.flops(call, x_BHNK, x_BHNK, x_BHNK, kernels=True) == 0
    x_BHNK = ones(3, 2, 1024, 8)
    call = functools.partial(splash.attention, mask=masks.causal, scale=1.0, interpret=True)
    assert compilation.flops(call, x_BHNK, x_BHNK, x_BHNK, kernels=True) == 3 * 2 * 2 * 2 * 1024 * 1024 * 8
    assert compilation.flops(lambda x: call(x, x, x)[0] @ ones(8, 5), x_BHNK) == 3 * 2 * 2 * 1024 * 8 * (2048 + 5)


def test_the_flops_of_a_head_in_chunks_include_all_tokens(monkeypatch):
    monkeypatch.setattr(loss, "MIN_CHUNKED", 1)
    monkeypatch.setattr(loss, "CHUNK", 16 * 24)
    targets, head = (np.zeros((2, 32), np.int32), ones(2, 32)), {"G_WD": ones(24, 5)}
    result = compilation.flops(lambda x_BND: heads.next_word.loss(head, x_BND, *targets)["loss"], ones(2, 32, 5))
    assert result == 2 * 64 * 24 * 5


def test_the_peak_rate_is_measured_with_matrix_products(monkeypatch):
    assert 1e8 < compilation.measure_peak(devices=meshes.make(data=1), repeats=1) < 1e15
    seconds = types.SimpleNamespace(perf_counter=itertools.count().__next__)  # every product takes one second
    monkeypatch.setattr(compilation, "time", seconds)
    assert compilation.measure_peak(devices=meshes.make(data=1)) == 2 * 1536**3


def test_the_parameter_table_lists_sizes_and_counts():
    shape = jax.ShapeDtypeStruct
    params = {"blocks": {"mlp": {"W1_FD": shape((2, 700, 3), jnp.float32)}}, "head": {"b_C": shape((11,), jnp.float32)}}
    assert summaries.format_table(params) == "\n".join(
        [
            "  blocks/mlp/W1_FD  M=2 F=700 D=3  4,200",
            "  head/b_C          C=11              11",
            "  --------------------------------------",
            "  total                            4,211",
        ]
    )


def test_numbers_are_printed_with_si_prefixes():
    texts = {0: "0 B", 999: "999 B", 1000: "1 kB", 1.5e6: "1.5 MB", 1.23e9: "1.23 GB", 4e12: "4 TB", 5e18: "5e+03 PB"}
    assert {number: summaries.format_si(number, "B") for number in texts} == texts


def test_the_result_block_lists_metrics_times_and_files():
    summary = {"experiment": "vision", "eval/loss": 0.5, "eval/accuracy": 0.2, "baseline/accuracy": 0.1}
    summary |= {"wall_seconds": 12.34, "compile_seconds": 3.21, "tokens_per_second": 12345.6}
    summary["guess"] = {"accuracy": "always the first", "loss": "none such"}
    lines = summaries.format_result(summary, ["a.png", "b.json"]).splitlines()
    assert lines[1] == "  eval/loss              0.5000"
    assert lines[3] == "  baseline/accuracy      0.1000  always the first"
    assert "12.3 s, 3.2 s of it compiling" in lines[4] and "12,346 tokens/s" in lines[5]
    assert [line.strip() for line in lines[6:]] == ["a.png", "b.json"]


def test_a_dry_run_shows_the_costs_and_writes_nothing(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    changes = dots.CHANGES | {"train.batch_size": 60}
    config = tiny.config_file(tmp_path, "dots", **changes)
    outcome = tiny.run("--config", config, "--dry_run", "--workdir", str(tmp_path / "run"))
    assert (outcome.code, outcome.err) == (0, "")
    params = jax.eval_shape(tiny.task_of(tiny.settings("dots", model=False, **changes)).init, jax.random.key(0))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert summaries.format_table(params) in outcome.out
    assert "FLOP per step (3 x forward) of 60 examples, 60 tokens" in outcome.out
    moments = 2 * 4 * numbers + 2 * 4  # two moments per parameter, and two step counters
    assert re.search(rf"parameters +{disk.size(4 * numbers)}\n +optimiser +{disk.size(moments)}\n", outcome.out)
    argument_bytes = 4 * numbers + moments + 4 + 8 + 60 * (5 + 3) * 4  # and step, key, 60 examples of 5 + 3 numbers
    argument = float(re.search(r"step of 60 examples: .* \(argument ([\d.]+) KiB", outcome.out)[1])
    assert 0.5 * argument_bytes < 1024 * argument < 2 * argument_bytes
    assert not (tmp_path / "run").exists() and not list((tmp_path / "here").iterdir())
