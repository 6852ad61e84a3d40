"""Runs checks by name on this worker and writes what came out of them.

A name is that of a function of `checks`, or "module.function" of another
module beside it.
"""

import importlib
import json
import os
import sys
import time

import tfaccum


def check_of(name):
    module, _, function = name.rpartition(".")
    module = importlib.import_module(f"{__package__}.{module or 'checks'}")
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
