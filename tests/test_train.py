"""The command `tfaccum-train`, as a process and from within."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import workers
from tests.test_callbacks import scalars
from tfaccum.train import main, options, verify

ROOT = Path(__file__).parents[1]
DIGITS = "--experiment=experiments/digits_cnn.py"
TINY = """
    import keras
    import numpy as np
    import tensorflow as tf

    DEFAULTS = {
        "global_batch": 16,
        "micro_batch": 4,
        "epochs": 2,
        "learning_rate": 0.1,
    }

    def model():
        return keras.Sequential([keras.Input((3,)), LAYERS])

    def data(*, batch_size, seed, data_dir):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(40, 3)).astype("float32")
        y = x.sum(1, keepdims=True)
        data = tf.data.Dataset.from_tensor_slices((x, y))
        return data.batch(batch_size), data.take(10).batch(5)

    def compile_arguments(*, learning_rate, num_updates):
        assert num_updates == UPDATES, num_updates
        return {
            "optimizer": keras.optimizers.OPTIMIZER(learning_rate),
            "loss": "mse",
            "metrics": ["mae"],
        }
"""


@pytest.fixture
def tiny(tmp_path):
    """Writes an experiment of 40 examples: 2.5 windows of 16 an epoch."""

    def write(
        layers="keras.layers.Dense(1)", optimizer="SGD", updates=6, text=TINY
    ):
        path = tmp_path / "tiny.py"
        text = textwrap.dedent(text).replace("LAYERS", layers)
        text = text.replace("OPTIMIZER", optimizer)
        path.write_text(text.replace("UPDATES", str(updates)))
        return f"--experiment={path}"

    return write


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("TF_CONFIG", raising=False)


def command(*flags, env=None):
    """Runs the command as a process."""
    return subprocess.run(
        [sys.executable, "-m", "tfaccum.train", *map(str, flags)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )


def run_here(*flags):
    """Runs the command in this process; returns its exit code."""
    return main(["tfaccum-train", *map(str, flags)])


def parse(*flags):
    return options.parse(["tfaccum-train", *map(str, flags)])


# --- What is checked before TensorFlow starts ------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--experiment must be given"),
        (["--experiment=nope.py"], "--experiment=nope.py, and there is no"),
        (["--experiment=no.where"], "--experiment=no.where, and there is no"),
        (["--experiment=setup.cfg"], "--experiment=setup.cfg"),
        (["--experiment=tfaccum/batching.py"], "without model, data, compile"),
        ([DIGITS, "--epochs=0"], "--epochs=0: "),
        ([DIGITS, "--epochs=x"], "--epochs=x: "),
        ([DIGITS, "--learning_rate=-1"], "--learning_rate=-1"),
        ([DIGITS, "--precision=fp8"], "--precision=fp8: value should be one"),
        ([DIGITS, "--precison=float32"], "Did you mean: precision"),
        ([DIGITS, "float32"], "every argument must be a flag"),
        ([DIGITS, "--virtual_devices=3"], "num_replicas=3 (from --virtual"),
        ([DIGITS, "--devices=a,b,c"], "num_replicas=3 (from --devices)"),
        ([DIGITS, "--global_batch=100", "--micro_batch=32"], "100 = 32 x 1"),
        (
            [DIGITS, "--devices=a,b", "--virtual_devices=2"],
            "must not be given together",
        ),
        ([DIGITS, "--strategy=multi_worker"], "needs a cluster"),
        ([DIGITS, "--task_index=0"], "--worker_hosts and --task_index must"),
        (
            [DIGITS, "--worker_hosts=a:1,b:0", "--task_index=0"],
            "from 1 to 65535. Received: 'b:0'",
        ),
        (
            [DIGITS, "--worker_hosts=a:1,b:1", "--task_index=2"],
            "must be from 0 to 1",
        ),
        (
            [DIGITS, "--worker_hosts=a:1,b:1", "--task_index=0", "--devices=a"],
            "--devices must not be given when --worker_hosts names a cluster",
        ),
        ([DIGITS, "--cluster=slurm"], "Put srun before the command"),
        ([DIGITS, "--cluster=tf_config"], "Received: no TF_CONFIG"),
        ([DIGITS, "--communication=mpi"], "--communication=mpi: value should"),
        (
            [DIGITS, "--strategy=mirrored", "--virtual_devices=1"],
            "needs two or more devices. Received: 1 device in --virtual_dev",
        ),
        (
            [DIGITS, "--strategy=one_device", "--devices=a,b"],
            "needs one device. Received: 2 devices in --devices",
        ),
        ([DIGITS, "--model_dir=setup.cfg"], "--model_dir=setup.cfg"),
        ([DIGITS, "--model_dir=setup.cfg/x"], "Not a directory"),
        ([DIGITS, "--model_dir=tests"], "--model_dir=tests, which is not empt"),
        ([DIGITS, "--resume=yes"], "--resume=yes: value should be one"),
        (
            [DIGITS, "--resume=must"],
            "--resume=must --model_dir=runs/digits_cnn",
        ),
        ([DIGITS, "--save_every_updates=0"], "--save_every_updates=0"),
        ([DIGITS, "--keep=0"], "--keep=0"),
        ([DIGITS, "--max_run_seconds=0"], "--max_run_seconds=0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(flags, message, capsys):
    assert run_here(*flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tfaccum-train: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("DEFAULTS = {'epocs': 3}", "Received: 'epocs'"),
        ("DEFAULTS = {'epochs': 0}", "flag --epochs=0"),
        ("DEFAULTS = {'epochs': f()}", "Received: {'epochs': f()}"),
        ("DEFAULTS = 3", "Received: 3"),
        ("DEFAULTS = {'epochs': 3}", "--learning_rate must be given"),
        ("DEFAULTS = {", "must be Python"),
        (
            "DEFAULTS = {'learning_rate': 1}",
            "micro_batch_size=None (not given)",
        ),
    ],
)
def test_a_mistake_in_the_experiment_is_found_early(
    defaults, message, tiny, capsys
):
    functions = "def model(): 0\ndef data(): 0\ndef compile_arguments(): 0\n"
    assert run_here(tiny(text=f"{functions}{defaults}\n")) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "TF_CONFIG must be JSON"),
        ("[]", "TF_CONFIG must be JSON"),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, '
            '"task": {"type": "worker", "index": 0}}',
            "--strategy=mirrored must not be given when TF_CONFIG",
        ),
    ],
)
def test_a_mistake_in_TF_CONFIG_is_found_early(
    config, message, monkeypatch, capsys
):
    monkeypatch.setenv("TF_CONFIG", config)
    assert run_here(DIGITS, "--strategy=mirrored") == 2
    assert message in capsys.readouterr().err


def test_workers_compare_what_has_to_be_the_same(tiny, tmp_path):
    experiment = tiny()
    one = parse(experiment, "--model_dir=one", "--data_dir=a").fingerprint
    assert one["--seed"] == "0" and one["--epochs"] == "2"
    hosts = ["--worker_hosts=a:1,b:1", "--start_timeout=5"]
    for index in (0, 1):
        other = parse(experiment, *hosts, f"--task_index={index}")
        assert other.fingerprint == one
        assert other.cluster.index == index
    assert parse(experiment, "--seed=1").fingerprint == {**one, "--seed": "1"}
    path = tmp_path / "tiny.py"
    path.write_text(path.read_text() + "# Changed.\n")
    changed = parse(experiment).fingerprint
    different = {name for name in one if one[name] != changed[name]}
    assert different == {"content of --experiment"}


def test_M2_an_absent_worker_is_one_line_and_exit_code_1(tiny, capsys):
    first, second = workers.free_addresses(2)
    hosts = [f"--worker_hosts={first},{second}", "--task_index=0"]
    assert run_here(tiny(), *hosts, "--start_timeout=1") == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"after 1 s nothing from worker 1 ({second})" in err


def test_mistakes_are_found_without_tensorflow(tmp_path):
    # The package itself may import TensorFlow; `tfaccum.train` must not.
    program = f"""
        import sys, types
        package = types.ModuleType("tfaccum")
        package.__path__ = [{str(ROOT / "tfaccum")!r}]
        sys.modules["tfaccum"] = package
        from tfaccum.train import main
        codes = [main(["tfaccum-train", *flags]) for flags in (
            ["--helpshort"],
            ["--experiment=nope.py"],
            ["{DIGITS}", "--global_batch=100", "--virtual_devices=2"],
            ["{DIGITS}", "--model_dir=setup.cfg"],
            ["{DIGITS}", "--worker_hosts=a:1,a:1", "--task_index=0"],
        )]
        assert codes == [0, 2, 2, 2, 2], codes
        assert not {{"tensorflow", "keras", "numpy"}} & set(sys.modules)
        """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        check=True,
        timeout=60,
    )


def test_M1_an_impossible_plan_names_all_four_numbers_and_their_sources(capsys):
    flags = [DIGITS, "--global_batch=256", "--micro_batch=4"]
    flags += ["--accumulation_steps=8", "--virtual_devices=1"]
    assert run_here(*flags) == 2
    err = capsys.readouterr().err
    for text in (
        "256 != 4 x 1 x 8 (= 32)",
        "global_batch_size=256 (from --global_batch)",
        "micro_batch_size=4 (from --micro_batch)",
        "num_replicas=1 (from --virtual_devices)",
        "gradient_accumulation_steps=8 (from --accumulation_steps)",
        "Change global_batch_size to 32",
    ):
        assert text in err
    assert run_here(DIGITS, "--virtual_devices=3") == 2
    err = capsys.readouterr().err
    assert "(from DEFAULTS of experiments/digits_cnn.py)" in err
    assert "Change global_batch_size to 96 or 144" in err


def test_M1_the_plan_is_made_with_the_replicas_of_the_strategy(tiny, capsys):
    # Three numbers that fit two replicas, and nothing says how many there are.
    flags = ["--global_batch=16", "--micro_batch=4", "--accumulation_steps=2"]
    assert run_here(tiny(), *flags, "--model_dir=runs/never") == 2
    err = capsys.readouterr().err
    assert "16 != 4 x 1 x 2" in err
    assert "num_replicas=1 (from OneDeviceStrategy, 1 worker(s) x 1)" in err
    assert not (ROOT / "runs/never").exists()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (128, 16, 2, 4)),
        (["--global_batch=256"], (256, 16, 2, 8)),
        (["--micro_batch=8"], (128, 8, 2, 8)),
        (["--accumulation_steps=2"], (128, 32, 2, 2)),
        (["--micro_batch=8", "--accumulation_steps=3"], (48, 8, 2, 3)),
        (["--global_batch=64", "--accumulation_steps=4"], (64, 8, 2, 4)),
    ],
)
def test_flags_win_over_the_experiment(flags, expected, tmp_path):
    found = parse(
        DIGITS, "--virtual_devices=2", f"--model_dir={tmp_path / 'new'}", *flags
    )
    plan = found.plan(2, "a test")
    assert expected == (
        plan.global_batch_size,
        plan.micro_batch_size,
        plan.num_replicas,
        plan.gradient_accumulation_steps,
    )
    assert (found.epochs, found.learning_rate) == (15, 0.1)
    assert parse(DIGITS, "--epochs=3", "--learning_rate=0.5").epochs == 3
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "flags, text",
    [
        (["--accumulation_schedule=3"], "--accumulation_schedule=3."),
        (["--accumulation_schedule=0:2"], "--accumulation_schedule=0:2"),
        (
            ["--accumulation_schedule=5:2,5:4"],
            "--accumulation_schedule=5:2,5:4",
        ),
        (["--accumulation_schedule=5:0"], "--accumulation_schedule=5:0"),
        (["--accumulation_schedule=5:2", "--cut_batches"], "--cut_batches, "),
        (
            ["--accumulation_schedule=5:2", "--verify_updates=6"],
            "Received: --verify_updates=6",
        ),
    ],
)
def test_a_wrong_schedule_is_refused(flags, text, capsys):
    assert run_here(DIGITS, *flags) == 2
    assert text in capsys.readouterr().err


def test_help_is_readable_and_about_this_command_only(capsys):
    assert run_here("--helpshort") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    names = set(re.findall(r"^  --(?:\[no\])?(\w+)", text, re.MULTILINE))
    assert names == set(parse(DIGITS).flags)


# --- A run -----------------------------------------------------------------


def test_batches_that_grow(tmp_path):
    """The plan says so, and the updates are counted: 90 batches an epoch."""
    result = command(
        DIGITS,
        "--virtual_devices=1",
        "--global_batch=32",
        "--micro_batch=16",
        "--epochs=2",
        "--accumulation_schedule=40:5,50:100",
        "--auto_micro_batch",
        f"--model_dir={tmp_path / 'model'}",
        f"--data_dir={tmp_path / 'data'}",
    )
    assert result.returncode == 0, result.stderr
    assert (
        "global batch 32 = 16 micro-batch x 1 replica x 2 micro-steps (2 "
        "dataset batches of 16); 80 from update 40 (5 micro-steps); 1600 from "
        "update 50 (100 micro-steps); smaller micro-batches if these do not "
        "fit" in result.stdout
    )
    # 40 of 2 batches, 2 of 5; then 8 of 5, and one of all 50 that are left.
    assert "90 dataset batches, 51 updates in 2 epochs" in result.stdout
    summary = json.loads((tmp_path / "model/summary.json").read_text())
    assert summary["results"]["updates"] == 51


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run as a process: two replicas, mixed precision, verified."""
    folder = tmp_path_factory.mktemp("run")
    result = command(
        DIGITS,
        "--virtual_devices=2",
        "--precision=mixed_bfloat16",
        "--epochs=2",
        "--verify_updates=2",
        f"--model_dir={folder / 'model'}",
        f"--data_dir={folder / 'data'}",
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, folder / "model"


def test_K3_a_run_says_its_plan_and_its_bar_ends_at_its_total(run):
    lines = run[0].splitlines()
    plan = (
        "global batch 128 = 16 micro-batch x 2 replicas x 4 micro-steps "
        "(4 dataset batches of 32)"
    )
    assert plan in lines
    epochs = "45 dataset batches, 12 updates per epoch, 24 updates in 2 epochs"
    assert epochs in lines
    bars = [line for line in lines if "/step" in line]
    assert [line.split(" ")[0] for line in bars] == ["45/45"] * 2
    assert [line.rpartition("updates: ")[2] for line in bars] == ["12", "24"]
    rates = [float(re.search(r"examples/s: (\d+)", bar)[1]) for bar in bars]
    assert min(rates) > 0


def test_a_run_ends_with_a_table_and_the_verdict(run):
    stdout, model_dir = run
    lines = stdout.rstrip().splitlines()
    assert lines[-1] == "equal to the one-big-batch run: yes"
    assert lines[-2] == "tolerance for bfloat16: 6.2e-02"
    assert "largest difference of a weight in 2 updates: " in lines[-3]
    table = dict(re.findall(r"^(\S.*?)  +(.+)$", stdout, re.MULTILINE))
    summary = json.loads((model_dir / "summary.json").read_text())
    results = summary["results"]
    assert table["final loss"] == f"{results['loss']:.4f}"
    assert table["validation accuracy"] == f"{results['val_accuracy']:.4f}"
    assert (table["updates"], table["skipped updates"]) == ("24", "0")
    assert float(table["examples/s"].replace(",", "")) > 0
    wait = f"{100 * results['input_wait']:.1f} % of the time"
    assert table["waited for data"] == wait
    assert 0 < results["input_wait"] < 1
    # Gradient sums in float32, and some scalars.
    size = int(table["accumulators"].split()[0].replace(",", ""))
    assert 0 <= size - 4 * num_weights(model_dir) < 100
    assert f"gradient sums take {size:,} bytes per replica" in stdout
    assert table["written to"] == str(model_dir)


def num_weights(model_dir):
    model = keras.models.load_model(model_dir / "final.keras")
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def test_K2_a_run_writes_one_scalar_per_update(run):
    train = scalars(run[1] / "tensorboard" / "train")
    for tag in ("loss", "learning_rate", "gradient_norm", "loss_scale"):
        assert [step for step, _ in train[tag]] == list(range(1, 25))
    validation = scalars(run[1] / "tensorboard" / "validation")
    summary = json.loads((run[1] / "summary.json").read_text())
    np.testing.assert_allclose(
        [value for _, value in validation["epoch_accuracy"]],
        summary["epochs"]["val_accuracy"],
    )
    np.testing.assert_allclose(
        [value for _, value in train["loss"]],
        summary["curves"]["loss"],
        rtol=1e-6,
    )


def test_a_run_leaves_a_summary_for_machines(run):
    text = (run[1] / "summary.json").read_text()
    summary = json.loads(text)
    assert list(summary) == sorted(summary)
    assert summary["flags"]["virtual_devices"] == 2
    assert summary["flags"]["global_batch"] == 128  # of the experiment
    assert summary["plan"]["num_replicas"] == 2
    assert summary["versions"]["tensorflow"] == tf.__version__
    assert summary["verification"]["equal"] is True
    assert re.match(r"\d+ cores of .+", summary["hardware"])
    assert summary["curves"]["update"] == list(range(1, 25))
    assert summary["epochs"]["updates"] == [12, 24]
    assert len(text.splitlines()) < 100
    assert (run[1] / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_K5_the_rate_of_a_run_agrees_with_its_wall_time(run):
    results = json.loads((run[1] / "summary.json").read_text())["results"]
    # 2 epochs of 1,438 examples: all replicas, all micro-steps.
    assert results["examples_per_second"] > 2 * 1438 / results["wall_time"]
    # The same, from the scalars: all updates but the first, which traces. The
    # first scalars take long to write, in the time of the second update.
    sizes = ([128] * 11 + [1438 - 11 * 128]) * 2
    events = scalars(run[1] / "tensorboard" / "train")["examples_per_second"]
    seconds = [
        size / value for size, (_, value) in zip(sizes, events, strict=True)
    ]
    assert sum(sizes[1:]) / sum(seconds[1:]) == pytest.approx(
        results["examples_per_second"], rel=0.25
    )
    assert sum(seconds) < results["wall_time"]


def test_the_model_of_a_run_can_be_loaded(run):
    model = keras.models.load_model(run[1] / "final.keras")
    assert isinstance(model, tfaccum.Model)
    assert model(np.zeros((2, 8, 8, 1))).shape == (2, 10)


@pytest.mark.parametrize(
    "flags",
    [
        ["--accumulation_steps=1", "--global_batch=16"],
        ["--accumulation_steps=4", "--global_batch=16"],
        ["--cut_batches"],
        ["--devices=CPU:0,CPU:1"],
        ["--devices=CPU:0,CPU:1", "--cut_batches", "--steps_per_execution=2"],
    ],
)
def test_every_way_to_take_the_same_batches_gives_the_same_run(
    tiny, flags, tmp_path, capsys
):
    """Against plain Keras with one big batch."""
    assert run_here(tiny(), f"--model_dir={tmp_path / 'm'}", *flags) == 0
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype("float32")
    y = x.sum(1, keepdims=True)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    history = model.fit(
        data.batch(16),
        validation_data=data.take(10).batch(5),
        epochs=2,
        verbose=0,
    ).history
    found = json.loads((tmp_path / "m/summary.json").read_text())["epochs"]
    for name, values in history.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)
    assert found["updates"] == [3, 6]


@pytest.mark.parametrize("precision", options.PRECISIONS)
def test_verification_finds_equal_updates(tiny, precision, tmp_path, capsys):
    code = run_here(
        tiny("keras.layers.Dense(8, activation='tanh'), keras.layers.Dense(1)"),
        "--devices=CPU:0,CPU:1",
        "--micro_batch=2",
        f"--precision={precision}",
        "--verify_updates=5",
        f"--model_dir={tmp_path / 'm'}",
    )
    assert code == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[-1].startswith("equal to the one-big-batch run: yes")
    # The whole first epoch, its short last window included. In float16, the
    # gradient of a micro-batch may overflow where the big batch's does not.
    compared = {"in 3 updates", "in 2 updates"}
    if precision != "mixed_float16":
        compared = {"in 3 updates"}
        assert lines[-1].endswith("yes")
    assert any(text in lines[-3] for text in compared)


def test_verification_finds_a_model_outside_the_law(tiny, tmp_path, capsys):
    # Its output depends on the other examples of the micro-batch.
    centred = "keras.layers.Lambda(lambda x: x - keras.ops.mean(x, 0))"
    code = run_here(
        tiny(f"{centred}, keras.layers.Dense(1)"),
        "--verify_updates=2",
        f"--model_dir={tmp_path / 'm'}",
    )
    assert code == 1
    out = capsys.readouterr().out
    assert out.endswith("equal to the one-big-batch run: no\n")
    summary = json.loads((tmp_path / "m/summary.json").read_text())
    assert summary["verification"]["equal"] is False


@pytest.mark.parametrize(
    "layer", ["keras.layers.Dropout(0.5)", "keras.layers.BatchNormalization()"]
)
def test_verification_names_layers_that_are_exceptions(
    tiny, layer, tmp_path, capsys
):
    code = run_here(
        tiny(f"{layer}, keras.layers.Dense(1)"),
        "--verify_updates=2",
        f"--model_dir={tmp_path / 'm'}",
    )
    assert code == 0
    name = layer.split(".")[2].split("(")[0]
    assert capsys.readouterr().out.endswith(
        "equal to the one-big-batch run: not compared (the law does not hold "
        f"for {name})\n"
    )


def test_verification_says_that_sgd_took_the_place_of_adam(
    tiny, tmp_path, capsys
):
    code = run_here(
        tiny(optimizer="Adam"),
        "--verify_updates=2",
        f"--model_dir={tmp_path / 'm'}",
    )
    assert code == 0
    assert capsys.readouterr().out.endswith(
        "equal to the one-big-batch run: yes (with SGD in the place of Adam)\n"
    )


def test_verification_leaves_out_what_overflowed_in_one_way_only():
    weights = [np.array([1.0]), np.array([2.0, 3.0])]
    updates = [
        verify.BigBatchUpdate(weights, None, [w - 1 for w in weights])
    ] * 2

    class Skips(keras.Model):
        def fit(self, *_, callbacks, **__):
            pass

        def get_weights(self):
            return weights

    data = [[(tf.zeros((2, 1)), tf.zeros((2, 1)))]] * 2
    assert verify.relative_differences(Skips(), updates, data) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices=GPU:7"], "`devices` must name visible devices"),
        (["--strategy=mirrored"], "--strategy=mirrored needs two or more"),
        (["--devices=CPU:0,CPU:1", "--jit"], "`jit_compile` must be False"),
    ],
)
def test_what_only_tensorflow_can_know_is_one_line_too(
    tiny, flags, message, tmp_path, capsys
):
    model_dir = tmp_path / "m"
    assert run_here(tiny(), *flags, f"--model_dir={model_dir}") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err
    assert not model_dir.exists()


def test_mnist_that_is_not_there_is_one_line(tmp_path, capsys):
    code = run_here(
        "--experiment=experiments.mnist_lenet",
        f"--data_dir={tmp_path}",
        f"--model_dir={tmp_path / 'm'}",
    )
    assert code == 2
    err = capsys.readouterr().err
    assert "`data_dir` must hold the prepared dataset 'mnist'" in err


# --- Slow ------------------------------------------------------------------


@pytest.mark.slow
def test_the_demo_learns_the_digits(tmp_path):
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    flags = re.search(r"^DEMO_FLAGS \?= (.+)$", makefile, re.MULTILINE)[1]
    result = command(
        *shlex.split(flags),
        f"--data_dir={tmp_path / 'data'}",
        f"--model_dir={tmp_path / 'm'}",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("equal to the one-big-batch run: yes\n")
    summary = json.loads((tmp_path / "m/summary.json").read_text())
    assert summary["results"]["val_accuracy"] >= 0.97
    assert summary["plan"]["num_replicas"] == 2
    assert summary["plan"]["gradient_accumulation_steps"] > 1
    assert summary["flags"]["precision"].startswith("mixed")


# --- Ending and going on ---------------------------------------------------


def test_a_run_that_is_asked_to_end_goes_on(tiny, tmp_path):
    """Ends after the first of six updates, by exit code 75."""
    experiment = tiny()
    runs = []
    for name, flags in (
        ("whole", []),
        ("run", ["--max_run_seconds=0.001"]),
        ("run", ["--resume=must", "--save_best=val_loss"]),
    ):
        done = command(experiment, f"--model_dir={tmp_path / name}", *flags)
        runs.append((done.returncode, done.stdout))
    (_, _), (first, said), (second, went_on) = runs
    assert (first, second) == (75, 0)
    assert f"--model_dir={tmp_path / 'run'}" in said.splitlines()[-1]
    # Windows of four batches.
    assert "Going on after update 1, with batch 5 of epoch 1" in went_on
    found, expected = (
        json.loads((tmp_path / name / "summary.json").read_text())
        for name in ("run", "whole")
    )
    assert found["curves"] == expected["curves"]
    assert found["curves"]["update"] == [1, 2, 3, 4, 5, 6]
    for name, values in expected["epochs"].items():
        if name not in ("examples/s", "input_wait"):
            assert found["epochs"][name] == values
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "best.json",
        "checkpoints",
        "curves.png",
        "final.keras",
        "model.json",
        "summary.json",
        "tensorboard",
    }

    program = (
        "import sys, numpy, tfaccum\n"
        "model = tfaccum.load(sys.argv[1])\n"
        "print(model.predict(numpy.ones([2, 3]), verbose=0).shape)\n"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "run"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert loaded.stdout == "(2, 1)\n", loaded.stderr


def test_never_refuses_a_run_that_is_there(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    flags = [DIGITS, f"--model_dir={tmp_path}", "--resume=never"]
    assert run_here(*flags) == 2
    assert "--resume=never" in capsys.readouterr().err
    assert parse(DIGITS, f"--model_dir={tmp_path}").resume == "auto"


def test_a_launcher_that_starts_again_goes_on_in_one_folder(monkeypatch):
    monkeypatch.setenv("TFACCUM_STARTED", "20260102-030405")
    folder = parse(DIGITS).model_dir
    assert str(folder) == "runs/digits_cnn-20260102-030405"


@pytest.mark.slow
def test_two_workers_run_the_same_command_and_the_chief_writes(tmp_path):
    folder = tmp_path / "m"
    results = workers.run_workers(
        "tfaccum.train",
        2,
        timeout=240,
        directory=tmp_path,
        args=[
            DIGITS,
            "--epochs=1",
            "--verify_updates=2",
            "--compare_replicas_every=5",
            f"--data_dir={tmp_path / 'data'}",
            f"--model_dir={folder}",
        ],
    )
    assert results[0].stdout.endswith("equal to the one-big-batch run: yes\n")
    assert "16 micro-batch x 2 replicas x 4" in results[0].stdout
    assert "updates: 12" in results[0].stdout
    assert "global batch" not in results[1].stdout
    # J4: which share of which data.
    told = [re.findall(r"worker (\d) of 2: its share of (\w+)", r.stdout)
            for r in results]  # fmt: skip
    assert told[0][0][0] == "0" and told[1][0][0] == "1"
    assert told[0][0][1] == told[1][0][1]
    assert len(list(folder.glob("tensorboard/train/*"))) == 1
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "curves.png",
        "final.keras",
        "model.json",
        "summary.json",
        "tensorboard",
    }


@pytest.mark.slow
def test_the_table_of_equivalence_holds():
    result = subprocess.run(
        [sys.executable, "experiments/equivalence.py", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("no strategy", "Mirrored x2", "2 workers"):
        assert f"\n{name}" in result.stdout
    assert result.stdout.endswith("larger than the tolerance: none\n")
