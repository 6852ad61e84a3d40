"""The description of a cluster: read, refused, built."""

import json

import pytest

from tfaccum import cluster as clusters
from tfaccum.cluster import Cluster


def tf_config(workers, index=0, kind="worker", **more):
    """The text of TF_CONFIG."""
    return json.dumps(
        {
            "cluster": {"worker": workers, **more},
            "task": {"type": kind, "index": index},
        }
    )


def step(index=0, **changed):
    """The environment of a task of a Slurm step: two on n9, one on n10."""
    node, local = [(0, 0), (0, 1), (1, 0)][index]
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "n[9-10]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_PROCID": str(index),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        **changed,
    }


# --- TF_CONFIG --------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{}", '{"cluster": {}, "task": {}}'])
def test_no_cluster(text):
    assert clusters.from_tf_config(text) is None


@pytest.mark.parametrize(
    ("text", "addresses", "index"),
    [
        (tf_config(["a:1", "b:1"], 1), ("a:1", "b:1"), 1),
        (tf_config(["a:1"]), ("a:1",), 0),
        (tf_config(["127.0.0.1:1", "127.0.0.1:2"]), None, 0),
        (tf_config(["[::1]:1", "localhost:2"]), None, 0),
        (tf_config(["[fd00::1]:1", "10.0.0.1:1"], 1), None, 1),
        (tf_config(["b:1"], 0, chief=["a:1"]), ("a:1", "b:1"), 1),
        (tf_config(["b:1"], 0, "chief", chief=["a:1"]), ("a:1", "b:1"), 0),
    ],
)
def test_a_good_TF_CONFIG(text, addresses, index):
    found = clusters.from_tf_config(text)
    assert found.index == index
    if addresses:
        assert found.addresses == addresses
    again = clusters.from_tf_config(found.tf_config())
    assert again == found


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("{worker: here}", ["must be JSON", "{worker: here}", "host1:2222"]),
        ("[]", ["must be JSON with a cluster and a task", "TF_CONFIG='[]'"]),
        ('{"cluster": 3}', ['"cluster"', "Received: 3"]),
        (tf_config([]), ['"worker"', "Received: []"]),
        (tf_config("a:1"), ['"worker"', "Received: 'a:1'"]),
        (tf_config([1]), ['"worker"', "Received: [1]"]),
        (tf_config(["b:1"], chief=[]), ['"chief"', "Received: []"]),
        (tf_config(["b:1"], chief=["a:1", "c:1"]), ['"chief"', "one task"]),
        (tf_config(["a:1"], ps=["b:1"]), ["'ps'", "no parameter servers"]),
        (tf_config(["a:1"], 0, "evaluator"), ["'evaluator'", '"task"']),
        (tf_config(["a:1"], 0, None), ["Received: None"]),
        (tf_config(["a:1"], 0, "chief"), ["at least one worker"]),
        ('{"cluster": {"worker": ["a:1"]}}', ['"task"', "Received: None"]),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}',
            ["an index", "{'type': 'worker'}"],
        ),
        (tf_config(["a:1", "b:1"], "0"), ["an int", "'0'", "without quotes"]),
        (tf_config(["a:1", "b:1"], True), ["an int", "True"]),
        (tf_config(["a:1", "b:1"], 2), ["from 0 to 1", "index=2", "a:1, b:1"]),
        (tf_config(["a:1", "b:1"], -1), ["from 0 to 1", "index=-1"]),
        (tf_config(["a:0", "b:1"]), ["from 1 to 65535", "'a:0'", "worker 0"]),
        (tf_config(["a:1", "b:65536"]), ["'b:65536'", "worker 1", "choose"]),
        (tf_config(["a:http"]), ["from 1 to 65535", "'a:http'"]),
        (tf_config(["a:"]), ["from 1 to 65535", "'a:'"]),
        (tf_config(["a"]), ["host:port", "'a'", "host1:2222"]),
        (tf_config([":1"]), ["host:port", "':1'"]),
        (tf_config(["http://a:1"]), ["host:port", "'http://a:1'"]),
        (tf_config(["fd00::1:22"]), ["host:port", "[fd00::1]:2222"]),
        (tf_config(["0.0.0.0:1", "b:1"]), ["by which the others reach it"]),
        (tf_config(["a:1", "b:1", "A:1"]), ["of its own", "workers [0, 2]"]),
        (
            tf_config(["localhost:1", "b:1"]),
            ["'localhost'", "localhost:1, b:1", "by which the other hosts"],
        ),
        (tf_config(["a:1", "127.0.1.1:1"]), ["'127.0.1.1'", "that host itse"]),
        (tf_config(["[::1]:1", "b:1"]), ["'::1'"]),
        # Of the public report: both wrong, on two machines.
        (tf_config(["localhost:0000", "b:0000"]), ["'localhost:0000'", "port"]),
    ],
)
def test_M3_a_wrong_TF_CONFIG_is_refused_with_what_to_write(text, messages):
    with pytest.raises(ValueError) as error:
        clusters.from_tf_config(text)
    for message in ["Received: ", *messages]:
        assert message in str(error.value)


# --- Slurm ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu5", "gpu5"),
        ("node[01-03,07],gpu5", "node01 node02 node03 node07 gpu5"),
        ("n[9-11]", "n9 n10 n11"),
        ("a,b-c.d", "a b-c.d"),
        ("r[1-2]n[0,3]-ib", "r1n0-ib r1n3-ib r2n0-ib r2n3-ib"),
        ("n[098-101]", "n098 n099 n100 n101"),
    ],
)
def test_lists_of_hosts_are_expanded(text, hosts):
    assert clusters.expand_hosts(text) == hosts.split()


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a[1-2", "a]", "a[x]", "a[]", "a[1-]", "a[1-2[3]]"]
)
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST must be a list"):
        clusters.expand_hosts(text)


def test_lists_of_counts_are_expanded():
    assert clusters.expand_counts("4") == [4]
    assert clusters.expand_counts("2(x3),1") == [2, 2, 2, 1]
    for text in ("", "x", "2(x)", "2,,1", "-1"):
        with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE"):
            clusters.expand_counts(text)


def test_a_step_is_a_cluster_in_the_order_of_its_tasks():
    found = [clusters.from_slurm(step(index)) for index in range(3)]
    assert {cluster.addresses for cluster in found} == {found[0].addresses}
    assert [cluster.index for cluster in found] == [0, 1, 2]
    hosts, ports = zip(
        *map(clusters.host_and_port, found[0].addresses), strict=True
    )
    # By text, n10 would come before n9.
    assert hosts == ("n9", "n9", "n10")
    assert (ports[1], ports[2]) == (ports[0] + 1, ports[0])


def test_steps_on_one_host_do_not_meet():
    def port(job, number):
        env = step(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(number))
        return clusters.host_and_port(clusters.from_slurm(env).address)[1]

    ports = {port(4711, 0), port(4711, 1), port(4712, 0), port(4712, 1)}
    assert len(ports) == 4
    assert min(abs(a - b) for a in ports for b in ports if a != b) >= 16
    assert 10_000 <= port(2**32 - 1, 4294967290) < 32_000


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "2 hosts, tasks per host [2]"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4"),
        ({"SLURM_PROCID": "1"}, "--distribution=block"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID must be a number"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(changed, message):
    with pytest.raises(ValueError) as error:
        clusters.from_slurm(step(**changed))
    assert message in str(error.value)
    assert "Received: " in str(error.value)


def test_an_sbatch_script_outside_srun_waits_for_nobody():
    env = step()
    for name in list(env):
        if "STEP" in name:
            del env[name]
    env |= {"SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "n[9-10]"}
    assert clusters.find(environment=env) is None
    with pytest.raises(ValueError, match="Put srun before the command"):
        clusters.find("slurm", environment=env)


# --- Which description ------------------------------------------------------


CONFIG = {"TF_CONFIG": tf_config(["a:1", "b:1"])}
HOSTS = {"worker_hosts": ["c:1", "d:1"], "task_index": 1}


@pytest.mark.parametrize(
    ("source", "given", "environment", "expected"),
    [
        ("auto", {}, {}, None),
        ("auto", {}, CONFIG, "TF_CONFIG"),
        ("auto", {}, step(), "Slurm"),
        ("auto", {}, {**CONFIG, **step()}, "TF_CONFIG"),
        ("auto", HOSTS, {}, "--worker_hosts"),
        ("auto", HOSTS, step(), "--worker_hosts"),
        ("auto", HOSTS, {"TF_CONFIG": "{}"}, "--worker_hosts"),
        ("none", {}, {**CONFIG, **step()}, None),
        ("tf_config", {}, {**CONFIG, **step()}, "TF_CONFIG"),
        ("slurm", {}, {**CONFIG, **step()}, "Slurm"),
        (
            "auto",
            {},
            step(
                SLURM_STEP_NUM_TASKS="1",
                SLURM_STEP_NODELIST="n9",
                SLURM_STEP_TASKS_PER_NODE="1",
            ),
            None,
        ),
    ],
)
def test_where_a_cluster_is_found(source, given, environment, expected):
    found = clusters.find(source, environment=environment, **given)
    assert (found and found.source) == expected


@pytest.mark.parametrize(
    ("source", "given", "environment", "message"),
    [
        ("auto", HOSTS, CONFIG, "--worker_hosts=c:1,d:1 and TF_CONFIG="),
        ("none", HOSTS, {}, "--worker_hosts=c:1,d:1 and --cluster=none"),
        ("slurm", HOSTS, {}, "--worker_hosts=c:1,d:1 and --cluster=slurm"),
        ("tf_config", {}, step(), "Received: no TF_CONFIG"),
        ("auto", {"task_index": 0}, {}, "Received: --task_index=0"),
        ("auto", {"worker_hosts": ["a:1"]}, {}, "--worker_hosts=a:1"),
        ("nowhere", {}, {}, "Received: 'nowhere'"),
        ("auto", {**HOSTS, "task_index": 2}, {}, "from 0 to 1"),
        ("auto", {**HOSTS, "worker_hosts": []}, {}, "at least one worker"),
    ],
)
def test_descriptions_that_conflict_are_refused(
    source, given, environment, message
):
    with pytest.raises(ValueError) as error:
        clusters.find(source, environment=environment, **given)
    assert message in str(error.value)


def test_a_worker_has_a_name():
    cluster = Cluster(("a:1", "b:2"), 1, "a test")
    assert (cluster.address, cluster.num_workers) == ("b:2", 2)
    assert cluster.name(0) == "worker 0 (a:1)"
