"""The benchmark's harness and its participants at sizes that take no time; what it measures is not tested."""

import dataclasses
import json
import pathlib

import jax
import matplotlib.figure
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import figure, flax_peer, inputs, machine, ours, participant, session, sizes, table
from tfm import shapes

STEPS = [name for name, size in sizes.WORKLOADS.items() if size.kind != "generation"]
TINY = {
    "words": dataclasses.replace(sizes.WORKLOADS["step_a"], M=1, H=2, D=6, N=5, B=3, W=65),
    "images": dataclasses.replace(sizes.WORKLOADS["step_c"], M=1, H=2, D=6, B=10, Y=10, patch=5, C=10),
    "generation": dataclasses.replace(sizes.WORKLOADS["generate"], M=2, H=2, D=6, N=17, B=3, new=13),
}


class Sleeper:
    """A participant that answers at once, with seconds that were given to it, and writes down when it was asked."""

    def __init__(self, name: str, seconds: list[float], asked: list, parameters: int = 7):
        self.name, self._seconds, self._asked = name, iter(seconds), asked
        self.facts = {"parameters": parameters, "threads": 2, "versions": {}}
        self.closed = False

    def take(self, steps: int, *, lead: int) -> dict[str, float]:
        self._asked.append((self.name, lead, steps))
        return {"seconds": next(self._seconds) * steps, "loss": 4.0, "peak_bytes": 11}

    def cpu_seconds(self) -> float:
        return 0.5 * len(self._asked) if self.name == "flax" else 0.0

    def close(self) -> None:
        self.closed = True


SECONDS = {"ours": [1.0, 2.0, 1.0], "transformers": [3.0, 4.0, 5.0], "flax": [2.0, 6.0, 1.0]}


def measured(monkeypatch, **counts: int):
    """A measurement with sleepers: (result, what they were asked, the sleepers)."""
    monkeypatch.setitem(sizes.WORKLOADS, "step_a", dataclasses.replace(sizes.WORKLOADS["step_a"], steps=30, lead=2))
    monkeypatch.setattr(session, "LONG", 1000)
    asked, made = [], {}

    def start(name: str, module: str, workload: str, *way: str, environment: dict) -> Sleeper:
        assert bool(environment) == (name == "ours")
        if way == ("compile",):
            raise participant.Unavailable("there is no C++ compiler")
        made[name] = Sleeper(name, SECONDS[name], asked, counts.get(name, 7))
        return made[name]

    try:
        return session.measure("step_a", rounds=3, start=start, say=lambda line: None), asked, made
    finally:
        assert all(sleeper.closed for sleeper in made.values())


def test_participants_take_turns_and_ratios_are_those_of_each_turn(monkeypatch):
    result, asked, made = measured(monkeypatch)
    assert asked == [("ours", 2, 30), ("transformers", 2, 30), ("flax", 2, 30)] * 3
    assert result["ours"]["seconds"] == [1.0, 2.0, 1.0]
    assert result["peers"]["transformers"]["ratio"] == 3.0  # of 3/1, 4/2, 5/1; that of the medians would be 4
    assert result["peers"]["transformers"]["ratio_spread"] == [2.0, 5.0]
    assert (result["fastest_peer"], result["ratio"], result["ratio_spread"]) == ("flax", 2.0, [1.0, 3.0])
    assert result["ours"]["per_second"] == 12 * 64
    assert result["missing"] == {"transformers compiled": "there is no C++ compiler"}
    assert result["awake_share"] > 0.05  # flax uses time where others have their turn
    assert "not a quiet measurement" in table.workload("step_a", result)


def test_a_peer_that_cannot_be_the_fastest_has_one_turn_where_turns_are_long(monkeypatch):
    monkeypatch.setitem(sizes.WORKLOADS, "step_a", dataclasses.replace(sizes.WORKLOADS["step_a"], steps=1))
    seconds = {"ours": [9.0] * 3, "transformers": [6.0, 6.0, 6.0], "transformers compiled": [8.0] * 3, "flax": [9.1]}
    asked = []

    def start(name: str, *_: str, **__: dict) -> Sleeper:
        return Sleeper(name, seconds[name], asked)

    result = session.measure("step_a", rounds=3, start=start, say=lambda line: None)
    assert [len(report["seconds"]) for report in result["peers"].values()] == [3, 3, 1]  # 9.1 is above 1.5 x 6
    assert len(result["ours"]["seconds"]) == 3
    told = table.workload("step_a", result)
    assert [("one turn" in line) for line in told.splitlines()[:6]] == [False] * 5 + [True]
    assert not session.hopeless("a", {"ours": {"seconds": 1.0}, "a": {"seconds": 4.9}, "b": {"seconds": 1.0}})


def test_models_of_unequal_size_are_not_compared(monkeypatch):
    with pytest.raises(RuntimeError, match="not of one size: ours 7, transformers 7, flax 8 parameters"):
        measured(monkeypatch, flax=8)


def test_without_any_peer_ours_is_measured_alone(monkeypatch):
    def start(name: str, *_: str, **__: dict) -> Sleeper:
        if name != "ours":
            raise participant.Unavailable("No module named 'torch'")
        return Sleeper(name, [1.0], [])

    result = session.measure("step_a", rounds=1, start=start, say=lambda line: None)
    assert (result["peers"], "ratio" in result, len(result["missing"])) == ({}, False, 3)
    told = table.workload("step_a", result)
    assert "transformers is missing: No module named 'torch'" in told
    assert table.overview({"step_a": result}) == ""


def test_a_process_answers_only_when_asked_and_what_it_prints_is_no_answer(monkeypatch):
    monkeypatch.setenv("THERE", "before")
    given = {"GIVEN": "now", "THERE": "now"}
    one = participant.Participant("one", "tests.benchmark_participant", "works", environment=given)
    try:
        assert (one.facts["parameters"], one.facts["threads"]) == (7, 1)
        assert one.facts["versions"] == {"HF_HUB_OFFLINE": "1", "GIVEN": "now", "THERE": "before"}
        answer = one.take(3, lead=100)
        assert answer["loss"] == 3.0 and 0.03 <= answer["seconds"] < 1 and answer["peak_bytes"] > 2**20
        before = one.cpu_seconds()
        assert before > 0
    finally:
        one.close()


def test_what_a_process_lacks_is_one_sentence_and_its_failure_is_told():
    with pytest.raises(participant.Unavailable, match="^there is no such library$"):
        participant.Participant("one", "tests.benchmark_participant", "missing")
    with pytest.raises(RuntimeError, match="(?s)one has ended.*the model cannot be built"):
        participant.Participant("one", "tests.benchmark_participant", "fails")


@pytest.mark.parametrize("name", STEPS)
def test_ours_and_flax_have_equally_many_parameters(name, tmp_path):
    size = sizes.WORKLOADS[name]
    plan = ours.prepared(name, tmp_path)
    mine = jax.eval_shape(plan.task.init, jax.random.key(0))
    if size.kind == "images":
        peer, example = flax_peer.ViT(size), inputs.images(dataclasses.replace(size, B=1))[0][0]
    else:
        peer, example = flax_peer.GPT2(size), inputs.words(dataclasses.replace(size, B=1))[0][0]
    theirs = jax.eval_shape(peer.init, jax.random.key(0), example)["params"]
    assert shapes.total(mine) == sum(leaf.size for leaf in jax.tree.leaves(theirs))
    batch = plan.task.train[0]
    fed = batch["image_BYXZ"] if size.kind == "images" else batch["w_BN"]
    assert fed.shape == (size.B, *example.shape[1:])


@pytest.mark.parametrize("name", STEPS)
def test_ours_and_transformers_have_equally_many_parameters(name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks import torch_peer

    size = sizes.WORKLOADS[name]
    mine = jax.eval_shape(ours.prepared(name, tmp_path).task.init, jax.random.key(0))
    theirs = torch_peer.vit(size) if size.kind == "images" else torch_peer.gpt2(size)
    assert shapes.total(mine) == sum(leaf.numel() for leaf in theirs.parameters())


@pytest.mark.parametrize("kind", ["words", "images"])
def test_our_steps_train(kind, monkeypatch):
    """The random words of a few batches that come again and again can be learned; a step that does nothing cannot."""
    monkeypatch.setitem(sizes.WORKLOADS, "tiny", TINY[kind])
    monkeypatch.setattr(sizes, "KEPT", 2)
    monkeypatch.setitem(sizes.OPTIMISER, "learning_rate", 0.03)
    built = ours.build(["tiny"])
    first = built.steps(1)
    assert built.parameters > 100 and np.isfinite(first)
    assert built.steps(60) < first - 0.3


def test_flax_steps_train(monkeypatch):
    monkeypatch.setitem(sizes.WORKLOADS, "tiny", TINY["images"])
    monkeypatch.setattr(sizes, "KEPT", 2)
    monkeypatch.setitem(sizes.OPTIMISER, "learning_rate", 0.03)
    built = flax_peer.build(["tiny"])
    first = built.steps(1)
    assert built.steps(60) < first - 0.3


def test_both_generate_all_words_that_were_asked_for(monkeypatch):
    monkeypatch.setitem(sizes.WORKLOADS, "tiny", TINY["generation"])
    mine, theirs = ours.build(["tiny"]), flax_peer.build(["tiny"])
    assert mine.parameters == theirs.parameters
    assert (mine.steps(2), theirs.steps(2)) == (0.0, 0.0)  # each counts its words, or fails
    monkeypatch.setattr(sizes.Workload, "counted", 41)
    for built in (mine, theirs):
        with pytest.raises(RuntimeError, match="39 words instead of 41"):
            built.steps(1)


def test_flax_generates_what_its_model_says_of_the_whole_text(monkeypatch):
    """Words drawn at a temperature near 0 are the likeliest ones by the model without a cache."""
    monkeypatch.setattr(sizes, "TEMPERATURE", 1e-6)
    size = TINY["generation"]
    drawn = []
    monkeypatch.setattr(jax, "device_get", lambda words: drawn.append(np.asarray(words)) or words)
    steps, params = flax_peer.generation(size)
    steps(1)
    w_BN = np.concatenate([inputs.prompt(size), drawn[0].T], axis=1)
    logits_BNW = flax_peer.GPT2(size).apply({"params": params}, w_BN[:, :-1])
    np.testing.assert_array_equal(logits_BNW.argmax(-1), w_BN[:, 1:])


def test_inputs_have_every_word_and_no_two_batches_alike(tmp_path):
    size = TINY["words"]
    inputs.write_text(tmp_path / "text", size)
    assert len(set((tmp_path / "text").read_text())) == size.W
    batches = [w_BN.tobytes() for w_BN, _ in inputs.words(size)]
    assert len(set(batches)) == len(batches) == sizes.KEPT
    w_BN, target_BN = inputs.words(size)[0]
    np.testing.assert_array_equal(w_BN[:, 1:], target_BN[:, :-1])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--only", "step_z"], 'no measurement "step_z"; the right names are: step_a, step_b'),
        (["--rounds", "0"], "--rounds must be at least 1, and 0 is not"),
        (["--json", "nowhere/a.json"], "nowhere/a.json cannot be written: there is no folder"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_code_2(words, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        command.arguments(words)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and sentence in told and told.count("\n") == 1


def test_the_files_say_what_was_measured(monkeypatch, tmp_path, capsys):
    result, _, _ = measured(monkeypatch)
    monkeypatch.setattr(session, "measure", lambda name, **_: result)
    files = ["--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")]
    assert command.main(["--only", "step_a", "step_d", "step_a", *files]) == 0
    written = json.loads((tmp_path / "a.json").read_text())
    assert list(written) == ["machine", "versions", "step_a", "step_d"]
    assert written["step_a"]["ratio"] == 2.0 and written["machine"]["cores"] >= 1 and "jax" in written["versions"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "step_a" in told and "2.00        ?   flax (1.00-3.00)" in told and "product rate" not in told


def test_our_share_of_the_product_rate_and_the_limit_are_told(monkeypatch, capsys, tmp_path):
    """A step of 1 s in which 6 GFLOP are done, beside products at 8 GFLOP/s; the fastest peer's takes 2 s."""
    result, _, _ = measured(monkeypatch)
    least = {"step_a": 0.75, "step_b": 0.125}
    product = {"xla": {"median": 8e9}, "step_flops": {"step_a": 6e9, "step_b": 1e9}, "least_seconds": least}
    monkeypatch.setattr(command, "measured", lambda name, rounds: (result if name == "step_a" else product, name))
    assert command.main(["--only", "step_a", "product", "--json", str(tmp_path / "a.json")]) == 0
    told = capsys.readouterr().out
    assert "75% of the product rate" in told and "2.00     2.67   flax" in told
    written = json.loads((tmp_path / "a.json").read_text())["step_a"]
    assert written["ours"]["share_of_product_rate"] == 0.75 and written["ratio_at_most"] == pytest.approx(2 / 0.75)


def test_every_bar_is_as_high_as_its_ratio_or_is_cut_and_says_so(monkeypatch):
    result, _, _ = measured(monkeypatch)
    result["peers"]["flax"] |= {"ratio": 31.0, "ratio_spread": [30.0, 33.0]}
    axes = matplotlib.figure.Figure().subplots()
    figure.bars(axes, 0, result, ["ours", "transformers", "flax"])
    assert [bar.get_height() for bar in axes.patches] == [1.0, 3.0, figure.HIGHEST]
    assert [text.get_text() for text in axes.texts] == ["3.00", "↑ 31.0"]


def test_the_machine_is_told(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0")
    found = machine.machine()
    assert "GLIBC_TUNABLES=glibc.malloc.mmap_max=0" in table.heading(found, {}).splitlines()
    assert found["memory_gib"] > 0.5 and found["processor"]
    assert {"python", "jax"} <= machine.versions().keys()


def test_settings_are_those_of_a_config_file(tmp_path):
    """What a workload says is in the settings, and nothing that the experiment does not use is set."""
    made = ours.training("step_d", tmp_path)
    assert (made.model.attention, made.text.N, made.train.batch_size, made.model.F) == ("flash", 8192, 1, 512)
    assert (made.optim.beta2, made.optim.clip, made.model.dropout, made.model.compute_dtype) == (0.95, 1, 0, "float32")
    assert pathlib.Path(made.text.source).parent == tmp_path
