"""Runs checks by name on this worker and writes what came out of them.

A name is "module.function", of a module beside this one.
"""

import importlib
import json
import os
import sys
import time

import tfaccum


def check_of(name):
    module, _, function = name.rpartition(".")
    module = importlib.import_module(f"{__package__}.{module}")
    return getattr(module, function)


def main():
    strategy = tfaccum.make_strategy()
    results = {}
    for name in sys.argv[1:]:
        print(f"{time.process_time():.0f} s, begins {name}")
        results[name] = check_of(name)(strategy)
    with open(os.environ["TFACCUM_RESULT"], "w") as file:
        json.dump(results, file)
    print(f"{time.process_time():.0f} s, has ended")


main()
