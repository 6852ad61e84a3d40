"""docs/clusters.md and its files, as far as one machine can run them."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import workers
from tests.test_docs import blocks, commands
from tests.test_train import TINY
from tfaccum import cluster as clusters

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/clusters.md").read_text()
SBATCH = ROOT / "docs/clusters/slurm.sbatch"
MANIFEST = (ROOT / "docs/clusters/kubernetes.yaml").read_text()
# Stands for srun: two tasks on this host, with the variables of a step.
SRUN = """\
#!{python}
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    assert "=" in command.pop(0)
step = {{
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
}}
tasks = [
    subprocess.Popen(
        command,
        env={{**os.environ, **step, "SLURM_PROCID": n, "SLURM_LOCALID": n}},
    )
    for n in "01"
]
sys.exit(max(task.wait(200) for task in tasks))
"""


@pytest.fixture
def tools(tmp_path):
    """Writes programs into a folder at the head of PATH; the environment."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(**programs):
        for name, text in programs.items():
            path = folder / name.replace("_", "-")
            path.write_text(text.format(python=sys.executable))
            path.chmod(0o755)
        return {
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    return write


@pytest.fixture
def tiny(tmp_path):
    """An experiment of 6 updates."""
    path = tmp_path / "tiny.py"
    text = textwrap.dedent(TINY).replace("LAYERS", "keras.layers.Dense(1)")
    path.write_text(text.replace("OPTIMIZER", "SGD").replace("UPDATES", "6"))
    return path


TRAIN = '#!/bin/sh\nexec {python} -m tfaccum.train "$@"\n'


def assert_trained(folder):
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["plan"]["num_replicas"] == 2
    assert summary["results"]["updates"] == 6


def test_the_page_shows_its_files_as_they_are():
    shown = [block.text for block in blocks(PAGE)]
    assert SBATCH.read_text() in shown
    assert MANIFEST in shown


# --- Two hosts, TF_CONFIG ---------------------------------------------------


def by_hand():
    return [
        words for _, words in commands(PAGE) if "--task_index" in str(words)
    ]


def test_the_commands_of_two_hosts_describe_one_cluster():
    found = []
    for words in by_hand():
        flags = dict(word[2:].split("=") for word in words[1:])
        found.append(
            clusters.find(
                worker_hosts=flags["worker_hosts"].split(","),
                task_index=int(flags["task_index"]),
                environment={},
            )
        )
    assert [cluster.index for cluster in found] == [0, 1]
    assert {cluster.addresses for cluster in found} == {
        ("host1:2222", "host2:2222")
    }


def test_TF_CONFIG_of_the_page_is_right():
    (text,) = re.findall(r"export TF_CONFIG='(.*)'", PAGE)
    found = clusters.from_tf_config(text)
    assert found.addresses == ("host1:2222", "host2:2222")


@pytest.mark.slow
def test_the_commands_of_two_hosts_train(tools, tiny, tmp_path):
    environment = tools(tfaccum_train=TRAIN)
    addresses = workers.free_addresses(2)
    processes = []
    for words in by_hand():
        line = " ".join(words)
        for host, address in zip(("host1", "host2"), addresses, strict=True):
            line = line.replace(f"{host}:2222", address)
        line = line.replace("experiments/digits_cnn.py", str(tiny))
        processes.append(
            subprocess.Popen(
                f"exec {line} --model_dir={tmp_path / 'm'}",
                shell=True,
                cwd=tmp_path,
                env=environment,
            )
        )
    try:
        assert [process.wait(200) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert_trained(tmp_path / "m")


# --- Slurm ------------------------------------------------------------------


def test_the_sbatch_file_is_bash_and_asks_for_what_it_says():
    subprocess.run(["bash", "-n", SBATCH], check=True, timeout=60)
    lines = SBATCH.read_text().splitlines()
    # Slurm reads its options above the first command only.
    first = next(
        number for number, line in enumerate(lines) if line[:1] not in ("#", "")
    )
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(options) > 3 and max(options) < first
    assert lines[0] == "#!/bin/bash"


def test_the_sbatch_file_trains(tools, tiny, tmp_path):
    environment = tools(srun=SRUN, tfaccum_train=TRAIN)
    done = subprocess.run(
        ["bash", SBATCH, tiny, "--learning_rate=0.05"],
        cwd=tmp_path,
        env={**environment, "SLURM_JOB_ID": str(os.getpid())},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("x 2 replicas x 2 micro-steps") == 1
    assert_trained(tmp_path / f"runs/slurm-{os.getpid()}")


@pytest.mark.parametrize(
    ("code", "requeued"), [(75, "requeue 4711\n"), (1, None), (0, None)]
)
def test_the_sbatch_file_queues_again_what_was_asked_to_end(
    tools, tmp_path, code, requeued
):
    """And only that; the job ends with the code of its step."""
    noted = tmp_path / "scontrol"
    environment = tools(
        srun=f"#!{{python}}\nraise SystemExit({code})\n",
        scontrol="#!{python}\nimport os, sys\n"
        "print(*sys.argv[1:], file=open(os.environ['NOTED'], 'w'))\n",
    )
    done = subprocess.run(
        ["bash", SBATCH, "experiment.py"],
        env={**environment, "SLURM_JOB_ID": "4711", "NOTED": str(noted)},
        timeout=60,
    )
    assert done.returncode == code
    assert (noted.read_text() if noted.exists() else None) == requeued


# --- Kubernetes -------------------------------------------------------------


def only(pattern):
    """The one value that the manifest has."""
    values = set(re.findall(pattern, MANIFEST, re.MULTILINE))
    assert len(values) == 1, (pattern, values)
    return values.pop()


def test_the_manifest_is_plain_yaml():
    """Without a reader of YAML: indented by twos, keys and items only."""
    text = re.sub(r"^( *)- \|\n(?:\1  .*\n)+", "", MANIFEST, flags=re.MULTILINE)
    assert "exec" not in text
    for line in text.splitlines():
        assert re.fullmatch(
            r"---|(  )*(#.*|(- )?[\w./-]+:( (?!.*: )[^#]+)?|- [\w-]+)", line
        ), line


def test_the_numbers_and_names_of_the_manifest_agree():
    number = only(r"^  completions: (\d+)$")
    assert only(r"^  parallelism: (\d+)$") == number
    assert only(r'- name: NUM_WORKERS\n +value: "(\d+)"$') == number
    assert only(r"^  completionMode: (\w+)$") == "Indexed"
    name = only(r"^metadata:\n  name: (\w+)$")
    assert only(r"^      subdomain: (\w+)$") == name
    assert only(r"^    job-name: (\w+)$") == name
    assert only(r"^  clusterIP: (\w+)$") == "None"
    assert only(r"^  publishNotReadyAddresses: (\w+)$") == "true"
    assert only(r"^  backoffLimit: (\d+)$") == "0"
    assert "kind: Service\n" in MANIFEST and "kind: Job\n" in MANIFEST


def test_the_pods_form_one_cluster(tools):
    (snippet,) = re.findall(
        r"^            - \|\n((?: {14}.*\n)+)", MANIFEST, re.MULTILINE
    )
    environment = tools(tfaccum_train='#!/bin/sh\nprintf "%s\\n" "$@"\n')
    number = int(only(r"^  completions: (\d+)$"))
    found = []
    for index in range(number):
        done = subprocess.run(
            ["bash", "-euc", textwrap.dedent(snippet)],
            env={
                **environment,
                "NUM_WORKERS": str(number),
                "JOB_COMPLETION_INDEX": str(index),
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        flags = dict(line[2:].split("=") for line in done.stdout.splitlines())
        found.append(
            clusters.find(
                worker_hosts=flags["worker_hosts"].split(","),
                task_index=int(flags["task_index"]),
                environment={},
            )
        )
    assert [cluster.index for cluster in found] == list(range(number))
    assert {cluster.addresses for cluster in found} == {
        ("tfaccum-0.tfaccum:2222", "tfaccum-1.tfaccum:2222")
    }
    again = clusters.from_tf_config(found[1].tf_config())
    assert again.addresses == found[1].addresses


# --- The page tells the truth -----------------------------------------------


def test_the_messages_of_the_page_are_those_of_the_code():
    code = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        for path in (ROOT / "tfaccum").glob("*.py")
    )
    for text in (
        "must be there. ",
        "must reach ",
        "what answers there is not a worker of tfaccum that is starting",
        "must be free on its host",
        "The workers must agree on `",
        "code of tfaccum",
        "GPUs of a worker",
        "Each worker must have an index of its own. Received: index ",
        "The port of a worker must be from 1 to 65535",
        "must not be the host of a worker beside other hosts",
        "Each worker must have an address of its own",
    ):
        assert text in code, text
        assert text.rstrip() in PAGE, text
