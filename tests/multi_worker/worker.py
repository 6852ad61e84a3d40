"""Runs checks by name on this worker and writes what came out of them.

A name is "module.function", of a module beside this one. "replicas=2" ahead
of them makes so many replicas on this worker.
"""

import importlib
import json
import os
import sys
import time

from tests import toy


def check_of(name):
    module, _, function = name.rpartition(".")
    module = importlib.import_module(f"{__package__}.{module}")
    return getattr(module, function)


def main():
    names = sys.argv[1:]
    replicas = 1
    if names[0].startswith("replicas="):
        replicas = int(names.pop(0).partition("=")[2])
    strategy = toy.worker_strategy(replicas)
    results = {}
    for name in names:
        print(f"{time.process_time():.0f} s, begins {name}")
        results[name] = check_of(name)(strategy)
    with open(os.environ["TFACCUM_RESULT"], "w") as file:
        json.dump(results, file)
    print(f"{time.process_time():.0f} s, has ended")


main()
