"""The helper that starts worker processes, tried without TensorFlow."""

import os
import socket
import textwrap
import time

import pytest

from tests import workers


@pytest.fixture
def script(tmp_path):
    """Writes a worker program and returns its path."""

    def write(body):
        head = """\
            import json, os, sys, time
            config = json.loads(os.environ["TF_CONFIG"])
            index = config["task"]["index"]
            def result(value):
                with open(os.environ["TFACCUM_RESULT"], "w") as file:
                    json.dump(value, file)
            """
        path = tmp_path / "worker.py"
        path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        return path

    return write


def test_each_worker_has_its_index_arguments_and_result(script, run_workers):
    path = script("""\
        print("hello from", index)
        print("trouble", file=sys.stderr)
        result([index, sys.argv[1:], os.environ["MORE"], config["cluster"]])
        """)
    results = run_workers(
        path, 3, args=["--x", 1], env=lambda index: {"MORE": f"m{index}"}
    )
    addresses = results[0].result[3]["worker"]
    assert len(set(addresses)) == 3
    for index, worker in enumerate(results):
        assert worker.index == index and worker.returncode == 0
        assert worker.stdout == f"hello from {index}\n"
        assert worker.stderr == "trouble\n"
        assert worker.result == [
            index,
            ["--x", "1"],
            f"m{index}",
            {"worker": addresses},
        ]
    for address in addresses:
        host, port = address.split(":")
        assert host == "127.0.0.1"
        with socket.socket() as sock:
            sock.bind((host, int(port)))


def test_modules_run_and_a_missing_result_is_none(run_workers):
    (worker,) = run_workers("platform", 1)
    assert worker.stdout.strip() and worker.result is None


def test_timeout_names_who_had_not_finished_and_ends_them(script, run_workers):
    path = script("""\
        print("pid", os.getpid())
        if index == 1:
            time.sleep(600)
        """)
    started = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_workers(path, 2, timeout=2)
    message = str(error.value)
    assert time.monotonic() - started < 30
    assert "workers [1] had not finished (timeout 2 s)" in message
    assert "--- worker 0: exit status 0\nstdout: pid " in message
    assert "--- worker 1: had not finished, killed\nstdout: pid " in message
    for pid in (line.split()[-1] for line in message.splitlines()[2::2]):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_failed_worker_ends_the_wait_for_the_others(
    script, run_workers, monkeypatch
):
    monkeypatch.setattr(workers, "GRACE", 0.5)
    path = script("""\
        if index == 0:
            time.sleep(600)
        for line in range(100):
            print("line", line)
        sys.exit("no data")
        """)
    started = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_workers(path, 2, timeout=200)
    message = str(error.value)
    assert time.monotonic() - started < 100
    assert "workers [1] failed, workers [0] had not finished" in message
    assert "--- worker 1: exit status 1" in message
    assert "stderr: no data" in message
    assert "stdout: line 99" in message and "stdout: line 9\n" not in message


def test_exit_statuses_are_returned_where_they_are_expected(
    script, run_workers
):
    path = script("""\
        time.sleep(index)
        result(index)
        sys.exit(3 * index)
        """)
    results = run_workers(path, 2, check=False)
    assert [worker.returncode for worker in results] == [0, 3]
    assert [worker.result for worker in results] == [0, 1]


@pytest.mark.parametrize("times", [1, 2])
def test_a_taken_port_starts_the_cluster_once_more(script, tmp_path, times):
    path = script(f"""\
        tries = {str(tmp_path / "tries")!r}
        with open(tries, "a") as file:
            file.write(config["cluster"]["worker"][0] + "\\n")
        if len(open(tries).readlines()) <= {times}:
            sys.exit("bind: Address already in use")
        """)
    if times == 1:
        workers.run_workers(path, 1)
    else:
        with pytest.raises(AssertionError, match="already in use"):
            workers.run_workers(path, 1)
    assert len((tmp_path / "tries").read_text().splitlines()) == 2
